"""What is told, in which order, and what becomes of what the broker does not take."""

import asyncio
import contextlib
import dataclasses
import datetime
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import aio_pika
import aio_pika.abc
import pytest
import structlog.testing
from pamqp import commands, frame, header

from messages import errors, frames, letters, link, resources, topology
from worker import broker, dispatcher, outbox
from worker.store import database, jobs
from worker.store import outbox as outbox_store

NOW = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.UTC)
ADDRESS = "host-a@fast"
POISON = "amq.rabbitmq.reply-to.of-a-node-that-is-gone"


@dataclasses.dataclass
class Published:
    """A message that the broker has taken."""

    exchange: str
    key: str
    body: Any
    data: bytes
    properties: commands.Basic.Properties
    """As a client reads them off the wire."""
    mandatory: bool
    at: float


def _properties(one: link.Outgoing) -> commands.Basic.Properties:
    data = frames.publish(
        one.message, one.exchange, one.routing_key, mandatory=one.mandatory, channel=1, most=1000
    )
    length, _, _ = frame.unmarshal(data)
    _, _, head = frame.unmarshal(data[length:])
    assert isinstance(head, header.ContentHeader)
    return head.properties


class FakeBroker:
    """Takes what is published, or does what it is told to do instead."""

    def __init__(self) -> None:
        self.names = topology.Topology("volume")
        self.published: list[Published] = []
        self.attempts: list[str] = []
        self.away = False
        self.unroutable: set[str] = set()
        self.ends_connection: set[str] = set()
        """Routing keys over which it ends the connection, with all that is on its way."""
        self.sent: list[int] = []
        """How many were sent together, each time."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def publish_all(
        self, messages: Sequence[link.Outgoing]
    ) -> list[errors.VolumeWorkerError | None]:
        self.attempts += [one.routing_key for one in messages]
        await self.gate.wait()
        self.sent.append(len(messages))
        if any(one.routing_key in self.ends_connection for one in messages):
            return [link.ConnectionLost("ended") for _ in messages]
        return [self._take(one) for one in messages]

    def _take(self, one: link.Outgoing) -> errors.VolumeWorkerError | None:
        if self.away:
            return errors.Unreachable("away")
        if one.routing_key in self.unroutable:
            return link.Unroutable("no queue")
        at = asyncio.get_running_loop().time()
        try:
            properties = _properties(one)
        except Exception as error:
            return link.Unpublishable(str(error))
        body = None if one.exchange == self.names.dead else json.loads(one.message.body)
        self.published.append(
            Published(
                one.exchange,
                one.routing_key,
                body,
                one.message.body,
                properties,
                one.mandatory,
                at,
            )
        )
        return None

    def keys(self, exchange: str) -> list[str]:
        return [one.key for one in self.published if one.exchange == exchange]

    @property
    def replies(self) -> list[Published]:
        return [one for one in self.published if not one.exchange]

    @property
    def events(self) -> list[Published]:
        return [one for one in self.published if one.exchange == "volume.events"]


class FakeStore:
    """An outbox table, and the connections that results are filled in from."""

    def __init__(self) -> None:
        self.deleted: list[int] = []
        self.connections: dict[uuid.UUID, dict[str, Any]] = {}
        self.away = False

    async def fetch(self, query: str, *args: Any) -> Sequence[database.Row]:
        if self.away:
            raise errors.Unreachable("away")
        match query:
            case "delete_outbox":
                self.deleted += args[0]
                return []
            case "adopt_outbox" | "touch_outbox":
                return []
        raise AssertionError(query)

    async def row(self, query: str, *args: Any) -> database.Row | None:
        if self.away:
            raise errors.Unreachable("away")
        assert query == "get_connection"
        return self.connections.get(args[0])


class Bench:
    """An outbox between a fake broker and a fake store."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.store = FakeStore()
        self.outbox = outbox.Outbox(
            cast("database.Database", self.store),
            cast("broker.Broker", self.broker),
            addresses=[ADDRESS],
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.outbox.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def flush(self) -> None:
        assert await self.outbox.flush(5)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def stored(headers: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """A message's properties as the store keeps them."""
    message = aio_pika.Message(b"", headers=headers, **properties)
    return letters.keep_properties(cast("aio_pika.abc.AbstractIncomingMessage", message))


def a_job(**changed: Any) -> jobs.Job:
    values: dict[str, Any] = {
        **dict.fromkeys(field.name for field in dataclasses.fields(jobs.Job)),
        "id": uuid.uuid4(),
        "method": "create_volume",
        "address": ADDRESS,
        "slot": jobs.Slot.CONTROL,
        "state": resources.JobState.RUNNING,
        "attempt": 1,
        "body": b'{"method": "create_volume", "version": "1.0", "args": {"a": 1}}',
        "properties": stored({}, message_id="m"),
        "lease_token": 1,
        "reply_to": "replies",
        "correlation_id": "c",
        "status_updates": False,
        "overdue": False,
        "edited": False,
        "endings": 1,
        "history": None,
        "created_at": NOW,
        "version": 1,
    }
    return jobs.Job(**{**values, **changed})


def ended(state: str = "succeeded", **changed: Any) -> jobs.Job:
    return a_job(
        state=resources.JobState(state),
        result={} if state == "succeeded" else None,
        error=None if state == "succeeded" else errors.InvalidRequest("no").to_wire(),
        finished_at=NOW,
        **changed,
    )


def volume_event(volume_id: object, status: str, seq: int) -> dict[str, Any]:
    return {"at": "now", "seq": seq, "volume": {"id": str(volume_id), "status": status}}


# Events


async def test_of_the_events_of_an_object_only_the_newest_of_a_batch_is_sent(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    for seq, status in enumerate(["creating", "available", "in-use"], 1):
        bench.outbox.say_volume(volume_event(volume_id, status, seq))
    async with bench.running():
        await bench.flush()
    assert bench.broker.keys("volume.events") == [f"volume.{volume_id}.in-use"]
    assert bench.broker.events[0].body["seq"] == 3


async def test_objects_do_not_overtake_each_other(bench: Bench) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    bench.outbox.say_volume(volume_event(first, "creating", 1))
    bench.outbox.say_volume(volume_event(second, "creating", 1))
    bench.outbox.say_volume(volume_event(first, "available", 2))
    async with bench.running():
        await bench.flush()
    assert bench.broker.keys("volume.events") == [
        f"volume.{second}.creating",
        f"volume.{first}.available",
    ]


async def test_events_of_one_object_are_sent_in_order_over_many_batches(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    async with bench.running():
        for seq in range(1, 60):
            bench.outbox.say_volume(volume_event(volume_id, f"s{seq}", seq))
            await asyncio.sleep(0.004)
        await bench.flush()
    sent = [one.body["seq"] for one in bench.broker.events]
    assert sent == sorted(set(sent))
    assert sent[-1] == 59
    # The first did not wait, and those behind it were put together.
    assert 2 <= len(sent) < 30


async def test_an_event_that_comes_while_its_batch_is_being_sent_is_sent_after_it(
    bench: Bench,
) -> None:
    volume_id = uuid.uuid4()
    bench.broker.gate.clear()
    async with bench.running():
        bench.outbox.say_volume(volume_event(volume_id, "creating", 1))
        await eventually(lambda: bench.broker.attempts)
        bench.outbox.say_volume(volume_event(volume_id, "available", 2))
        bench.broker.gate.set()
        await bench.flush()
    assert [one.body["seq"] for one in bench.broker.events] == [1, 2]


async def test_an_event_is_no_reason_for_a_reply_to_wait(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    async with bench.running():
        bench.outbox.say_volume(volume_event(uuid.uuid4(), "creating", 1))
        await eventually(lambda: bench.broker.events)
        # Now events wait for newer ones.
        bench.outbox.say_volume(volume_event(uuid.uuid4(), "creating", 1))
        before = loop.time()
        await bench.outbox.tell(outbox_store.Entry(1, job=ended(), reply_only=True))
        await eventually(lambda: bench.broker.replies)
        assert bench.broker.replies[0].at - before < dispatcher.LINGER / 2
        await bench.flush()


async def test_a_jobs_event_carries_its_record_its_version_and_its_state(bench: Bench) -> None:
    job = a_job(version=7)
    bench.outbox.say_job(job)
    async with bench.running():
        await bench.flush()
    (event,) = bench.broker.events
    assert event.key == f"job.{job.id}.running"
    assert event.body["seq"] == 7
    assert event.body["job"] == job.to_wire()
    assert not event.mandatory


async def test_secrets_in_a_jobs_args_are_masked_in_its_event(bench: Bench) -> None:
    body = {"method": "x", "version": "1.0", "args": {"connector": {"auth_password": "hunter2"}}}
    bench.outbox.say_job(a_job(body=json.dumps(body).encode()))
    async with bench.running():
        await bench.flush()
    assert "hunter2" not in json.dumps(bench.broker.events[0].body)


async def test_stats_are_sent_under_the_backends_key(bench: Bench) -> None:
    bench.outbox.say_stats("host.a@fast", 3, {"free_capacity_gb": 1})
    async with bench.running():
        await bench.flush()
    (event,) = bench.broker.events
    assert event.key == "backend.host_a@fast.stats"
    assert event.body["seq"] == 3
    assert event.body["stats"] == {"free_capacity_gb": 1}


# A job's end


async def test_a_jobs_end_is_told_and_then_forgotten(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    job = ended()
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(job, 11, volume_event(volume_id, "available", 2)))
        await bench.flush()
    assert bench.store.deleted == [11]
    assert set(bench.broker.keys("volume.events")) == {
        f"job.{job.id}.succeeded",
        f"volume.{volume_id}.available",
    }
    (reply,) = bench.broker.replies
    assert reply.key == "replies"
    assert reply.body == {
        "job_id": str(job.id),
        "method": "create_volume",
        "ok": True,
        "result": {},
    }
    assert reply.properties.correlation_id == "c"
    assert reply.properties.message_type == "result"
    assert reply.properties.content_type == "application/json"
    assert reply.mandatory


async def test_nothing_is_forgotten_before_all_of_it_was_confirmed(bench: Bench) -> None:
    bench.broker.gate.clear()
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(ended(), 11, None))
        await asyncio.sleep(0.2)
        assert bench.store.deleted == []
        bench.broker.gate.set()
        await bench.flush()
    assert bench.store.deleted == [11]


async def test_a_cast_that_succeeded_has_no_reply_and_no_letter(bench: Bench) -> None:
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(ended(reply_to=None), 11, None))
        await bench.flush()
    assert bench.broker.replies == []
    assert bench.broker.keys("volume.dead") == []
    assert bench.store.deleted == [11]


@pytest.mark.parametrize(
    ("state", "reply_to", "is_letter"),
    [
        ("failed", None, True),
        ("failed", "replies", False),
        ("dead", None, True),
        ("dead", "replies", True),
        ("cancelled", None, False),
        ("succeeded", None, False),
    ],
)
async def test_a_job_that_died_and_a_cast_that_failed_become_dead_letters(
    bench: Bench, state: str, reply_to: str | None, is_letter: bool
) -> None:
    job = ended(state, reply_to=reply_to, attempt=3, first_failed_at=NOW)
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(job, 11, None))
        await bench.flush()
    sent = [one for one in bench.broker.published if one.exchange == "volume.dead"]
    assert bool(sent) is is_letter
    if sent:
        assert sent[0].mandatory
        assert sent[0].data == job.body
        assert sent[0].properties.message_id == "m"
        headers = dict(sent[0].properties.headers or {})
        assert headers == {
            "reason": "InvalidRequest",
            "origin": ADDRESS,
            "job-id": str(job.id),
            "attempts": 3,
            "first-failed-at": NOW.isoformat(),
            "last-error": "no",
        }
    assert bench.store.deleted == [11]


async def test_a_result_published_again_keeps_its_id(bench: Bench) -> None:
    job = ended()
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(job, 11, None))
        await bench.flush()
        await bench.outbox.tell(outbox_store.Entry(12, job=job, reply_only=True))
        await bench.flush()
    first, second = bench.broker.replies
    assert first.properties.message_id == second.properties.message_id
    # What is only the answer to a repeat has no event of its own.
    assert bench.broker.keys("volume.events") == [f"job.{job.id}.succeeded"]
    assert bench.store.deleted == [11, 12]


async def test_an_entry_that_is_being_told_is_not_told_twice(bench: Bench) -> None:
    entry = outbox_store.Entry(11, job=ended())
    async with bench.running():
        await bench.outbox.tell(entry)
        await bench.outbox.tell(entry)
        await bench.flush()
    assert len(bench.broker.replies) == 1


async def test_an_event_that_was_overtaken_settles_its_entry_all_the_same(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    async with bench.running():
        bench.broker.gate.clear()
        bench.outbox.say_volume(volume_event(uuid.uuid4(), "creating", 1))
        await eventually(lambda: bench.broker.attempts)
        for entry, status in ((11, "available"), (12, "in-use")):
            event = volume_event(volume_id, status, entry)
            await bench.outbox.tell_end(jobs.Ended(ended(), entry, event))
        bench.broker.gate.set()
        await bench.flush()
    assert sorted(bench.store.deleted) == [11, 12]
    assert f"volume.{volume_id}.available" not in bench.broker.keys("volume.events")
    assert f"volume.{volume_id}.in-use" in bench.broker.keys("volume.events")


async def test_an_entry_whose_job_is_gone_is_forgotten(bench: Bench) -> None:
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(11))
        await bench.flush()
    assert bench.store.deleted == [11]
    assert bench.broker.published == []


# Secrets


def a_connection(connection_id: uuid.UUID, state: str) -> dict[str, Any]:
    return {
        "id": connection_id,
        "volume_id": uuid.uuid4(),
        "connector": {},
        "access_mode": "rw",
        "state": state,
        "is_local": False,
        "made_by": uuid.uuid4(),
        "driver_volume_type": "iscsi",
        "data": {"target_iqn": "iqn.x", "auth_method": "CHAP"},
        "credentials": {"secrets": {"auth_password": "hunter2", "tls.psk": "key"}},
    }


async def test_a_connections_secrets_are_filled_into_the_reply_alone(bench: Bench) -> None:
    connection_id = uuid.uuid4()
    bench.store.connections[connection_id] = a_connection(connection_id, "live")
    job = dataclasses.replace(
        ended(connection_id=connection_id),
        result={"connection_id": str(connection_id), "data": {"auth_password": "***"}},
    )
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(job, 11, None))
        await bench.flush()
    data = bench.broker.replies[0].body["result"]["data"]
    assert data["auth_password"] == "hunter2"
    assert data["tls"] == {"psk": "key"}
    assert "hunter2" not in json.dumps([one.body for one in bench.broker.events])


