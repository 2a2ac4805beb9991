"""Requests of every method: examples that are accepted, and examples that are not."""

import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import envelope, errors, requests
from tests.contract import schema

ADDRESS = "host-a@fast"
LIMIT = 1024 * 1024
ID = "6f2c1c52-6a8e-4b61-9f0c-0d6f5a0a9a11"
OTHER = "7f2c1c52-6a8e-4b61-9f0c-0d6f5a0a9a12"
CONNECTOR = {
    "host": "host-b",
    "ip": "192.0.2.7",
    "initiator": "iqn.1994-05.com.example:b",
    "nqn": "nqn.2014-08.org.nvmexpress:uuid:b",
    "wwpns": ["500143802426baf4"],
    "wwnns": ["500143802426baf5"],
    "multipath": False,
    "mode": "ro",
    "connection_key": "k",
    "do_local_attach": True,
    "os_type": "linux",
    "nested": {"kept": [1, 2.5, None]},
}

ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "create_volume": [
        {"volume": {"name": "v", "size_bytes": 1}},
        {"volume": {"id": ID, "name": "ü" * 127, "size_bytes": 2**63 - 1, "metadata": {"a": "b"}}},
    ],
    "delete_volume": [{"volume_id": ID}, {"volume_id": ID, "cascade": True}],
    "reconcile": [{}, {"repair": True}],
    "extend_volume": [{"volume_id": ID, "new_size_bytes": 5 * 2**30}],
    "create_export": [{"volume_id": ID}],
    "ensure_export": [{"volume_id": ID}],
    "remove_export": [{"volume_id": ID}],
    "validate_connector": [{"connector": {}}, {"connector": CONNECTOR}],
    "initialize_connection": [{"volume_id": ID, "connector": CONNECTOR}],
    "terminate_connection": [
        {"volume_id": ID, "connector": CONNECTOR},
        {"volume_id": ID, "connection_id": OTHER},
        {"volume_id": ID, "connector": None, "force": True},
        {"volume_id": ID, "force": True},
    ],
    "attach_volume": [
        {"volume_id": ID, "mountpoint": "/dev/vdb"},
        {
            "volume_id": ID,
            "instance_uuid": OTHER,
            "host_name": "host-b",
            "mountpoint": "/dev/vdb",
            "mode": "ro",
        },
        {"volume_id": ID, "instance_uuid": None, "host_name": None, "mountpoint": "/dev/vdb"},
    ],
    "detach_volume": [{"volume_id": ID}, {"volume_id": ID, "attachment_id": OTHER}],
    "copy_volume_data": [
        {"source_volume_id": ID, "destination_volume_id": OTHER},
        {
            "source_volume_id": ID,
            "destination_volume_id": OTHER,
            "remote": "both",
            "verify": False,
            "bytes_per_second": 1,
        },
        {"source_volume_id": ID, "destination_volume_id": OTHER, "remote": None},
        {"source_volume_id": ID, "destination_volume_id": OTHER, "remote": "src"},
        {"source_volume_id": ID, "destination_volume_id": OTHER, "remote": "dest"},
    ],
    "get_volume_stats": [{}, {"refresh": True}],
    "get_volume": [{"volume_id": ID}],
    "get_job": [{"job_id": ID}],
    "cancel_job": [{"job_id": ID}],
    "throttle_job": [
        {"job_id": ID, "bytes_per_second": None},
        {"job_id": ID, "bytes_per_second": 1},
    ],
    "list_volumes": [
        {},
        {"status": "available", "all": True, "limit": 1000, "after": ID},
        {"status": None, "after": None},
    ],
    "list_jobs": [
        {},
        {"state": "dead", "volume_id": ID, "all": True, "limit": 1, "after": ID},
    ],
}

