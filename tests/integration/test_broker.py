"""The worker's side of the broker, against a real one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic
import pytest

from messages import errors, link, topology
from tests.services import environment, tcp_proxy
from worker import broker

FAST, SLOW = "host-a@fast", "host-a@slow"


class Running:
    """A broker at work, and what it has handed over."""

    def __init__(self, site: environment.Installation, url: str, *addresses: str) -> None:
        site.addresses |= set(addresses)
        self.names = topology.Topology(site.namespace)
        self.broker = broker.Broker(pydantic.SecretStr(url), self.names, addresses, name="test")
        self.taken: list[tuple[str, aio_pika.abc.AbstractIncomingMessage]] = []

    @property
    def bodies(self) -> list[tuple[str, bytes]]:
        return [(address, message.body) for address, message in self.taken]

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator["Running"]:
        task = asyncio.create_task(
            self.broker.run(lambda address, message: self.taken.append((address, message)))
        )
        try:
            await eventually(lambda: self.broker.is_up or task.done())
            if task.done():
                await task
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
                await task

    async def send(self, address: str, body: bytes) -> None:
        """Publishes a request through the worker's own publisher."""
        await self.broker.publish(
            aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT),
            exchange=self.names.requests,
            routing_key=address,
            mandatory=True,
        )


async def eventually(holds: Callable[[], object], timeout: float = 20) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
async def running(installation: environment.Installation) -> AsyncIterator[Running]:
    async with Running(installation, installation.broker_url, FAST, SLOW).up() as up:
        yield up


@pytest.fixture
async def channel(
    installation: environment.Installation,
) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    connection = await aio_pika.connect(installation.broker_url)
    async with connection:
        yield await connection.channel()


async def test_what_is_declared_is_what_the_contract_says(
    running: Running, channel: aio_pika.abc.AbstractChannel
) -> None:
    """The broker refuses a declaration that differs in anything."""
    names = running.names
    await channel.declare_exchange(names.requests, "topic", durable=True)
    await channel.declare_exchange(names.events, "topic", durable=True)
    await channel.declare_exchange(names.dead, "fanout", durable=True)
    await channel.declare_queue(
        names.dead,
        durable=True,
        arguments={"x-queue-type": "quorum", "x-delivery-limit": 2147483647},
    )
    for address in (FAST, SLOW):
        queue = await channel.declare_queue(
            f"{names.namespace}.{address}",
            durable=True,
            arguments={
                "x-queue-type": "quorum",
                "x-dead-letter-exchange": names.dead,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-delivery-limit": 100,
            },
        )
        # The one that was there, and consumed from, before.
        assert queue.declaration_result.consumer_count == 1


@pytest.mark.parametrize("kind", ["queue", "exchange", "dead"])
async def test_what_is_there_with_other_arguments_is_told_and_not_tried_again(
    installation: environment.Installation, channel: aio_pika.abc.AbstractChannel, kind: str
) -> None:
    names = topology.Topology(installation.namespace)
    match kind:
        case "queue":
            await channel.declare_queue(names.queue(FAST), durable=True)
        case "dead":
            await channel.declare_queue(names.dead, durable=True)
        case _:
            await channel.declare_exchange(names.requests, "direct", durable=True)
    with pytest.raises(ExceptionGroup) as raised:
        async with Running(installation, installation.broker_url, FAST).up():
            pass
    assert raised.group_contains(broker.TopologyMismatch, match="other arguments")


async def test_requests_are_handed_over_in_order_with_their_address(running: Running) -> None:
    for number in range(20):
        await running.send(FAST if number % 2 else SLOW, str(number).encode())
    await eventually(lambda: len(running.taken) == 20)
    for address, first in ((FAST, 1), (SLOW, 0)):
        numbers = [int(body) for at, body in running.bodies if at == address]
        assert numbers == list(range(first, 20, 2))


async def test_a_message_without_a_queue_comes_back(running: Running) -> None:
    message = aio_pika.Message(b"")
    for exchange, key in (("", "no-such-queue"), (running.names.requests, "host-z@fast")):
        with pytest.raises(link.Unroutable):
            await running.broker.publish(
                message, exchange=exchange, routing_key=key, mandatory=True
            )
    # An event that nobody listens to is no error.
    await running.broker.publish(
        message, exchange=running.names.events, routing_key="x", mandatory=False
    )