@pytest.mark.parametrize("state", ["ended", "ending", None])
async def test_a_repeat_after_the_connections_end_is_told_that_it_has_ended(
    bench: Bench, state: str | None
) -> None:
    connection_id = uuid.uuid4()
    if state is not None:
        bench.store.connections[connection_id] = a_connection(connection_id, state)
    job = ended(connection_id=connection_id)
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(11, job=job, reply_only=True))
        await bench.flush()
    body = bench.broker.replies[0].body
    assert body["error"]["code"] == "ConnectionNotFound"
    assert "hunter2" not in json.dumps(body)


async def test_an_entry_whose_secrets_could_not_be_read_is_told_when_it_is_swept_up(
    bench: Bench,
) -> None:
    connection_id = uuid.uuid4()
    bench.store.connections[connection_id] = a_connection(connection_id, "live")
    entry = outbox_store.Entry(11, job=ended(connection_id=connection_id), reply_only=True)
    bench.store.away = True
    await bench.outbox.tell(entry)
    assert bench.broker.replies == []
    bench.store.away = False
    async with bench.running():
        await bench.outbox.tell(entry)
        await bench.flush()
    assert len(bench.broker.replies) == 1
    assert bench.store.deleted == [11]


# Status messages


async def test_status_messages_go_to_a_caller_that_asked_before_the_result(bench: Bench) -> None:
    job = a_job(status_updates=True)
    progress = {"done_bytes": 1, "total_bytes": 2, "bytes_per_second": 3}
    bench.outbox.say_job(dataclasses.replace(job, state=resources.JobState.QUEUED))
    bench.outbox.say_job(job)
    bench.outbox.say_job(dataclasses.replace(job, progress=progress))
    finished = dataclasses.replace(ended(status_updates=True), id=job.id)
    await bench.outbox.tell_end(jobs.Ended(finished, 11, None))
    async with bench.running():
        await bench.flush()
    kinds = [one.properties.message_type for one in bench.broker.replies]
    assert kinds == ["status", "status", "status", "result"]
    bodies = [one.body for one in bench.broker.replies[:3]]
    assert [body["state"] for body in bodies] == ["queued", "running", "running"]
    assert bodies[2]["progress"] == progress
    assert set(bodies[0]) == {"job_id", "method", "state", "attempt", "progress", "at"}
    assert len({one.properties.message_id for one in bench.broker.replies}) == 4