CONTROL = "a\x00b"
REFUSED: list[tuple[str, Any, str]] = [
    # Every method refuses what is no object and members that it does not know.
    *((method, [], "args") for method in sorted(ACCEPTED)),
    *(
        (method, {**examples[0], "unknown": 1}, "args.unknown")
        for method, examples in sorted(ACCEPTED.items())
    ),
    # Ids.
    ("get_volume", {}, "args.volume_id"),
    ("get_volume", {"volume_id": None}, "args.volume_id"),
    ("get_volume", {"volume_id": 5}, "args.volume_id"),
    ("get_volume", {"volume_id": ""}, "args.volume_id"),
    ("get_volume", {"volume_id": "../../etc/passwd"}, "args.volume_id"),
    ("get_volume", {"volume_id": ID.replace("-", "")}, "args.volume_id"),
    ("get_volume", {"volume_id": f"{{{ID[:-2]}}}"}, "args.volume_id"),
    ("get_volume", {"volume_id": f"urn:uuid:{ID}"}, "args.volume_id"),
    ("get_volume", {"volume_id": ID + "\n"}, "args.volume_id"),
    ("get_job", {"job_id": "x"}, "args.job_id"),
    ("cancel_job", {}, "args.job_id"),
    ("cancel_job", {"job_id": "x"}, "args.job_id"),
    # Its absence may be a slip: what takes a limit away is said.
    ("throttle_job", {"job_id": ID}, "args.bytes_per_second"),
    ("throttle_job", {"job_id": ID, "bytes_per_second": 0}, "args.bytes_per_second"),
    ("throttle_job", {"job_id": ID, "bytes_per_second": 1.5}, "args.bytes_per_second"),
    # Names.
    *(
        (
            "create_volume",
            {"volume": {"name": name, "size_bytes": 1}},
            "args.volume.name",
        )
        for name in (
            "",
            "-rf",
            "a/b",
            "..",
            "a..b",
            "a\nb",
            "a\x1bb",
            "a\x7fb",
            "a\x85b",
            "x" * 256,
            "ü" * 128,
            5,
            None,
            ["v"],
        )
    ),
    # Sizes.
    *(
        ("create_volume", {"volume": {"name": "v", "size_bytes": size}}, "args.volume.size_bytes")
        for size in (0, -1, 2**63, 1.5, 1.0, "1", True, None)
    ),
    ("create_volume", {"volume": {"name": "v"}}, "args.volume.size_bytes"),
    ("create_volume", {"volume": "v"}, "args.volume"),
    ("create_volume", {"volume": {"name": "v", "size_bytes": 1, "size": 1}}, "args.volume.size"),
    (
        "create_volume",
        {"volume": {"name": "v", "size_bytes": 1, "metadata": {"a": 1}}},
        "args.volume.metadata.a",
    ),
    (
        "create_volume",
        {"volume": {"name": "v", "size_bytes": 1, "metadata": {"a": "b\x07"}}},
        "args.volume.metadata.a",
    ),
    (
        "create_volume",
        {"volume": {"name": "v", "size_bytes": 1, "metadata": [["a", "b"]]}},
        "args.volume.metadata",
    ),
    ("extend_volume", {"volume_id": ID, "new_size_bytes": "1G"}, "args.new_size_bytes"),
    ("extend_volume", {"volume_id": ID, "new_size_bytes": 0}, "args.new_size_bytes"),
    # Booleans are no numbers and no texts.
    ("delete_volume", {"volume_id": ID, "cascade": "yes"}, "args.cascade"),
    ("delete_volume", {"volume_id": ID, "cascade": 1}, "args.cascade"),
    ("get_volume_stats", {"refresh": "true"}, "args.refresh"),
    # Connectors.
    ("validate_connector", {"connector": None}, "args.connector"),
    ("validate_connector", {"connector": {"mode": "wr"}}, "args.connector.mode"),
    ("validate_connector", {"connector": {"host": 5}}, "args.connector.host"),
    ("validate_connector", {"connector": {"wwpns": "a"}}, "args.connector.wwpns"),
    ("validate_connector", {"connector": {"connection_key": 1}}, "args.connector.connection_key"),
    (
        "validate_connector",
        {"connector": {"connection_key": "a\nb"}},
        "args.connector.connection_key",
    ),
    ("validate_connector", {"connector": {"do_local_attach": 1}}, "args.connector.do_local_attach"),
    ("validate_connector", {"connector": {"initiator": "x" * 1025}}, "args.connector.initiator"),
    ("initialize_connection", {"volume_id": ID}, "args.connector"),
    ("terminate_connection", {"volume_id": ID}, "args"),
    ("terminate_connection", {"volume_id": ID, "connector": None, "force": False}, "args"),
    ("terminate_connection", {"volume_id": ID, "connector": {}, "connection_id": ID}, "args"),
    # Attachments.
    ("attach_volume", {"volume_id": ID}, "args.mountpoint"),
    ("attach_volume", {"volume_id": ID, "mountpoint": ""}, "args.mountpoint"),
    ("attach_volume", {"volume_id": ID, "mountpoint": "a\tb"}, "args.mountpoint"),
    ("attach_volume", {"volume_id": ID, "mountpoint": "/x", "mode": "w"}, "args.mode"),
    ("attach_volume", {"volume_id": ID, "mountpoint": "/x", "host_name": 1}, "args.host_name"),
    ("detach_volume", {"volume_id": ID, "attachment_id": "x"}, "args.attachment_id"),
    # Copies.
    (
        "copy_volume_data",
        {"source_volume_id": ID, "destination_volume_id": OTHER, "remote": "source"},
        "args.remote",
    ),
    (
        "copy_volume_data",
        {"source_volume_id": ID, "destination_volume_id": OTHER, "bytes_per_second": 0},
        "args.bytes_per_second",
    ),
    (
        "copy_volume_data",
        {"source_volume_id": ID, "destination_volume_id": OTHER, "verify": "no"},
        "args.verify",
    ),
    ("copy_volume_data", {"source_volume_id": ID}, "args.destination_volume_id"),
    # Lists.
    ("list_volumes", {"limit": 0}, "args.limit"),
    ("list_volumes", {"limit": 1001}, "args.limit"),
    ("list_volumes", {"limit": "10"}, "args.limit"),
    ("list_volumes", {"after": "x"}, "args.after"),
    ("list_volumes", {"status": "good"}, "args.status"),
    ("list_volumes", {"volume_id": ID}, "args.volume_id"),
    ("list_volumes", {"all": 1}, "args.all"),
    ("list_jobs", {"state": "done"}, "args.state"),
]


