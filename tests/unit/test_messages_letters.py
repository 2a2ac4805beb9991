"""Dead letters: kept as JSON data, given back as they came."""

import base64
import datetime
import decimal
import json
import types
from typing import Any

import aio_pika
import pamqp.decode
import pamqp.encode
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import errors, letters

PROPERTIES = (
    "content_type",
    "content_encoding",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "app_id",
)


def incoming(headers: Any = None, **properties: Any) -> Any:
    """A message as it comes from the broker: what was not set is None."""
    names = [*PROPERTIES, "user_id", "timestamp", "expiration", "delivery_mode"]
    empty = dict.fromkeys(names)
    return types.SimpleNamespace(**{**empty, **properties}, headers=headers)


def there_and_back(message: Any, **added: Any) -> aio_pika.Message:
    kept = letters.keep_properties(message)
    # As strict as PostgreSQL's jsonb is.
    stored = json.dumps(kept, allow_nan=False)
    assert "\\u0000" not in stored
    return letters.restore(b"body", json.loads(stored), added)


def test_a_letter_has_the_body_and_properties_that_it_came_with() -> None:
    message = incoming(
        {"deadline": "2026-03-01T12:30:00Z", "status-updates": True},
        message_id="m",
        reply_to="q",
        correlation_id="c",
        content_type="text/plain",
        content_encoding="gzip",
        type="t",
        app_id="a",
        priority=3,
    )
    back = there_and_back(message)
    assert back.body == b"body"
    assert back.headers == message.headers
    assert {name: getattr(back, name) for name in PROPERTIES} == {
        name: getattr(message, name) for name in PROPERTIES
    }


def test_the_time_at_which_it_was_sent_is_kept() -> None:
    moment = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
    assert there_and_back(incoming(timestamp=moment)).timestamp == moment


def test_a_letter_is_persistent_and_does_not_expire() -> None:
    back = there_and_back(incoming(delivery_mode=1, expiration=1.0))
    assert back.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert back.expiration is None


def test_the_user_is_left_away_since_the_broker_compares_it_with_who_publishes() -> None:
    assert there_and_back(incoming(user_id="guest")).user_id is None


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\xff",
        "a\0b",
        "",
        "ünïcödé",
        datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC),
        {"nested": {"bytes": b"\xff", "list": [1, {"x": b"y"}]}},
        [b"a", "b\0", None],
        2**63 - 1,
        -(2**63),
        1.5,
        True,
        None,
        {},
        [],
    ],
)
def test_a_header_of_any_kind_comes_back_as_it_was(value: Any) -> None:
    assert there_and_back(incoming({"h": value})).headers == {"h": value}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_does_not_have_can_be_kept(value: float) -> None:
    back = there_and_back(incoming({"h": value}))
    assert repr(back.headers["h"]) == repr(value)


@pytest.mark.parametrize("value", [0.1, -0.0, 1e300, 2.0**63, 1e16, 5e-324])
def test_a_number_is_no_other_after_it_was_in_a_jsonb(value: float) -> None:
    kept = letters.keep_properties(incoming({"h": [value]}))
    # Which writes numbers out, and so makes whole ones of them.
    in_jsonb = json.loads(json.dumps(kept), parse_float=lambda text: int(decimal.Decimal(text)))
    back = letters.restore(b"", in_jsonb, {}).headers["h"]
    assert repr(back) == repr([value])


def test_a_letter_can_do_without_its_senders_headers_and_says_so() -> None:
    kept = letters.keep_properties(incoming({"a": "x", "b": 1, "reason": "old"}, message_id="m"))
    back = letters.restore_without_headers(b"body", kept, {"reason": "new", "job-id": None})
    assert (back.body, back.message_id) == (b"body", "m")
    assert back.headers == {"reason": "new", "headers-left-out": 2}
    # What is sent again from it does not carry this on.
    assert there_and_back(incoming(back.headers)).headers == {}


def test_a_decimal_can_be_kept() -> None:
    back = there_and_back(incoming({"h": decimal.Decimal("1.25")}))
    assert str(back.headers["h"]) == "1.25"


@pytest.mark.parametrize(
    "table",
    [
        {"$bytes": "not base64!"},
        {"$bytes": base64.b64encode(b"x").decode()},
        {"$text": "not base64!"},
        {"$text": base64.b64encode(b"x").decode()},
        {"$time": "yesterday"},
        {"$time": "2026-03-01T12:30:00+00:00"},
        {"$bytes": "", "more": 1},
    ],
)
def test_a_table_that_looks_like_the_stored_form_comes_back_as_it_was(table: Any) -> None:
    assert there_and_back(incoming({"h": table})).headers == {"h": table}