@pytest.mark.parametrize("changed", [{"status_updates": False}, {"reply_to": None}])
async def test_no_status_message_goes_to_a_caller_that_did_not_ask(
    bench: Bench, changed: dict[str, Any]
) -> None:
    bench.outbox.say_job(a_job(**{"status_updates": True, **changed}))
    async with bench.running():
        await bench.flush()
    assert bench.broker.replies == []


# What the broker does not take


async def test_a_reply_that_nobody_waits_for_is_logged_once_and_settled(bench: Bench) -> None:
    bench.broker.unroutable.add("replies")
    with structlog.testing.capture_logs() as logs:
        async with bench.running():
            await bench.outbox.tell_end(jobs.Ended(ended(), 11, None))
            await bench.flush()
            await asyncio.sleep(0.6)
    assert bench.store.deleted == [11]
    assert [log["event"] for log in logs].count("reply.undeliverable") == 1
    assert bench.broker.attempts.count("replies") == 1


@pytest.mark.parametrize(
    ("queue", "mandatory"), [("replies", True), ("amq.rabbitmq.reply-to.g1h2", False)]
)
async def test_a_direct_reply_is_never_judged_by_whether_it_comes_back(
    bench: Bench, queue: str, mandatory: bool
) -> None:
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(ended(reply_to=queue), 11, None))
        await bench.flush()
    assert bench.broker.replies[0].mandatory is mandatory