def request(method: Any, args: Any, **changed: Any) -> bytes:
    return json.dumps({"method": method, "version": "1.0", "args": args, **changed}).encode()


def read(body: bytes) -> envelope.Body:
    return envelope.read_body(body, LIMIT, ADDRESS)


def test_there_are_examples_of_every_method_that_is_carried_out() -> None:
    carried_out = {
        name
        for name, method in requests.METHODS.items()
        if method.kind is not requests.Kind.UNSUPPORTED
    }
    assert set(ACCEPTED) == carried_out


@pytest.mark.parametrize(
    ("method", "args"),
    [(method, args) for method, examples in ACCEPTED.items() for args in examples],
)
def test_an_example_is_accepted_and_fits_its_schema(method: str, args: dict[str, Any]) -> None:
    body = request(method, args)
    assert schema.faults(json.loads(body), schema.message("request")) == []
    assert schema.faults(args, schema.args(method)) == []
    assert read(body).method.name == method


@pytest.mark.parametrize(("method", "args", "member"), REFUSED)
def test_a_bad_argument_is_refused_and_its_member_named(
    method: str, args: Any, member: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        read(request(method, args))
    error = refused.value.to_wire()
    assert error["details"]["member"] == member
    assert member in error["message"]
    assert not error["retryable"]
    # A call with a bad argument hears of it, and leaves no dead letter.
    assert not isinstance(refused.value, envelope.Malformed)


@pytest.mark.parametrize("method", sorted(set(requests.METHODS) - set(ACCEPTED)))
def test_a_method_that_is_not_carried_out_is_read_all_the_same(method: str) -> None:
    assert read(request(method, {})).method.kind is requests.Kind.UNSUPPORTED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b'"create_volume"',
        b"{",
        b"\xff\xfe",
        b'{"method": "get_volume"}',
        b'{"version": "1.0", "args": {}}',
        b'{"method": "get_volume", "version": "1.0"}',
        request("get_volume", {}, more=1),
        request("get_volume", {}, namespace=None),
        request(5, {}),
        request(None, {}),
        request("get_volume", {}, version=1.0),
        request("get_volume", {}, version=None),
        request("get_volume", {}, version="1"),
        request("get_volume", {}, version="one.zero"),
        request("get_volume", {}, version="-1.0"),
        request("get_volume", {}, version="1.0.0"),
        request("get_volume", {}, version="¹.0"),
        request("get_volume", {}) + b"x",
        request("create_volume", {"volume": {"name": CONTROL, "size_bytes": 1}}),
        request("initialize_connection", {"volume_id": ID, "connector": {"x": [{"y": CONTROL}]}}),
        request("initialize_connection", {"volume_id": ID, "connector": {CONTROL: 1}}),
        b'{"method": "get_volume", "version": "1.0", "args": {"a": NaN}}',
        b'{"method": "get_volume", "version": "1.0", "args": {"a": Infinity}}',
        b'{"method": "get_volume", "version": "1.0", "args": {"a": "\\ud800"}}',
        b'{"method": "cancel_job", "version": "1.0", "args": ' + b"[" * 500 + b"]" * 500 + b"}",
    ],
)
def test_what_is_no_request_at_all_is_malformed(body: bytes) -> None:
    with pytest.raises(envelope.Malformed) as refused:
        read(body)
    assert refused.value.code == "InvalidRequest"


