"""Whatever comes in, it is answered, kept where it must be, and the worker goes on."""

import json
import uuid
from typing import Any

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp
from tests.services.volumes import MIB

NOWHERE = "00000000-0000-4000-8000-00000000dead"


def _body(**members: Any) -> bytes:
    whole = {"method": "list_volumes", "version": "1.0", "args": {}, **members}
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode()


def _raw(args: bytes, method: bytes = b"create_volume") -> bytes:
    return b'{"method":"%s","version":"1.0","args":%s}' % (method, args)


UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "a zero byte": b"\0",
    "not UTF-8": b'{"method":"list_volumes","version":"1.0","args":{"status":"\xff\xfe"}}',
    "UTF-16": _body().decode().encode("utf-16"),
    "an encoded surrogate": _raw(b'{"volume":{"name":"\xed\xa0\x80","size_bytes":1}}'),
    "not JSON": b"hello",
    "half of JSON": _body()[:-1],
    "two values": _body() + _body(),
    "a Python value": b"{'method': 'list_volumes'}",
    "an array": b"[" + _body() + b"]",
    "a text": b'"list_volumes"',
    "a number": b"17",
    "null": b"null",
    "true": b"true",
    "an empty object": b"{}",
    "no method": _body(method=...),
    "no version": _body(version=...),
    "no args": _body(args=...),
    "an unknown member": _body(extra=1),
    "a method that is no text": _body(method=5),
    "a method that is null": _body(method=None),
    "a method that is a list": _body(method=["list_volumes"]),
    "NaN": _raw(b'{"volume":{"name":"v","size_bytes":NaN}}'),
    "Infinity": _raw(b'{"volume":{"name":"v","size_bytes":-Infinity}}'),
    "very deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "very deep arguments": _raw(b'{"volume":' * 50_000 + b"1" + b"}" * 50_000),
    "2 MiB": _raw(b'{"volume":{"name":"v","size_bytes":1048576}}' + b" " * 2 * MIB),
    "one byte too many": _body().ljust(MIB + 1),
}

VERSIONS: list[Any] = ["1.1", "2.0", "0.9", 1, 1.0, "x", "", None, "1", "1.0.0", "1.x", ["1.0"]]
METHODS = ["nope", "", "__class__", "Create_volume", "create_volume ", "run", "x" * 5000, "\0"]


async def _letters(hosts: Hosts) -> dict[str, amqp.Letter]:
    return {one.correlation_id or "": one for one in await hosts.caller.letters()}


async def test_what_cannot_be_read_is_answered_and_kept_with_the_reason(hosts: Hosts) -> None:
    sent = {
        name: await hosts.caller.publish(body, hosts.a.at("fast"))
        for name, body in UNREADABLE.items()
    }
    for name, one in sent.items():
        reply = await hosts.caller.result(one)
        assert not reply.body["ok"], name
        assert reply.body["error"]["code"] == "InvalidRequest", name
        assert reply.body["error"]["retryable"] is False, name
        assert reply.body["job_id"] == one.message_id, name
    await hosts.assert_at_work()
    assert all(len(hosts.caller.results(one)) == 1 for one in sent.values())
    for one in sent.values():
        await hosts.caller.letter(one)
    kept = await _letters(hosts)
    for name, one in sent.items():
        letter = kept[one.correlation_id]
        assert letter.body == UNREADABLE[name], name
        assert letter.headers["reason"] == "InvalidRequest", name
        assert letter.headers["origin"] == hosts.a.at("fast"), name
        assert letter.message_id == one.message_id
        assert letter.reply_to == hosts.caller.reply_queue


@pytest.mark.parametrize("version", VERSIONS, ids=repr)
async def test_another_version_is_refused_and_kept(hosts: Hosts, version: Any) -> None:
    sent = await hosts.caller.send("list_volumes", hosts.a.at("fast"), version=version)
    error = (await hosts.caller.only_result(sent)).body["error"]
    if version in ("1.1", "2.0", "0.9"):
        assert error["code"] == "UnsupportedVersion"
    assert error["code"] in ("UnsupportedVersion", "InvalidRequest")
    letter = await hosts.caller.letter(sent)
    assert letter.headers["reason"] == error["code"]