async def test_what_must_arrive_is_sent_again_until_the_broker_is_back(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    bench.broker.away = True
    async with bench.running():
        job = ended("dead")
        await bench.outbox.tell_end(jobs.Ended(job, 11, volume_event(volume_id, "error", 2)))
        await eventually(lambda: len(bench.broker.attempts) >= 4)
        await asyncio.sleep(0.1)
        assert bench.store.deleted == []
        bench.broker.away = False
        await bench.flush()
    assert bench.store.deleted == [11]
    assert len(bench.broker.replies) == 1
    assert len(bench.broker.keys("volume.dead")) == 1
    assert set(bench.broker.keys("volume.events")) == {
        f"job.{job.id}.dead",
        f"volume.{volume_id}.error",
    }


async def test_a_passing_status_message_is_not_kept_for_a_broker_that_is_away(
    bench: Bench,
) -> None:
    bench.broker.away = True
    async with bench.running():
        bench.outbox.say_job(a_job(status_updates=True))
        await eventually(lambda: len(bench.broker.attempts) >= 2)
        bench.broker.away = False
        await bench.flush()
    assert bench.broker.replies == []


async def test_an_event_that_failed_gives_way_to_a_newer_one(bench: Bench) -> None:
    volume_id = uuid.uuid4()
    bench.broker.away = True
    async with bench.running():
        bench.outbox.say_volume(volume_event(volume_id, "creating", 1))
        await eventually(lambda: bench.broker.attempts)
        event = volume_event(volume_id, "available", 2)
        await bench.outbox.tell_end(jobs.Ended(ended(reply_to=None), 11, event))
        bench.broker.away = False
        await bench.flush()
    volume_keys = [key for key in bench.broker.keys("volume.events") if key.startswith("volume.")]
    assert volume_keys == [f"volume.{volume_id}.available"]
    assert bench.store.deleted == [11]


async def test_replies_keep_their_order_over_a_broker_that_was_away(bench: Bench) -> None:
    bench.broker.away = True
    async with bench.running():
        for number in range(5):
            job = ended(correlation_id=str(number))
            await bench.outbox.tell(outbox_store.Entry(number, job=job, reply_only=True))
            await asyncio.sleep(0)
        await eventually(lambda: bench.broker.attempts)
        bench.broker.away = False
        await bench.flush()
    assert [one.properties.correlation_id for one in bench.broker.replies] == list("01234")


async def test_a_flush_that_takes_too_long_says_so(bench: Bench) -> None:
    bench.broker.away = True
    async with bench.running():
        await bench.outbox.tell_end(jobs.Ended(ended(), 11, None))
        assert not await bench.outbox.flush(0.1)


async def test_a_reply_that_the_broker_ends_the_connection_over_holds_up_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PAUSE", 0.01)
    bench.broker.ends_connection.add(POISON)
    with structlog.testing.capture_logs() as logs:
        async with bench.running():
            for number in range(9):
                job = ended(
                    correlation_id=str(number),
                    reply_to=POISON if number == 6 else "replies",
                    status_updates=True,
                )
                await bench.outbox.tell(outbox_store.Entry(number, job=job, reply_only=True))
            await bench.flush()
            # Nobody else pays for what is said to that caller from now on.
            before = len(bench.broker.sent)
            bench.outbox.say_job(a_job(reply_to=POISON, status_updates=True))
            await bench.flush()
            assert len(bench.broker.sent) == before + 1
    assert [one.properties.correlation_id for one in bench.broker.replies] == list("01234578")
    assert sorted(bench.store.deleted) == list(range(9))
    assert [log["routing_key"] for log in logs if log["event"] == "outbox.ends_connection"] == [
        POISON
    ]
    assert bench.broker.sent[:2] == [9, 4]
    assert bench.broker.attempts.count(POISON) <= 8
    assert POISON not in bench.broker.keys("")


async def test_an_answer_that_ended_the_connection_is_said_again_until_it_is_to_blame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PAUSE", 0.01)
    bench.broker.ends_connection.add(POISON)
    async with bench.running():
        for reply_to in (POISON, "replies"):
            bench.outbox.say_again(reply_to, frames.Plain(b"{}", "m"))
        await bench.flush()
    assert bench.broker.keys("") == ["replies"]
    assert bench.broker.attempts.count(POISON) <= 4


async def test_a_connection_that_breaks_is_nobodys_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PAUSE", 0.01)
    bench.broker.ends_connection.add("replies")
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(1, job=ended(), reply_only=True))
        await eventually(lambda: len(bench.broker.sent) == 2)
        # The broker is away now, for far longer.
        bench.broker.ends_connection.clear()
        bench.broker.away = True
        await eventually(lambda: len(bench.broker.sent) > 20)
        bench.broker.away = False
        await bench.flush()
    assert len(bench.broker.replies) == 1