def test_a_number_that_json_data_cannot_hold_is_malformed() -> None:
    # It would be read as infinity, which is no JSON when it is sent on or stored.
    with pytest.raises(envelope.Malformed):
        read(b'{"method": "cancel_job", "version": "1.0", "args": {"a": 1e999}}')


def test_a_body_beyond_the_limit_is_malformed_and_one_at_the_limit_is_not() -> None:
    body = request("get_volume", {"volume_id": ID})
    assert envelope.read_body(body, len(body), ADDRESS)
    with pytest.raises(envelope.Malformed, match="at most"):
        envelope.read_body(body, len(body) - 1, ADDRESS)


@pytest.mark.parametrize("method", ["", "create", "CREATE_VOLUME", "__class__", "create_volume "])
def test_an_unknown_method_is_told_as_one(method: str) -> None:
    with pytest.raises(errors.UnknownMethod):
        read(request(method, {}))


@pytest.mark.parametrize("version", ["0.9", "1.1", "2.0", "999999999.0", "1.999999999"])
def test_a_version_that_is_not_spoken_is_told_as_one(version: str) -> None:
    with pytest.raises(errors.UnsupportedVersion):
        read(request("get_volume", {"volume_id": ID}, version=version))


def test_the_version_is_looked_at_before_the_method() -> None:
    # A later minor version may have methods that this one does not know.
    with pytest.raises(errors.UnsupportedVersion):
        read(request("what_comes_later", {}, version="1.7"))