@pytest.mark.parametrize("method", METHODS, ids=lambda text: repr(text[:20]))
async def test_an_unknown_method_is_refused_and_kept(hosts: Hosts, method: str) -> None:
    sent = await hosts.caller.send(method, hosts.a.at("fast"))
    error = (await hosts.caller.only_result(sent)).body["error"]
    assert error["code"] == ("UnknownMethod" if method != "\0" else "InvalidRequest")
    letter = await hosts.caller.letter(sent)
    assert letter.headers["reason"] == error["code"]
    assert letter.headers["last-error"]
    assert letter.headers["first-failed-at"]


@pytest.mark.parametrize(
    "message_id",
    ["x", "1", "{}", "0" * 200, "urn:volume:1", "zzzzzzzz-zzzz-zzzz-zzzz-zzzzzzzzzzzz"],
)
async def test_a_message_id_that_is_no_uuid_is_refused_and_kept(
    hosts: Hosts, message_id: str
) -> None:
    sent = await hosts.caller.send("list_volumes", hosts.a.at("fast"), message_id=message_id)
    reply = await hosts.caller.only_result(sent)
    assert reply.body["error"]["code"] == "InvalidRequest"
    assert "message_id" in reply.body["error"]["message"]
    letter = await hosts.caller.letter(sent)
    assert letter.message_id == message_id
    assert letter.headers["reason"] == "InvalidRequest"


async def test_a_body_of_exactly_the_limit_is_read(hosts: Hosts) -> None:
    sent = await hosts.caller.publish(_body().ljust(MIB), hosts.a.at("fast"))
    assert (await hosts.caller.result(sent)).body["ok"]


GOOD = {"name": "v", "size_bytes": MIB}
BAD_NAMES = {
    "empty": "",
    "a slash": "a/b",
    "only a slash": "/",
    "two dots": "..",
    "two dots within": "a..b",
    "a leading dash": "-rf",
    "a line feed": "a\nb",
    "a tab": "a\tb",
    "an escape": "\x1b[2J",
    "a delete": "a\x7f",
    "a C1 control": "a\x85b",
    "256 bytes": "x" * 256,
    "256 bytes of UTF-8": "ü" * 128,
    "a NUL": "a\0b",
}
BAD_IDS: list[Any] = [
    "", "x", 5, True, [], {}, "../../etc/passwd", "0" * 32, f"{{{NOWHERE}}}", f"urn:uuid:{NOWHERE}",
    f" {NOWHERE}", f"{NOWHERE}\n", NOWHERE.replace("-", "_"), "' OR 1=1 --", "$(reboot)",
]  # fmt: skip
BAD_SIZES: list[Any] = [
    0, -1, 2**63, 10**30, 10**400, 1e3, 1.5, "1048576", True, None, [], {}, "1G",
]  # fmt: skip
CONNECT = {"volume_id": NOWHERE, "connector": {"host": "x"}}
PAIR = {"source_volume_id": NOWHERE, "destination_volume_id": NOWHERE}
LONG = "x" * 100_000

BAD_METADATA: list[Any] = ["x", [], {"a": 1}, {"a": None}, {"a": {}}, {"a": "b\n"}, {"a\0": "b"}]
BAD_CONNECTORS: list[Any] = [
    None, [], "x", {"host": 5}, {"host": "x", "mode": "rwx"}, {"mode": 1}, {"wwpns": "x"},
    {"wwpns": [1]}, {"connection_key": 1}, {"do_local_attach": 1}, {"initiator": ["x"]},
    {"host": LONG}, {"host": "a\nb"},
]  # fmt: skip
BAD_FLAGS: list[Any] = [0, 1, "true", None, []]
BAD_TEXTS: list[Any] = [5, None, [], True]
BAD_LIMITS: list[Any] = [0, -1, 1001, 1.0, "5", True, None, 2**70]
BAD_RATES: list[Any] = [0, -5, 1.5, True, "1", 2**63]
BAD_REMOTES: list[Any] = ["destination", "", 1, True]

BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    *(("create_volume", {"volume": {**GOOD, "name": n}}, "name") for n in BAD_NAMES.values()),
    *(("create_volume", {"volume": {**GOOD, "name": n}}, "name") for n in BAD_TEXTS),
    *(("create_volume", {"volume": {**GOOD, "size_bytes": n}}, "size_bytes") for n in BAD_SIZES),
    *(("create_volume", {"volume": {**GOOD, "id": n}}, "id") for n in BAD_IDS),
    *(
        ("create_volume", {"volume": {**GOOD, "metadata": n}}, "metadata")
        for n in BAD_METADATA
    ),
    ("create_volume", {"volume": {**GOOD, "extra": 1}}, "extra"),
    ("create_volume", {"volume": {**GOOD, "size": 1}}, "size"),
    ("create_volume", {"volume": {"name": "v"}}, "size_bytes"),
    ("create_volume", {"volume": {"size_bytes": 1}}, "name"),
    ("create_volume", {"volume": None}, "volume"),
    ("create_volume", {"volume": [GOOD]}, "volume"),
    ("create_volume", {}, "volume"),
    ("create_volume", {"volume": GOOD, "extra": 1}, "extra"),
    ("create_volume", [], "args"),
    ("create_volume", None, "args"),
    ("create_volume", "volume", "args"),
    *(("delete_volume", {"volume_id": n}, "volume_id") for n in (*BAD_IDS, None)),
    *(
        ("delete_volume", {"volume_id": NOWHERE, "cascade": n}, "cascade")
        for n in BAD_FLAGS
    ),
    *(
        ("extend_volume", {"volume_id": NOWHERE, "new_size_bytes": n}, "new_size_bytes")
        for n in BAD_SIZES
    ),
    ("create_export", {"volume_id": NOWHERE, "force": True}, "force"),
    *(
        ("initialize_connection", {**CONNECT, "connector": n}, "connector")
        for n in BAD_CONNECTORS
    ),
    ("validate_connector", {"connector": 5}, "connector"),
    ("validate_connector", {"connector": {}, "volume_id": NOWHERE}, "volume_id"),
    ("terminate_connection", {"volume_id": NOWHERE}, "connection_id"),
    ("terminate_connection", {"volume_id": NOWHERE, "connection_id": "x"}, "connection_id"),
    ("terminate_connection", {**CONNECT, "force": 1}, "force"),
    ("attach_volume", {"volume_id": NOWHERE}, "mountpoint"),
    ("attach_volume", {"volume_id": NOWHERE, "mountpoint": ""}, "mountpoint"),
    ("attach_volume", {"volume_id": NOWHERE, "mountpoint": "/dev/v\0"}, "mountpoint"),
    ("attach_volume", {"volume_id": NOWHERE, "mountpoint": "/x", "mode": "w"}, "mode"),
    ("attach_volume", {"volume_id": NOWHERE, "mountpoint": "/x", "instance_uuid": "x"}, "instance"),
    ("detach_volume", {"volume_id": NOWHERE, "attachment_id": "x"}, "attachment_id"),
    *(("copy_volume_data", {**PAIR, "remote": n}, "remote") for n in BAD_REMOTES),
    ("copy_volume_data", {**PAIR, "verify": "yes"}, "verify"),
    *(
        ("copy_volume_data", {**PAIR, "bytes_per_second": n}, "bytes_per_second")
        for n in BAD_RATES
    ),
    ("copy_volume_data", {"source_volume_id": NOWHERE}, "destination_volume_id"),
    ("get_volume_stats", {"refresh": "yes"}, "refresh"),
    ("get_job", {}, "job_id"),
    ("get_job", {"job_id": "x"}, "job_id"),
    *(("list_volumes", {"limit": n}, "limit") for n in BAD_LIMITS),
    ("list_volumes", {"after": "x"}, "after"),
    ("list_volumes", {"all": 1}, "all"),
    ("list_volumes", {"status": "fine"}, "status"),
    ("list_volumes", {"status": "available'; DROP TABLE volumes; --"}, "status"),
    ("list_volumes", {"volume_id": NOWHERE}, "volume_id"),
    ("list_jobs", {"state": "available"}, "state"),
    ("list_jobs", {"status": "available"}, "status"),
]  # fmt: skip


async def test_a_bad_argument_is_refused_by_its_name_and_leaves_nothing(hosts: Hosts) -> None:
    before = await hosts.caller.call("list_volumes", hosts.a.at("fast"), {"all": True})
    sent = [
        (
            method,
            args,
            member,
            await hosts.caller.publish(_body(method=method, args=args), hosts.a.at("fast")),
        )
        for method, args, member in BAD_ARGUMENTS
    ]
    wrong = []
    for method, args, member, one in sent:
        body = (await hosts.caller.result(one)).body
        shown = (method, repr(args)[:200], body)
        is_right = not body["ok"] and body["error"]["code"] == "InvalidRequest"
        # A text with a NUL is refused before its member is looked at.
        is_named = is_right and (
            member in body["error"]["message"] or "\\u0000" in json.dumps(args)
        )
        if not is_named or len(json.dumps(body)) > 4000:
            wrong.append(shown)
    assert wrong == []
    await hosts.assert_at_work()
    assert all(len(hosts.caller.results(one)) == 1 for *_, one in sent)
    kept = await _letters(hosts)
    # A text with a NUL may be taken for a body that cannot be read.
    dead = [
        (method, args)
        for method, args, _, one in sent
        if one.correlation_id in kept and "\\u0000" not in json.dumps(args)
    ]
    assert dead == []
    assert await hosts.caller.call("list_volumes", hosts.a.at("fast"), {"all": True}) == before


