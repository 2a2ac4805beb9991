"""The client against a real broker and a worker that does what the test says."""

import asyncio
import collections
import contextlib
import datetime
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pytest

from messages import client, errors, replies, topology
from tests.services import environment, tcp_proxy

ADDRESS = "host-a@fast"
Message = aio_pika.abc.AbstractIncomingMessage


class FakeWorker:
    """Takes requests from the address's queue, and answers each as :attr:`script` says."""

    def __init__(self, site: environment.Installation) -> None:
        self.names = topology.Topology(site.namespace)
        self.requests: list[Message] = []
        self.script: Callable[[Message], Awaitable[None]] = self.succeed
        self._url = site.broker_url
        self._channel: aio_pika.abc.AbstractChannel

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, site: environment.Installation) -> AsyncIterator["FakeWorker"]:
        worker = cls(site)
        site.addresses.add(ADDRESS)
        connection = await aio_pika.connect(site.broker_url)
        async with connection:
            worker._channel = channel = await connection.channel()
            exchange = await channel.declare_exchange(
                worker.names.requests, aio_pika.ExchangeType.TOPIC, durable=True
            )
            queue = await channel.declare_queue(
                worker.names.queue(ADDRESS), durable=True, arguments={"x-queue-type": "quorum"}
            )
            await queue.bind(exchange, ADDRESS)
            await queue.consume(worker._take)
            yield worker

    async def _take(self, message: Message) -> None:
        self.requests.append(message)
        await message.ack()
        await self.script(message)

    async def came(self, count: int = 1) -> list[Message]:
        """Waits for requests."""
        await eventually(lambda: len(self.requests) >= count)
        return self.requests

    # Scripts

    async def say_nothing(self, message: Message) -> None:
        pass

    async def succeed(self, message: Message) -> None:
        await self.reply(
            message, replies.result(message.message_id, "m", {"echo": json.loads(message.body)})
        )

    def fail_with(self, error: Mapping[str, Any]) -> Callable[[Message], Awaitable[None]]:
        async def fail(message: Message) -> None:
            await self.reply(message, replies.failure(message.message_id, "m", error))

        return fail

    async def reply(
        self, message: Message, body: Any, kind: str | None = "result", **changed: Any
    ) -> None:
        """Publishes a reply to a request."""
        assert message.reply_to is not None
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        values = {"correlation_id": message.correlation_id, "type": kind, **changed}
        await self._channel.default_exchange.publish(
            aio_pika.Message(raw, **values), message.reply_to
        )

    async def status(self, message: Message, number: int) -> None:
        """Publishes a status message."""
        job = {
            "id": message.message_id,
            "method": "m",
            "state": "running",
            "attempt": 1,
            "progress": {"done_bytes": number, "total_bytes": 9, "bytes_per_second": 1},
        }
        await self.reply(message, replies.status(job, "now"), "status")


@pytest.fixture
async def worker(installation: environment.Installation) -> AsyncIterator[FakeWorker]:
    async with FakeWorker.running(installation) as running:
        yield running


@pytest.fixture
async def volumes(installation: environment.Installation) -> AsyncIterator[client.Client]:
    async with client.Client(installation.broker_url, namespace=installation.namespace) as opened:
        yield opened


async def eventually(holds: Callable[[], object], timeout: float = 10) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.01)


async def exists(site: environment.Installation, queue: str) -> bool:
    connection = await aio_pika.connect(site.broker_url)
    async with connection:
        channel = await connection.channel()
        try:
            await channel.declare_queue(queue, passive=True)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
    return True


# What is sent


async def test_a_call_is_sent_as_the_contract_says(
    worker: FakeWorker, volumes: client.Client
) -> None:
    identity, parent = uuid.uuid4(), uuid.uuid4()
    before = datetime.datetime.now(datetime.UTC)
    await volumes.call(
        "get_volume",
        ADDRESS,
        {"volume_id": "v"},
        message_id=identity,
        parent_job=parent,
        timeout=20,
        on_status=print,
    )
    (request,) = worker.requests
    assert json.loads(request.body) == {
        "method": "get_volume",
        "version": "1.0",
        "args": {"volume_id": "v"},
    }
    assert request.message_id == str(identity)
    assert request.content_type == "application/json"
    assert request.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert request.expiration is None
    assert request.exchange == worker.names.requests
    assert request.routing_key == ADDRESS
    assert request.reply_to
    assert request.correlation_id
    assert not worker.names.is_reserved(request.reply_to)
    headers = dict(request.headers)
    deadline = datetime.datetime.fromisoformat(str(headers.pop("deadline")))
    assert 19 < (deadline - before).total_seconds() < 25
    assert {name: headers[name] for name in ("parent-job", "status-updates")} == {
        "parent-job": str(parent),
        "status-updates": True,
    }


