"""What lands in the dead-letter queue, what must not, and how it is kept there."""

import asyncio
import datetime
import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, raw, volumes, workers
from tests.services.volumes import MIB

NOWHERE = "00000000-0000-4000-8000-00000000dead"
CAST: dict[str, Any] = {"reply_to": None}
JUNK = b'{"method": "junk"'


def _moment(text: object) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(str(text))
    assert moment.utcoffset() == datetime.timedelta(0)
    return moment


async def test_a_letter_tells_why_where_and_when(hosts: Hosts) -> None:
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=2)
    sent = await hosts.caller.publish(JUNK, hosts.a.at("fast"))
    letter = await hosts.caller.letter(sent)
    assert letter.body == JUNK
    assert letter.headers["reason"] == "InvalidRequest"
    assert letter.headers["origin"] == hosts.a.at("fast")
    assert letter.headers["attempts"] == 0
    assert before < _moment(letter.headers["first-failed-at"])
    assert "JSON" in letter.headers["last-error"]
    assert "job-id" not in letter.headers


async def test_a_failed_cast_is_kept_with_its_job(hosts: Hosts) -> None:
    sent = await hosts.caller.send(
        "delete_volume", hosts.a.at("fast"), {"volume_id": NOWHERE}, **CAST
    )
    letter = await hosts.caller.letter(sent)
    assert letter.headers["reason"] == "VolumeNotFound"
    assert letter.headers["job-id"] == sent.message_id
    assert letter.headers["attempts"] == 1
    assert letter.headers["origin"] == hosts.a.at("fast")
    assert NOWHERE in letter.headers["last-error"]
    assert json.loads(letter.body)["method"] == "delete_volume"
    job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "failed"


CASTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bad argument": ("delete_volume", {"volume_id": "x"}, {}),
    "not supported": ("delete_backup", {"backup_id": NOWHERE}, {}),
    "deadline": (
        "create_volume",
        {"volume": {"name": "v", "size_bytes": 1}},
        {"headers": {"deadline": "2020-01-01T00:00:00Z"}},
    ),
    "header": (
        "create_volume",
        {"volume": {"name": "v", "size_bytes": 1}},
        {"headers": {"deadline": 1}},
    ),
    "space": ("create_volume", {"volume": {"name": "v", "size_bytes": 2**60}}, {}),
    "unknown method": ("nope", {}, {}),
}


@pytest.mark.parametrize("name", CASTS)
async def test_every_failed_cast_is_kept(hosts: Hosts, name: str) -> None:
    method, args, properties = CASTS[name]
    sent = await hosts.caller.send(method, hosts.a.at("fast"), args, **CAST, **properties)
    letter = await hosts.caller.letter(sent)
    reasons = {
        "not supported": "NotSupported",
        "deadline": "DeadlineExceeded",
        "space": "InsufficientSpace",
        "unknown method": "UnknownMethod",
    }
    assert letter.headers["reason"] == reasons.get(name, "InvalidRequest")
    assert letter.reply_to is None


async def test_a_cast_under_a_used_message_id_is_kept(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("sim"))
    sent = await hosts.caller.send("create_export", volume.address, volume.at)
    await hosts.caller.result(sent)
    second = await hosts.caller.send(
        "remove_export", volume.address, volume.at, message_id=sent.message_id, **CAST
    )
    letter = await hosts.caller.letter(second)
    assert letter.headers["reason"] == "InvalidRequest"
    assert json.loads(letter.body)["method"] == "remove_export"


async def test_what_succeeds_and_what_a_caller_hears_of_is_not_kept(hosts: Hosts) -> None:
    volume_id = str(uuid.uuid4())
    new = {"volume": {"id": volume_id, "name": "v", "size_bytes": MIB}}
    cast = await hosts.caller.send("create_volume", hosts.a.at("fast"), new, **CAST)
    calls = [
        await hosts.caller.send(method, hosts.a.at("fast"), args)
        for method, args in (
            ("delete_volume", {"volume_id": NOWHERE}),
            ("delete_volume", {"volume_id": "x"}),
            ("create_volume", {"volume": {"name": "v", "size_bytes": 2**60}}),
            ("delete_backup", {"backup_id": NOWHERE}),
            ("throttle_job", {"job_id": NOWHERE, "bytes_per_second": None}),
            ("get_volume", {"volume_id": NOWHERE}),
        )
    ]
    for call in calls:
        assert not (await hosts.caller.result(call)).body["ok"]

    async def made() -> dict[str, Any] | None:
        job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": cast.message_id})
        return job if job["state"] == "succeeded" else None

    for _ in range(100):
        if job := await made():
            hosts.volumes.adopt(job["result"])
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(amqp.QUIET)
    kept = {letter.correlation_id for letter in await hosts.caller.letters()}
    assert not kept & {one.correlation_id for one in (cast, *calls)}


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("get_volume", {"volume_id": NOWHERE}),
        ("get_job", {"job_id": NOWHERE}),
        ("list_volumes", {}),
        ("validate_connector", {"connector": {}}),
        ("get_volume", {"volume_id": "x"}),
        ("list_volumes", {"limit": 0}),
    ],
)
async def test_a_read_that_nobody_waits_for_is_not_kept(
    hosts: Hosts, method: str, args: dict[str, Any]
) -> None:
    sent = await hosts.caller.send(method, hosts.a.at("fast"), args, **CAST)
    # Requests of one address are taken in order: this one is done with, and a moment later.
    await hosts.volumes.create(hosts.a.at("fast"))
    await asyncio.sleep(amqp.QUIET)
    assert await hosts.caller.letters_with(sent.correlation_id) == []