ODD: dict[str, bytes] = {
    "duplicate keys": b'{"method":"nope","method":"list_volumes","version":"1.0","args":{}}',
    "a byte order mark": b"\xef\xbb\xbf" + _body(),
    "a lone surrogate": _raw(b'{"volume":{"name":"a\\ud800b","size_bytes":1048576}}'),
    "a surrogate in a connector": _raw(
        b'{"volume_id":"%s","connector":{"host":"x","y":"\\udfff"}}' % NOWHERE.encode(),
        b"initialize_connection",
    ),
    "a huge number": _raw(b'{"volume":{"name":"v","size_bytes":' + b"9" * 50_000 + b"}}"),
    "a huge float": _raw(b'{"volume":{"name":"v","size_bytes":1e999}}'),
    "a huge float in a connector": _raw(
        b'{"connector":{"host":"x","y":1e999}}', b"validate_connector"
    ),
    "deep arguments": _raw(b'{"connector":' + b'{"a":' * 150 + b"1" + b"}" * 151, b"get_volume"),
    "many members": _raw(
        json.dumps({f"k{number}": number for number in range(50_000)}).encode(), b"list_volumes"
    ),
    "a text of a megabyte": _raw(b'{"volume":{"name":"' + b"x" * 1_000_000 + b'","size_bytes":1}}'),
    "an empty member": _raw(b'{"":1}', b"list_volumes"),
    "a prototype": _raw(b'{"__proto__":{},"__class__":1,"model_config":{}}', b"list_volumes"),
}


async def test_odd_bodies_get_one_answer_each(hosts: Hosts) -> None:
    sent = {
        name: await hosts.caller.publish(body, hosts.b.at("fast")) for name, body in ODD.items()
    }
    for name, one in sent.items():
        body = (await hosts.caller.result(one)).body
        if name not in ("duplicate keys", "a byte order mark", "a huge float in a connector"):
            assert not body["ok"], name
        if not body["ok"]:
            assert body["error"]["code"] == "InvalidRequest", (name, body)
    await hosts.assert_at_work()
    assert all(len(hosts.caller.results(one)) == 1 for one in sent.values())


CONNECTORS: dict[str, bytes] = {
    "a huge float": b'{"host":"x","y":1e999}',
    "a huge integer": b'{"host":"x","y":' + b"9" * 4000 + b"}",
    "deep": b'{"host":"x","y":' + b"[" * 150 + b"]" * 150 + b"}",
    "unknown members": b'{"host":"x","multipath":true,"uuid":null,"y":{"z":[1,1.5,"\xc3\xbc"]}}',
    "a backslash": b'{"host":"a\\\\b","y":"\\\\u0000"}',
    "a long text": b'{"host":"x","y":"' + b"y" * 500_000 + b'"}',
}


@pytest.mark.parametrize("name", CONNECTORS)
async def test_an_odd_connector_is_kept_or_refused_and_never_an_internal_error(
    hosts: Hosts, name: str
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    sent = await hosts.caller.publish(
        _raw(
            b'{"volume_id":"%s","connector":%s}' % (volume.id.encode(), CONNECTORS[name]),
            b"initialize_connection",
        ),
        volume.address,
    )
    body = (await hosts.caller.only_result(sent)).body
    if body["ok"]:
        await hosts.volumes.disconnect(volume, body["result"]["connection_id"])
    else:
        assert body["error"]["code"] in ("InvalidRequest", "InvalidConnector"), body
    if name in ("unknown members", "a backslash"):
        assert body["ok"]
    await hosts.assert_at_work()


@pytest.mark.parametrize(
    "name", ["v", "v" * 255, "ü" * 127, "a b", ".", "a.b", "a'b\"c`$(x);&|", "日本"]
)
async def test_a_good_name_is_taken_as_it_is(hosts: Hosts, name: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"), name=name)
    assert (await hosts.volumes.record(volume))["name"] == name


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("deadline", 5),
        ("deadline", "yesterday"),
        ("deadline", ""),
        ("deadline", "2020-01-01"),
        ("deadline", "2020-01-01T00:00:00"),
        ("deadline", True),
        ("deadline", ["2020-01-01T00:00:00Z"]),
        ("status-updates", "yes"),
        ("status-updates", 1),
        ("status-updates", {"a": 1}),
        ("parent-job", 5),
        ("parent-job", "x"),
        ("parent-job", [NOWHERE]),
        ("traceparent", 5),
        ("traceparent", bytearray(b"\xff")),
    ],
)
async def test_a_header_of_the_wrong_kind_is_answered(
    hosts: Hosts, header: str, value: Any
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("sim"))
    sent = await hosts.caller.send(
        "create_export", volume.address, volume.at, headers={header: value}
    )
    body = (await hosts.caller.only_result(sent)).body
    if header != "traceparent":
        assert body["error"]["code"] == "InvalidRequest"
        assert header in body["error"]["message"]
        assert (await hosts.volumes.record(volume))["exported"] is False
    assert await hosts.a.is_ready()