async def test_an_exchange_that_does_not_exist_does_not_stop_the_publisher(
    running: Running,
) -> None:
    with pytest.raises(link.Unroutable):
        await running.broker.publish(
            aio_pika.Message(b""), exchange="no-such-exchange", routing_key="x", mandatory=True
        )
    for _ in range(50):
        try:
            await running.send(FAST, b"after")
            break
        except errors.Unreachable:
            await asyncio.sleep(0.05)
    await eventually(lambda: running.bodies == [(FAST, b"after")])


async def test_a_full_queue_is_unreachable_for_now_and_not_unroutable(
    running: Running, channel: aio_pika.abc.AbstractChannel
) -> None:
    queue = await channel.declare_queue(
        exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )

    async def fill() -> None:
        for _ in range(4):
            await running.broker.publish(
                aio_pika.Message(b"1"), exchange="", routing_key=queue.name, mandatory=True
            )

    with pytest.raises(errors.Unreachable):
        await fill()


async def test_nothing_comes_in_after_consuming_was_stopped(running: Running) -> None:
    await running.send(FAST, b"before")
    await eventually(lambda: running.taken)
    await running.broker.stop_consuming()
    await running.send(FAST, b"after")
    await asyncio.sleep(0.3)
    assert running.bodies == [(FAST, b"before")]
    # What was delivered can still be acknowledged.
    await running.taken[0][1].ack()


async def test_what_was_not_acknowledged_comes_again_after_a_cut(
    installation: environment.Installation,
) -> None:
    async with (
        tcp_proxy.before(installation.broker_url) as (proxy, url),
        Running(installation, url, FAST).up() as running,
    ):
        await running.send(FAST, b"kept")
        await running.send(FAST, b"done")
        await eventually(lambda: len(running.taken) == 2)
        await running.taken[1][1].ack()
        await asyncio.sleep(0.1)
        await proxy.cut()
        await eventually(lambda: len(running.taken) == 3)
        assert running.bodies[2] == (FAST, b"kept")
        assert running.taken[2][1].redelivered
        await eventually(lambda: running.broker.is_up)
        await running.taken[2][1].ack()


async def test_it_comes_back_to_a_broker_that_was_away_and_forgets_nothing_it_declared(
    installation: environment.Installation, channel: aio_pika.abc.AbstractChannel
) -> None:
    async with (
        tcp_proxy.before(installation.broker_url) as (proxy, url),
        Running(installation, url, FAST).up() as running,
    ):
        await proxy.stop()
        await proxy.cut()
        await eventually(lambda: not running.broker.is_up)
        with pytest.raises(errors.Unreachable):
            await running.send(FAST, b"x")
        await channel.queue_delete(running.names.queue(FAST))
        await proxy.start()
        await eventually(lambda: running.broker.is_up)
        await running.send(FAST, b"again")
        await eventually(lambda: running.bodies == [(FAST, b"again")])


async def test_a_queue_that_is_deleted_under_the_worker_is_made_again(
    running: Running, channel: aio_pika.abc.AbstractChannel
) -> None:
    await channel.queue_delete(running.names.queue(FAST))

    async def taken() -> bool:
        with contextlib.suppress(link.Unroutable, errors.Unreachable):
            await running.send(FAST, b"x")
        await asyncio.sleep(0.1)
        return bool(running.taken)

    async with asyncio.timeout(20):
        while not await taken():
            pass
    assert running.bodies[0] == (FAST, b"x")


@pytest.mark.parametrize("stopped", [False, True])
async def test_it_ends_at_once_while_the_broker_is_away(
    installation: environment.Installation, stopped: bool
) -> None:
    async with tcp_proxy.before(installation.broker_url) as (proxy, url):
        async with Running(installation, url, FAST).up() as running:
            if stopped:
                await running.broker.stop_consuming()
            await proxy.stop()
            await proxy.cut()
            # Just now the connections are being let go of.
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 8