async def test_a_letter_keeps_the_properties_that_the_message_came_with(hosts: Hosts) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    headers = {
        "number": 5,
        "big": 2**40,
        "negative": -1,
        "text": "ü\n",
        "flag": True,
        "none": None,
        "table": {"a": {"b": [1, "two", False]}},
        "moment": moment,
        "x-tenant": "t-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    sent = await hosts.caller.publish(
        JUNK,
        hosts.a.at("fast"),
        headers=headers,
        content_type="text/x-odd",
        content_encoding="identity",
        type="request",
        app_id="scheduler",
        priority=3,
        timestamp=moment,
    )
    await hosts.caller.letter(sent)
    message = await _letter_as_it_is(hosts.caller, sent)
    assert {name: message.headers.get(name) for name in headers} == headers
    assert message.content_type == "text/x-odd"
    assert message.content_encoding == "identity"
    assert message.type == "request"
    assert message.app_id == "scheduler"
    assert message.priority == 3
    assert message.timestamp == moment
    assert message.message_id == sent.message_id
    assert message.correlation_id == sent.correlation_id
    assert message.reply_to == hosts.caller.reply_queue
    assert message.delivery_mode == 2


async def _letter_as_it_is(caller: amqp.Caller, sent: amqp.Sent) -> Any:
    async with caller.peeking() as messages:
        return next(one for one in messages if one.correlation_id == sent.correlation_id)


async def test_headers_of_an_earlier_death_are_replaced(hosts: Hosts) -> None:
    headers = {"reason": "Old", "origin": "old@old", "attempts": 9, "job-id": "old"}
    sent = await hosts.caller.publish(JUNK, hosts.a.at("fast"), headers=headers)
    letter = await hosts.caller.letter(sent)
    assert letter.headers["reason"] == "InvalidRequest"
    assert letter.headers["origin"] == hosts.a.at("fast")
    assert letter.headers["attempts"] == 0
    assert letter.headers.get("job-id") != "old"


async def test_any_body_is_kept_byte_for_byte(hosts: Hosts) -> None:
    bodies = [bytes(range(256)), b"", b"\0" * 1000, b"x" * (2 * MIB)]
    sent = [await hosts.caller.publish(body, hosts.a.at("fast")) for body in bodies]
    for one, body in zip(sent, bodies, strict=True):
        assert (await hosts.caller.letter(one)).body == body


# What a program can put into headers, and a client library would not. Each worker is the test's
# own: should it fall, no other test falls with it.

ODD_HEADERS: dict[str, Any] = {
    "bytes": bytearray(b"\0\xff"),
    "not UTF-8": raw.text(b"\xff\xfe"),
    "an encoded surrogate": raw.text(b"\xed\xa0\x80"),
    "a NUL": "a\0b",
    "a long text": "x" * 50_000,
    "a decimal": raw.decimal(2, 12345),
    "a decimal of an odd scale": raw.decimal(255, -1),
    "a moment in the far future": raw.timestamp(2**40),
    "a moment beyond all calendars": raw.timestamp(2**63 - 1),
    "deep tables": raw.nested_table(2000),
    "deep arrays": raw.nested_array(2000),
}


@pytest.mark.parametrize("name", ODD_HEADERS)
async def test_no_header_stops_the_worker(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes, name: str
) -> None:
    worker = await start_worker()
    headers: Mapping[str, Any] = {"odd": ODD_HEADERS[name]}
    new = {"volume": {"name": "v", "size_bytes": MIB}}
    with raw.encoding():
        junk = await caller.publish(JUNK, worker.at("fast"), headers=headers)
        good = await caller.send("create_volume", worker.at("fast"), new, headers=headers)
        failing = await caller.send(
            "delete_volume", worker.at("fast"), {"volume_id": NOWHERE}, headers=headers, **CAST
        )
        read = await caller.send("list_volumes", worker.at("fast"), headers=headers)
    await caller.call("list_volumes", worker.at("fast"), timeout=10)
    assert worker.is_running
    assert await worker.is_ready()
    body = (await caller.result(junk, timeout=10)).body
    assert body["error"]["code"] == "InvalidRequest"
    for sent in (good, read):
        body = (await caller.result(sent, timeout=10)).body
        # A header that means nothing is no reason to refuse, but one that nobody can read may be.
        assert body["ok"] or body["error"]["code"] == "InvalidRequest"
        if body["ok"] and sent is good:
            volumes.adopt(body["result"])
    if "deep" not in name and "beyond" not in name:
        for sent in (junk, failing):
            letter = await caller.letter(sent)
            assert letter.headers["reason"]


# Jobs that end dead


async def test_a_job_whose_attempts_are_exhausted_is_dead_and_kept(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    worker = await start_worker(max_attempts=2)
    volume = await volumes.create(worker.at("fast"))
    async with volumes.local(volume) as path:
        pass
    path.unlink()
    path.symlink_to("/etc/hostname")
    async with caller.events("job.#") as events:
        sent = await caller.send("delete_volume", worker.at("fast"), volume.at)
        reply = await caller.only_result(sent)
        assert not reply.body["ok"]
        assert reply.body["error"]["retryable"] is True
        letter = await caller.letter(sent)
        await events.wait(f"job.{sent.message_id}.dead")
    assert letter.headers["reason"] == reply.body["error"]["code"] == "DeviceUnavailable"
    assert letter.headers["attempts"] == 2
    assert letter.headers["job-id"] == sent.message_id
    job = await caller.call("get_job", worker.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "dead"
    assert job["attempt"] == 2
    assert job["error"]["code"] == "DeviceUnavailable"
    assert job["finished_at"] is not None
    assert _moment(letter.headers["first-failed-at"]) < _moment(job["finished_at"])
    record = await volumes.record(volume)
    assert record["status"] == "error_deleting"
    assert record["error"]["code"] == "DeviceUnavailable"
    path.unlink()
    path.touch()
    await volumes.delete(volume)