async def test_a_letter_that_the_broker_ends_the_connection_over_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "PAUSE", 0.01)
    bench.broker.ends_connection.add("")
    reasons = letters.reason_headers(error=errors.InvalidRequest("x"), origin=ADDRESS)
    letter = outbox_store.Letter(ADDRESS, b"", {**stored({}), "reasons": reasons})
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(1, letter=letter))
        await bench.outbox.tell(outbox_store.Entry(2, job=ended(), reply_only=True))
        await bench.flush()
    assert bench.store.deleted == [2]
    assert len(bench.broker.replies) == 1


async def test_replies_that_wait_for_their_queues_leave_room_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MANY", 10)
    monkeypatch.setattr(dispatcher, "MOST_PATIENT", 15)
    monkeypatch.setattr(dispatcher, "APART_BASE", dispatcher.APART_CAP)
    bench.broker.unroutable.add("gone")
    for_ever = datetime.datetime(9000, 1, 1, tzinfo=datetime.UTC)
    async with bench.running():
        for number in range(20):
            job = ended(reply_to="gone", deadline=for_ever)
            await bench.outbox.tell(outbox_store.Entry(number, job=job, reply_only=True))
            await bench.flush()
        await bench.outbox.tell(outbox_store.Entry(20, job=ended(), reply_only=True))
        await bench.flush()
        assert len(bench.broker.replies) == 1
        # Those that have waited longest.
        assert bench.store.deleted == [0, 1, 2, 3, 4, 20]