def test_a_callers_own_header_beginning_with_x_is_kept_and_the_brokers_are_not() -> None:
    headers = {"x-request-id": "r", "x-death": [{"count": 1}], "x-delivery-count": 3}
    assert there_and_back(incoming(headers)).headers == {"x-request-id": "r"}


def test_the_reasons_of_an_earlier_death_are_replaced() -> None:
    first = letters.reason_headers(
        error=errors.TargetError("first"), origin="a@b", job_id="j", attempts=5
    )
    second = letters.reason_headers(error=errors.InvalidRequest("second"), origin="c@d")
    back = there_and_back(incoming({**first, "mine": 1}), **second)
    assert back.headers["reason"] == "InvalidRequest"
    assert back.headers["origin"] == "c@d"
    assert back.headers["last-error"] == "second"
    assert back.headers["mine"] == 1
    assert "job-id" not in back.headers


HISTORY: dict[str, Any] = {
    "replays": 12,
    "attempts": 55,
    "lives": [
        {
            "code": "TargetError",
            "message": f"--password hunter2 {number} " + "x" * 1000,
            "attempts": 5,
            "finished_at": "2026-03-01T12:30:00.000000Z",
        }
        for number in range(10)
    ],
}


def test_the_letter_of_a_job_that_was_replayed_tells_of_its_earlier_lives() -> None:
    headers = letters.reason_headers(
        error=errors.TargetError("again"), origin="a@b", job_id="j", attempts=5, history=HISTORY
    )
    assert (headers["attempts"], headers["replays"]) == (60, 12)
    assert headers["last-error"] == "again"
    lives = headers["replay-history"]
    assert [life["attempts"] for life in lives] == [5] * 10
    assert lives[3]["reason"] == "TargetError"
    assert lives[3]["failed-at"] == "2026-03-01T12:30:00.000000Z"
    assert "hunter2" not in str(headers)
    assert len(str(headers)) < 5000
    # A table of AMQP can hold it.
    assert pamqp.decode.field_table(pamqp.encode.field_table(headers))[1] == headers


def test_a_letter_inherits_no_history() -> None:
    headers = letters.reason_headers(error=errors.TargetError("x"), origin="a@b", history=HISTORY)
    assert there_and_back(incoming({**headers, "mine": 1})).headers == {"mine": 1}


def test_a_letter_sent_again_is_a_request_without_the_deadline_that_it_had() -> None:
    message = incoming(
        {"deadline": "2020-01-01T00:00:00Z", "reason": "X", "x-death": [{}], "mine": 1},
        body=b"{}",
        message_id="m",
        reply_to="q",
        correlation_id="c",
        content_type="text/odd",
        expiration=5.0,
    )
    again = letters.as_request(message, b"{}", message_id="m")
    assert again.headers == {"mine": 1}
    assert (again.body, again.message_id, again.reply_to, again.correlation_id) == (
        b"{}", "m", "q", "c",
    )  # fmt: skip
    assert (again.content_type, again.expiration) == ("text/odd", None)
    assert again.delivery_mode == aio_pika.DeliveryMode.PERSISTENT


def test_a_caller_without_a_correlation_id_is_answered_under_the_id_that_it_sent() -> None:
    message = incoming(None, body=b"{", message_id="odd", content_encoding="gzip")
    again = letters.as_request(message, b"{}", message_id="new")
    assert (again.message_id, again.correlation_id) == ("new", "odd")
    # What was edited is JSON, whatever it was before.
    assert (again.content_type, again.content_encoding) == ("application/json", None)


# What a table of AMQP 0-9-1 can hold, once decoded.
FIELDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.datetimes(
        min_value=datetime.datetime(1970, 1, 1),
        timezones=st.just(datetime.UTC),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["$bytes", "$text", "$time"]), inner
        )
    ),
    max_leaves=8,
)
NAMES = st.text(max_size=20).filter(
    lambda name: name not in letters.REASON_HEADERS and not name.startswith("x-")
)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(NAMES, FIELDS, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.text(min_size=1, max_size=20)
            for name in ("correlation_id", "reply_to", "message_id", "type")
        },
    ),
)
def test_headers_and_properties_survive_being_stored(
    headers: dict[str, Any], properties: dict[str, str]
) -> None:
    back = there_and_back(incoming(headers, **properties))
    assert back.headers == headers
    for name, value in properties.items():
        assert getattr(back, name) == value


@settings(deadline=None)
@given(st.text())
def test_the_last_error_is_short_whatever_was_said(text: str) -> None:
    headers = letters.reason_headers(error=errors.TargetError(text), origin="a@b")
    assert len(headers["last-error"]) <= 1000