def test_defaults_are_those_of_the_contract() -> None:
    assert read(request("delete_volume", {"volume_id": ID})).args == requests.DeleteVolume(
        volume_id=uuid.UUID(ID), cascade=False
    )
    copy = read(request("copy_volume_data", ACCEPTED["copy_volume_data"][0])).args
    assert copy == requests.CopyVolumeData(
        source_volume_id=uuid.UUID(ID),
        destination_volume_id=uuid.UUID(OTHER),
        remote=None,
        verify=None,
        bytes_per_second=None,
    )
    page = read(request("list_jobs", {})).args
    assert page == requests.ListJobs(all=False, limit=100, after=None, state=None, volume_id=None)
    attach = read(request("attach_volume", {"volume_id": ID, "mountpoint": "/x"})).args
    assert isinstance(attach, requests.AttachVolume)
    assert attach.mode == "rw"
    connector = requests.Connector()
    assert (connector.mode, connector.connection_key, connector.do_local_attach) == (
        "rw",
        "",
        False,
    )


def test_unknown_members_of_a_connector_are_kept() -> None:
    args = read(request("validate_connector", {"connector": CONNECTOR})).args
    assert isinstance(args, requests.ValidateConnector)
    assert args.connector.properties() == CONNECTOR


# Anything at all

SECRET = "hunter2-hunter2"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# Values that could be secrets, at places where somebody might put one.
SECRET_JSON = st.recursive(
    st.sampled_from([SECRET, f"x {SECRET}", f"auth_password={SECRET}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "volume_id",
                    "volume",
                    "name",
                    "connector",
                    "host",
                    "initiator",
                    "mode",
                    "auth_password",
                    "metadata",
                    "limit",
                    "state",
                    "remote",
                    "job_id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def refusal_of(body: bytes) -> errors.VolumeWorkerError | None:
    """The error of the contract that a body is refused with; any other error is a failure."""
    try:
        read(body)
    except errors.VolumeWorkerError as error:
        wire = error.to_wire()
        json.dumps(wire, allow_nan=False).encode()
        assert schema.faults(wire, schema.definition("Error")) == []
        assert wire["code"] in {"InvalidRequest", "UnknownMethod", "UnsupportedVersion"}
        return error
    return None


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_but_the_contracts_errors(body: bytes) -> None:
    assert refusal_of(body) is not None


@settings(deadline=None)
@given(JSON)
def test_no_json_raises_anything_but_the_contracts_errors(data: Any) -> None:
    assert refusal_of(json.dumps(data).encode()) is not None


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(requests.METHODS)) | st.text(max_size=5),
    JSON | st.dictionaries(st.sampled_from(["volume_id", "volume", "connector"]), JSON),
)
def test_no_arguments_raise_anything_but_the_contracts_errors(method: str, args: Any) -> None:
    error = refusal_of(request(method, args))
    assert error is None or isinstance(error, errors.VolumeWorkerError)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(requests.METHODS)), SECRET_JSON)
def test_a_refusal_never_repeats_a_value(method: str, args: Any) -> None:
    error = refusal_of(request(method, args))
    if error is not None:
        assert SECRET not in json.dumps(error.to_wire())


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(ACCEPTED)), st.data())
def test_an_argument_of_the_wrong_kind_never_repeats_its_value(
    method: str, data: st.DataObject
) -> None:
    args = dict(data.draw(st.sampled_from(ACCEPTED[method])))
    if not args:
        return
    args[data.draw(st.sampled_from(sorted(args)))] = data.draw(SECRET_JSON)
    error = refusal_of(request(method, args))
    assert error is None or SECRET not in json.dumps(error.to_wire())


@pytest.mark.parametrize("field", ["version", "method"])
def test_even_a_method_or_version_of_any_length_is_cut(field: str) -> None:
    data = {"method": "get_volume", "version": "1.0", "args": {}, field: "x" * 100_000}
    error = refusal_of(json.dumps(data).encode())
    assert error is not None
    assert len(json.dumps(error.to_wire())) < 1000


def test_the_name_of_an_unknown_member_is_cut() -> None:
    for body in (
        request("get_volume", {}, **{"x" * 100_000: 1}),
        request("get_volume", {"volume_id": ID, "x" * 100_000: 1}),
    ):
        error = refusal_of(body)
        assert error is not None
        assert len(json.dumps(error.to_wire())) < 2000