# Messages that never became jobs


@pytest.mark.parametrize(
    "headers", [{"x": "h" * 5000}, {"x": 2**70}], ids=["too large", "no such number"]
)
@pytest.mark.parametrize("is_job", [False, True])
async def test_a_letter_is_sent_without_its_senders_headers_if_it_cannot_be_with_them(
    bench: Bench, headers: dict[str, Any], is_job: bool
) -> None:
    properties = stored(headers, message_id="m")
    reasons = letters.reason_headers(error=errors.InvalidRequest("no"), origin=ADDRESS)
    letter = outbox_store.Letter(ADDRESS, b"body", {**properties, "reasons": reasons})
    job = ended("failed", reply_to=None, properties=properties, body=b"body")
    entry = outbox_store.Entry(11, job=job) if is_job else outbox_store.Entry(11, letter=letter)
    async with bench.running():
        await bench.outbox.tell(entry)
        await bench.flush()
    (sent,) = (one for one in bench.broker.published if one.exchange == "volume.dead")
    assert (sent.data, sent.properties.message_id) == (b"body", "m")
    sent_headers = dict(sent.properties.headers or {})
    assert sent_headers["reason"] == "InvalidRequest"
    assert sent_headers["headers-left-out"] == 1
    assert "x" not in sent_headers
    assert bench.store.deleted == [11]