async def test_without_a_wish_for_status_messages_none_are_asked_for(
    worker: FakeWorker, volumes: client.Client
) -> None:
    await volumes.call("get_volume", ADDRESS)
    assert "status-updates" not in worker.requests[0].headers
    assert "parent-job" not in worker.requests[0].headers
    assert json.loads(worker.requests[0].body)["args"] == {}
    uuid.UUID(worker.requests[0].message_id)


async def test_a_cast_names_no_reply_queue_and_gives_the_jobs_id(
    worker: FakeWorker, volumes: client.Client
) -> None:
    worker.script = worker.say_nothing
    job_id = await volumes.cast("delete_volume", ADDRESS, {"volume_id": "v"})
    (request,) = await worker.came()
    assert request.message_id == str(job_id)
    assert request.reply_to is None
    assert "deadline" not in request.headers
    mine = uuid.uuid4()
    assert await volumes.cast("delete_volume", ADDRESS, message_id=mine) == mine


async def test_a_backend_that_does_not_exist_is_told_at_once(
    worker: FakeWorker, volumes: client.Client
) -> None:
    began = time.monotonic()
    for send in (volumes.call, volumes.cast):
        with pytest.raises(errors.NoSuchAddress, match="host-z@fast") as refused:
            await send("get_volume", "host-z@fast", timeout=20)
        assert not refused.value.retryable
    assert time.monotonic() - began < 5
    # And the connection is as good as before.
    assert (await volumes.call("get_volume", ADDRESS))["echo"]


async def test_a_namespace_that_does_not_exist_has_no_address(
    installation: environment.Installation,
) -> None:
    async with client.Client(installation.broker_url, namespace="test-nowhere") as volumes:
        for _ in range(2):
            with pytest.raises(errors.NoSuchAddress):
                await volumes.call("get_volume", ADDRESS, timeout=10)


# What comes back


async def test_a_result_is_returned(worker: FakeWorker, volumes: client.Client) -> None:
    result = await volumes.call("create_volume", ADDRESS, {"a": 1})
    assert result == {"echo": {"method": "create_volume", "version": "1.0", "args": {"a": 1}}}


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
async def test_an_error_is_raised_as_its_class(
    worker: FakeWorker, volumes: client.Client, code: str
) -> None:
    raised = errors.BY_CODE[code]("what to do", volume_id="v")
    worker.script = worker.fail_with(raised.to_wire())
    with pytest.raises(errors.VolumeWorkerError) as caught:
        await volumes.call("create_volume", ADDRESS)
    assert type(caught.value) is errors.BY_CODE[code]
    assert caught.value.to_wire() == raised.to_wire()


async def test_an_unknown_code_is_an_error_that_says_whether_to_send_again(
    worker: FakeWorker, volumes: client.Client
) -> None:
    worker.script = worker.fail_with({"code": "New", "message": "m", "retryable": True, "x": 1})
    with pytest.raises(errors.RemoteError) as caught:
        await volumes.call("create_volume", ADDRESS)
    assert caught.value.retryable
    assert caught.value.details["code"] == "New"


async def test_no_reply_in_time_is_told_with_what_to_ask_for(
    worker: FakeWorker, volumes: client.Client
) -> None:
    worker.script = worker.say_nothing
    began = time.monotonic()
    with pytest.raises(errors.ReplyTimeout) as caught:
        await volumes.call("create_volume", ADDRESS, timeout=0.5)
    assert 0.4 < time.monotonic() - began < 3
    assert caught.value.details == {"job_id": worker.requests[0].message_id}
    assert caught.value.retryable
    assert not volumes._calls


async def test_a_result_that_comes_too_late_hurts_nobody(
    worker: FakeWorker, volumes: client.Client
) -> None:
    worker.script = worker.say_nothing
    with pytest.raises(errors.ReplyTimeout):
        await volumes.call("create_volume", ADDRESS, timeout=0.3)
    await worker.succeed(worker.requests[0])
    worker.script = worker.succeed
    assert (await volumes.call("get_volume", ADDRESS))["echo"]["method"] == "get_volume"


