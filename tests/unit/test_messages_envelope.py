"""Reading a request's properties, and telling a repeat from another request."""

import datetime
import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import envelope, errors

ADDRESS = "host-a@fast"
ID = uuid.UUID("6f2c1c52-6a8e-4b61-9f0c-0d6f5a0a9a11")
HEADERS = ("deadline", "status-updates", "parent-job", "traceparent")


def read(
    message_id: str | None = str(ID),
    reply_to: str | None = None,
    correlation_id: str | None = None,
    **headers: Any,
) -> envelope.Properties:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return envelope.read_properties(message_id, reply_to, correlation_id, named)


def fingerprint(method: str, args: Any, address: str = ADDRESS, **dump: Any) -> bytes:
    body = json.dumps({"method": method, "version": "1.0", "args": args}, **dump)
    return envelope.read_body(body.encode(), 10_000, address).fingerprint


def test_the_message_id_is_the_jobs_id() -> None:
    assert read().message_id == ID


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_message_id_is_made(missing: str | None) -> None:
    first, second = read(missing), read(missing)
    assert first.message_id != second.message_id
    assert first.correlation_id == str(first.message_id)


@pytest.mark.parametrize("text", ["x", "6f2c1c52", str(ID) + "0", "6f2c1c52_6a8e", "\0"])
def test_a_message_id_that_is_no_uuid_is_malformed(text: str) -> None:
    with pytest.raises(envelope.Malformed) as refused:
        read(text)
    assert refused.value.details["member"] == "message_id"


def test_a_missing_correlation_id_is_the_message_id() -> None:
    assert read(correlation_id=None).correlation_id == str(ID)
    assert read(correlation_id="").correlation_id == str(ID)
    assert read(correlation_id="mine").correlation_id == "mine"


def test_without_reply_to_it_is_a_cast() -> None:
    assert read(reply_to=None).reply_to is None
    assert read(reply_to="").reply_to is None
    assert read(reply_to="q").reply_to == "q"


def test_all_headers_are_optional() -> None:
    properties = read()
    assert properties.deadline is None
    assert properties.parent_job is None
    assert properties.traceparent is None
    assert properties.status_updates is False


@pytest.mark.parametrize(
    "text",
    ["2026-03-01T12:30:00Z", "2026-03-01T12:30:00.000+00:00", "2026-03-01T14:30:00+02:00"],
)
def test_a_deadline_is_a_moment_whatever_its_zone(text: str) -> None:
    moment = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
    assert read(deadline=text).deadline == moment


@pytest.mark.parametrize(
    "value",
    ["", "soon", "2026-03-01T12:30:00", "2026-03-01", 1772368200, 1.5, True, b"x", [], {}],
)
def test_a_deadline_that_is_no_moment_is_refused(value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        read(deadline=value)
    assert refused.value.details["member"] == "deadline"
    assert not isinstance(refused.value, envelope.Malformed)


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+23:00"])
def test_a_deadline_that_is_no_moment_in_utc_is_refused(text: str) -> None:
    # The store and every later comparison turn it into UTC.
    with pytest.raises(errors.InvalidRequest):
        read(deadline=text)


@pytest.mark.parametrize("value", ["true", 1, 0, "", b"x", []])
def test_status_updates_is_a_boolean(value: Any) -> None:
    assert read(status_updates=True).status_updates is True
    with pytest.raises(errors.InvalidRequest) as refused:
        read(status_updates=value)
    assert refused.value.details["member"] == "status-updates"


@pytest.mark.parametrize("value", ["", "x", 5, b"x", [], False])
def test_a_parent_job_is_a_jobs_id(value: Any) -> None:
    assert read(parent_job=str(ID)).parent_job == ID
    with pytest.raises(errors.InvalidRequest) as refused:
        read(parent_job=value)
    assert refused.value.details["member"] == "parent-job"


@pytest.mark.parametrize("value", ["x" * 513, "a\nb", 5, b"x", []])
def test_a_traceparent_is_a_short_text(value: Any) -> None:
    assert read(traceparent="00-ab-cd-01").traceparent == "00-ab-cd-01"
    with pytest.raises(errors.InvalidRequest) as refused:
        read(traceparent=value)
    assert refused.value.details["member"] == "traceparent"


# What AMQP's tables can hold.
FIELDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text(max_size=50)
    | st.binary(max_size=50)
    | st.datetimes(timezones=st.just(datetime.UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.none() | st.text() | st.uuids().map(str),
    st.none() | st.text(),
    st.none() | st.text(),
    st.dictionaries(st.sampled_from(HEADERS) | st.text(), FIELDS, max_size=5),
)
def test_no_properties_raise_anything_but_invalid_request(
    message_id: str | None, reply_to: str | None, correlation_id: str | None, headers: Any
) -> None:
    try:
        properties = envelope.read_properties(message_id, reply_to, correlation_id, headers)
    except errors.InvalidRequest as error:
        json.dumps(error.to_wire(), allow_nan=False)
    else:
        assert properties.correlation_id


# Repeats


def test_the_same_request_written_another_way_is_the_same() -> None:
    connector = {"host": "b", "initiator": "iqn.1994-05.com.example:b"}
    first = fingerprint("initialize_connection", {"volume_id": str(ID), "connector": connector})
    turned = dict(reversed(connector.items()))
    second = fingerprint(
        "initialize_connection", {"connector": turned, "volume_id": str(ID)}, indent=3
    )
    assert first == second


def test_another_method_address_or_args_is_another_request() -> None:
    args = {"volume_id": str(ID)}
    prints = {
        fingerprint("get_volume", args),
        fingerprint("delete_volume", args),
        fingerprint("delete_volume", args, address="host-b@fast"),
        fingerprint("delete_volume", {**args, "cascade": True}),
        fingerprint("delete_volume", {**args, "cascade": False}),
        fingerprint("get_volume", {"volume_id": str(uuid.uuid4())}),
    }
    assert len(prints) == 6


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(), max_size=4))
def test_a_fingerprint_does_not_depend_on_the_order_of_members(args: dict[str, Any]) -> None:
    if "\0" in "".join([*args, *(value for value in args.values() if isinstance(value, str))]):
        return
    turned = dict(reversed(args.items()))
    assert fingerprint("backup_volume", args) == fingerprint("backup_volume", turned)


def test_a_text_that_says_backslash_u_0000_is_no_nul_character() -> None:
    assert envelope.parse_json(rb'{"a": "\\u0000"}') == {"a": "\\u0000"}
    with pytest.raises(envelope.Malformed):
        envelope.parse_json(rb'{"a": "\u0000"}')
    with pytest.raises(envelope.Malformed):
        envelope.parse_json(rb'{"a": [{"b": "\\\u0000"}]}')