async def test_a_letter_is_sent_as_it_came_with_its_reasons(bench: Bench) -> None:
    reasons = letters.reason_headers(error=errors.InvalidRequest("no JSON"), origin=ADDRESS)
    table = {"$table": [["mine", {"$bytes": "AAE="}]]}
    properties = {"message_id": "m", "headers": table, "reasons": reasons}
    letter = outbox_store.Letter(ADDRESS, b"\xff\x00", properties)
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(11, letter=letter))
        await bench.flush()
    (sent,) = bench.broker.published
    assert sent.data == b"\xff\x00"
    assert sent.properties.message_id == "m"
    headers = dict(sent.properties.headers or {})
    assert headers["mine"] == b"\x00\x01"
    assert headers["reason"] == "InvalidRequest"
    assert bench.store.deleted == [11]


async def test_a_letter_stays_while_there_is_no_queue_for_it(bench: Bench) -> None:
    reasons = letters.reason_headers(error=errors.InvalidRequest("x"), origin=ADDRESS)
    letter = outbox_store.Letter(ADDRESS, b"", {**stored({}), "reasons": reasons})
    bench.broker.unroutable.add("")
    async with bench.running():
        await bench.outbox.tell(outbox_store.Entry(11, letter=letter))
        await eventually(lambda: bench.broker.attempts)
        await asyncio.sleep(0.1)
        assert bench.store.deleted == []
        bench.broker.unroutable.clear()
        await bench.flush()
    assert bench.store.deleted == [11]


async def test_one_letter_that_cannot_be_restored_does_not_stop_the_others(bench: Bench) -> None:
    """Whatever it is that stands in the table: it is left there, for a person to look at."""
    reasons = letters.reason_headers(error=errors.InvalidRequest("x"), origin=ADDRESS)
    bad = outbox_store.Letter(ADDRESS, b"1", {"headers": {"$bytes": "x"}, "reasons": reasons})
    good = outbox_store.Letter(ADDRESS, b"2", {**stored({}), "reasons": reasons})
    async with bench.running():
        for entry_id, letter in ((11, bad), (12, good)):
            await bench.outbox.tell(outbox_store.Entry(entry_id, letter=letter))
        await bench.flush()
    assert [one.data for one in bench.broker.published] == [b"2"]
    assert bench.store.deleted == [12]