async def test_status_messages_come_in_order_before_the_result(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        for number in range(5):
            await worker.status(message, number)
        await worker.succeed(message)

    worker.script = work
    seen: list[Mapping[str, Any]] = []
    await volumes.call("copy_volume_data", ADDRESS, on_status=seen.append)
    assert [status["progress"]["done_bytes"] for status in seen] == [0, 1, 2, 3, 4]
    assert seen[0]["job_id"] == worker.requests[0].message_id


async def test_a_callback_that_waits_is_waited_for_in_order(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        for number in range(5):
            await worker.status(message, number)
        await worker.succeed(message)

    worker.script = work
    seen: list[int] = []

    async def note(status: Mapping[str, Any]) -> None:
        number = status["progress"]["done_bytes"]
        # The first takes longest: those behind it must not overtake it.
        await asyncio.sleep(0.05 * (5 - number))
        seen.append(number)

    await volumes.call("copy_volume_data", ADDRESS, on_status=note)
    assert seen == [0, 1, 2, 3, 4]


async def test_a_callback_that_fails_does_not_cost_the_result(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        await worker.status(message, 1)
        await worker.succeed(message)

    worker.script = work

    def fail(_: Mapping[str, Any]) -> None:
        raise RuntimeError("the caller's own")

    assert (await volumes.call("copy_volume_data", ADDRESS, on_status=fail, timeout=5))["echo"]


@pytest.mark.parametrize("raw", [b"", b"no json", b"\xff\xfe", b'{"ok": true'])
async def test_a_reply_that_is_no_json_is_left_aside(
    worker: FakeWorker, volumes: client.Client, raw: bytes
) -> None:
    async def work(message: Message) -> None:
        await worker.reply(message, raw)
        await worker.reply(message, raw, "status")
        await worker.succeed(message)

    worker.script = work
    assert (await volumes.call("get_volume", ADDRESS, timeout=5))["echo"]


@pytest.mark.parametrize("body", [[], 5, None, "text", {}, {"ok": True}, {"ok": False, "error": 5}])
async def test_a_reply_that_is_no_result_is_an_error_of_the_tree_or_left_aside(
    worker: FakeWorker, volumes: client.Client, body: Any
) -> None:
    async def work(message: Message) -> None:
        await worker.reply(message, body)

    worker.script = work
    with pytest.raises(errors.VolumeWorkerError):
        await volumes.call("get_volume", ADDRESS, timeout=1)


async def test_replies_that_belong_to_nobody_are_left_aside(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        wrong = replies.result(message.message_id, "m", {"wrong": True})
        await worker.reply(message, wrong, correlation_id=str(uuid.uuid4()))
        await worker.reply(message, wrong, correlation_id=None)
        await worker.succeed(message)

    worker.script = work
    assert "echo" in await volumes.call("get_volume", ADDRESS)


async def test_a_result_that_comes_twice_is_had_once(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        await worker.reply(message, replies.result(None, "m", {"number": 1}))
        await worker.reply(message, replies.result(None, "m", {"number": 2}))

    worker.script = work
    assert await volumes.call("get_volume", ADDRESS) == {"number": 1}
    worker.script = worker.succeed
    assert "echo" in await volumes.call("get_volume", ADDRESS)


async def test_calls_at_the_same_time_get_their_own_results(
    worker: FakeWorker, volumes: client.Client
) -> None:
    held: list[Message] = []

    async def work(message: Message) -> None:
        held.append(message)
        if len(held) == 100:
            for one in reversed(held):
                await worker.succeed(one)

    worker.script = work
    results = await asyncio.gather(
        *(volumes.call("get_volume", ADDRESS, {"number": number}) for number in range(100))
    )
    assert [result["echo"]["args"]["number"] for result in results] == list(range(100))
    assert len({one.correlation_id for one in held}) == 100


# Trouble with the connection


@pytest.fixture
async def cuttable(
    installation: environment.Installation, worker: FakeWorker
) -> AsyncIterator[tuple[tcp_proxy.Proxy, client.Client]]:
    """A client whose connections lead through a proxy; the worker's does not."""
    async with (
        tcp_proxy.before(installation.broker_url) as (proxy, url),
        client.Client(url, namespace=installation.namespace) as volumes,
    ):
        yield proxy, volumes


async def test_a_call_ends_with_its_result_although_the_connection_was_cut(
    worker: FakeWorker, cuttable: tuple[tcp_proxy.Proxy, client.Client]
) -> None:
    proxy, volumes = cuttable
    worker.script = worker.say_nothing
    calling = asyncio.create_task(volumes.call("create_volume", ADDRESS, timeout=30))
    (first,) = await worker.came()
    await proxy.cut()
    # It is sent again under the same id, to the same reply queue, and answered each time.
    await worker.came(2)
    for request in list(worker.requests):
        await worker.succeed(request)
    assert "echo" in await calling
    assert {one.message_id for one in worker.requests} == {first.message_id}
    assert {one.reply_to for one in worker.requests} == {first.reply_to}
    assert len(worker.requests) <= 4
    # A copy that is still in the reply queue belongs to nobody any more.
    worker.script = worker.succeed
    again = await volumes.call("get_volume", ADDRESS, timeout=30)
    assert again["echo"]["method"] == "get_volume"


async def test_a_result_that_came_while_the_connection_was_away_is_had(
    worker: FakeWorker, cuttable: tuple[tcp_proxy.Proxy, client.Client]
) -> None:
    proxy, volumes = cuttable
    worker.script = worker.say_nothing
    calling = asyncio.create_task(volumes.call("create_volume", ADDRESS, timeout=30))
    (first,) = await worker.came()
    await proxy.stop()
    await proxy.cut()
    await worker.succeed(first)
    await asyncio.sleep(0.3)
    assert not calling.done()
    # Should the broker have sent it into the cut, the repeat is answered from what is stored.
    worker.script = worker.succeed
    await proxy.start()
    assert "echo" in await calling


async def test_many_calls_survive_many_cuts_with_one_result_each(
    worker: FakeWorker, cuttable: tuple[tcp_proxy.Proxy, client.Client]
) -> None:
    proxy, volumes = cuttable

    async def slowly(message: Message) -> None:
        await asyncio.sleep(0.02)
        await worker.succeed(message)

    worker.script = slowly
    done: collections.Counter[int] = collections.Counter()

    async def one(number: int) -> None:
        result = await volumes.call("get_volume", ADDRESS, {"number": number}, timeout=60)
        assert result["echo"]["args"]["number"] == number
        done[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(one(number))
        for _ in range(3):
            await asyncio.sleep(0.2)
            await proxy.cut()
    assert done == dict.fromkeys(range(40), 1)


async def test_a_request_waits_for_a_broker_that_comes_back(
    worker: FakeWorker, cuttable: tuple[tcp_proxy.Proxy, client.Client]
) -> None:
    proxy, volumes = cuttable
    await volumes.call("get_volume", ADDRESS)
    await proxy.stop()
    await proxy.cut()
    calling = asyncio.create_task(volumes.call("get_volume", ADDRESS, timeout=30))
    casting = asyncio.create_task(volumes.cast("get_volume", ADDRESS, timeout=30))
    await asyncio.sleep(0.5)
    assert not calling.done()
    assert not casting.done()
    await proxy.start()
    assert "echo" in await calling
    await casting


async def test_a_broker_that_stays_away_is_told_when_the_time_is_up() -> None:
    async with client.Client("amqp://guest:hunter2@127.0.0.1:1/") as volumes:
        for send in (volumes.call, volumes.cast):
            began = time.monotonic()
            with pytest.raises(errors.Unreachable, match="broker_url") as caught:
                await send("get_volume", ADDRESS, timeout=0.5)
            assert not isinstance(caught.value, errors.ReplyTimeout)
            assert "hunter2" not in str(caught.value)
            assert time.monotonic() - began < 3


# The end


async def test_closing_leaves_no_queue_and_no_task(
    installation: environment.Installation, worker: FakeWorker
) -> None:
    tasks = set(asyncio.all_tasks())
    async with client.Client(installation.broker_url, namespace=installation.namespace) as volumes:
        await volumes.call("get_volume", ADDRESS, on_status=print)
        queue = worker.requests[0].reply_to
        assert queue is not None
        assert await exists(installation, queue)
    assert not await exists(installation, queue)
    await asyncio.sleep(0.1)
    assert {task for task in asyncio.all_tasks() if not task.done()} <= tasks


async def test_closing_at_any_moment_of_connecting_ends(
    installation: environment.Installation,
) -> None:
    """Connecting swallows a cancellation now and then."""
    tasks = set(asyncio.all_tasks())
    for step in range(120):
        async with asyncio.timeout(10):
            async with client.Client(installation.broker_url):
                await asyncio.sleep(step % 60 * 0.0005)

    def left() -> set[asyncio.Task[Any]]:
        return {task for task in asyncio.all_tasks() if not task.done()} - tasks

    await eventually(lambda: not left())
    assert left() == set()


async def test_closing_at_any_moment_of_connecting_leaves_no_queue(
    installation: environment.Installation,
) -> None:
    for step in range(20):
        async with client.Client(installation.broker_url) as volumes:
            await asyncio.sleep(step * 0.0015)
        assert not await exists(installation, volumes._reply_queue)


async def test_closing_after_the_broker_went_away_takes_bounded_time(
    installation: environment.Installation, worker: FakeWorker
) -> None:
    async with tcp_proxy.before(installation.broker_url) as (proxy, url):
        async with client.Client(url, namespace=installation.namespace) as volumes:
            await volumes.call("get_volume", ADDRESS)
            await proxy.stop()
            await proxy.cut()
            began = time.monotonic()
        assert time.monotonic() - began < 10
        # What could not be removed goes by itself.
        connection = await aio_pika.connect(installation.broker_url)
        async with connection:
            channel = await connection.channel()
            await channel.queue_delete(volumes._reply_queue)


async def test_a_call_that_is_cancelled_leaves_nothing(
    worker: FakeWorker, volumes: client.Client
) -> None:
    await volumes.call("get_volume", ADDRESS)
    worker.script = worker.say_nothing
    tasks = set(asyncio.all_tasks())
    calling = asyncio.create_task(volumes.call("get_volume", ADDRESS))
    await worker.came(2)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.sleep(0.05)
    assert not volumes._calls
    assert {task for task in asyncio.all_tasks() if not task.done()} <= tasks


# What must not hide a result, or an error


async def test_a_result_that_has_come_is_told_though_a_callback_takes_longer(
    worker: FakeWorker, volumes: client.Client
) -> None:
    async def work(message: Message) -> None:
        await worker.status(message, 1)
        await worker.succeed(message)

    worker.script = work

    async def hang(_: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    assert (await volumes.call("create_volume", ADDRESS, on_status=hang, timeout=1))["echo"]
    worker.script = worker.fail_with(errors.VolumeNotFound("gone").to_wire())
    with pytest.raises(errors.VolumeNotFound):
        await volumes.call("create_volume", ADDRESS, on_status=hang, timeout=1)


@pytest.mark.parametrize("broken", ["_replies", "_publisher"])
async def test_an_error_that_ends_a_link_is_raised_at_once(
    installation: environment.Installation, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("a fault of the set-up")

    began = time.monotonic()
    opened = client.Client(installation.broker_url, namespace=installation.namespace)
    held = opened._replies if broken == "_replies" else opened._publisher.link
    monkeypatch.setattr(held, "_setup", fail)
    async with opened as volumes:
        for send in (volumes.call, volumes.cast, volumes.call):
            with pytest.raises(RuntimeError, match="a fault of the set-up"):
                await send("get_volume", ADDRESS, timeout=20)
    assert time.monotonic() - began < 10
    assert not opened._calls


async def test_a_url_that_is_none_is_told_at_once() -> None:
    began = time.monotonic()
    async with client.Client("amqp://guest:guest@127.0.0.1:port/") as volumes:
        with pytest.raises(ValueError, match="port"):
            await volumes.call("get_volume", ADDRESS, timeout=20)
    assert time.monotonic() - began < 5


async def test_a_call_ends_with_its_client(
    worker: FakeWorker, installation: environment.Installation
) -> None:
    worker.script = worker.say_nothing
    async with client.Client(installation.broker_url, namespace=installation.namespace) as volumes:
        waiting = asyncio.create_task(volumes.call("get_volume", ADDRESS, timeout=20))
        await worker.came()
    with pytest.raises(errors.Unreachable, match="closed"):
        await asyncio.wait_for(waiting, 5)