async def test_headers_that_mean_nothing_are_no_error(hosts: Hosts) -> None:
    headers = {"x-anything": {"a": [1, 2.5, None, bytearray(b"\0")]}, "": "empty", "reason": "none"}
    listed = await hosts.caller.call("list_volumes", hosts.a.at("fast"), headers=headers)
    assert "volumes" in listed


@pytest.mark.parametrize("end", ["", ".dead", ".events", ".host-a@fast", ".x"])
async def test_a_reply_queue_of_the_installation_is_refused(hosts: Hosts, end: str) -> None:
    reply_to = hosts.caller.namespace + end
    volume_id = str(uuid.uuid4())
    sent = await hosts.caller.send(
        "create_volume",
        hosts.a.at("fast"),
        {"volume": {**GOOD, "id": volume_id}},
        reply_to=reply_to,
    )
    letter = await hosts.caller.letter(sent)
    assert letter.headers["reason"] == "InvalidRequest"
    assert letter.reply_to == reply_to
    error = await hosts.caller.fails("get_volume", hosts.a.at("fast"), {"volume_id": volume_id})
    assert error.code == "VolumeNotFound"
    await hosts.assert_at_work()
    # Its own letter and nothing that somebody answered.
    assert len(await hosts.caller.letters_with(sent.correlation_id)) == 1


async def test_a_caller_that_is_gone_costs_nothing(hosts: Hosts) -> None:
    volume_id = str(uuid.uuid4())
    sent = await hosts.caller.send(
        "create_volume",
        hosts.a.at("fast"),
        {"volume": {**GOOD, "id": volume_id}},
        reply_to="no-such-queue",
    )

    await hosts.assert_at_work()
    job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "succeeded"
    assert job["result"]["id"] == volume_id
    hosts.volumes.adopt(job["result"])
    await amqp.eventually(
        lambda: [line for line in hosts.a.log_lines() if line.get("reply_to") == "no-such-queue"]
    )
    told = [
        line
        for line in hosts.a.log_lines()
        if line.get("reply_to") == "no-such-queue" and line.get("job_id") == sent.message_id
    ]
    assert len(told) == 1
    assert await hosts.caller.letters_with(sent.correlation_id) == []


async def test_no_space_is_told_and_leaves_no_record(hosts: Hosts) -> None:
    before = await hosts.caller.call("list_volumes", hosts.a.at("fast"), {"limit": 1000})
    for size in (2**60, 2**63 - 1):
        error = await hosts.caller.fails(
            "create_volume", hosts.a.at("fast"), {"volume": {"name": "v", "size_bytes": size}}
        )
        assert error.code == "InsufficientSpace"
    assert await hosts.caller.call("list_volumes", hosts.a.at("fast"), {"limit": 1000}) == before


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("delete_volume", {}),
        ("extend_volume", {"new_size_bytes": MIB}),
        ("create_export", {}),
        ("ensure_export", {}),
        ("remove_export", {}),
        ("initialize_connection", {"connector": {"host": "x"}}),
        ("terminate_connection", {"connector": {"host": "x"}}),
        ("terminate_connection", {"connection_id": NOWHERE}),
        ("attach_volume", {"mountpoint": "/dev/vdb"}),
        ("detach_volume", {}),
        ("get_volume", {}),
    ],
)
async def test_a_volume_that_is_not_there_is_not_found(
    hosts: Hosts, method: str, more: dict[str, object]
) -> None:
    error = await hosts.caller.fails(method, hosts.a.at("fast"), {"volume_id": NOWHERE, **more})
    assert error.code == "VolumeNotFound"
    assert error.retryable is False
