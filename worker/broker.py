"""The broker: what is declared there, what comes from it, what goes to it.

Two connections, so that a broker that throttles publishers does not hold up deliveries. The
callback of a delivery only hands over: it dies with its channel.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic
import structlog

from messages import errors, frames, link, topology

log = structlog.get_logger(__name__)

PREFETCH: Final = 256
"""Requests per backend that are stored in a batch at most, and unacknowledged at a time."""

LOOK_INTERVAL: Final = 15.0
"""Seconds between two looks whether what must stand on the broker still does."""
LOOK_SPACING: Final = 1.0
"""Seconds between two of them at least."""

Deliver = Callable[[str, aio_pika.abc.AbstractIncomingMessage], None]


class TopologyMismatch(errors.VolumeWorkerError):
    """A queue or exchange exists on the broker with other arguments than it must have."""


class Broker:
    """The worker's side of the broker.

    Args:
        serves: whether this process takes requests for an address now; see :meth:`look_again`.
    """

    def __init__(
        self,
        url: pydantic.SecretStr,
        names: topology.Topology,
        addresses: Sequence[str],
        *,
        name: str,
        serves: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.names = names
        self._addresses = addresses
        self._serves = serves
        self._deliver: Deliver | None = None
        self._consumers = link.Link(url, f"volume-worker {name} (requests)", self._consume)
        self._publisher = link.Publisher(url, f"volume-worker {name} (replies)")
        self._consuming: list[tuple[aio_pika.abc.AbstractQueue, str]] = []
        self._connection: aio_pika.abc.AbstractConnection | None = None
        self._stopped = False
        self._is_missing = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether requests come in and replies go out."""
        return self._consumers.is_up and self._publisher.is_up

    async def run(self, deliver: Deliver) -> None:
        """Keeps both connections until cancelled.

        ``deliver`` is called with the address and the message of each request.

        Raises:
            TopologyMismatch: the broker's queues are not what they must be; no retry can help.
        """
        self._deliver = deliver
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publisher.link.run())
            group.create_task(self._consumers.run())
            group.create_task(self._keep_standing())

    async def publish(
        self, message: frames.Message, *, exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Publishes with a confirm.

        Raises:
            Unroutable: it was mandatory, and there is no queue for it.
            Unreachable: no confirm came.
        """
        [error] = await self.publish_all([link.Outgoing(message, exchange, routing_key, mandatory)])
        if error is not None:
            raise error

    async def publish_all(
        self, messages: Sequence[link.Outgoing]
    ) -> list[errors.VolumeWorkerError | None]:
        """Publishes messages in one write; for each the error that it met, or None."""
        met = await self._publisher.publish_all(messages)
        if any(
            message.exchange and isinstance(error, link.Unroutable)
            for message, error in zip(messages, met, strict=True)
        ):
            # One of ours, since nobody else's is published to: somebody has removed it.
            self._is_missing.set()
        return met

    async def look_again(self) -> None:
        """Takes requests for other addresses than before: what ``serves`` says has changed."""
        if self._connection is not None and self._connection.transport is not None:
            # Its end starts everything over, as if the broker had been away for a moment.
            await self._connection.close()

    async def stop_consuming(self) -> None:
        """Lets no more requests in; those delivered can still be acknowledged."""
        self._stopped = True
        # At once, so that a broker that does not answer costs the time of one.
        await asyncio.gather(*(_cancel(queue, tag) for queue, tag in self._consuming))
        self._consuming = []

    async def _keep_standing(self) -> None:
        """Looks now and then whether all that must stand on the broker does; else starts over."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._is_missing.wait()
            if self._is_missing.is_set() or not await self._stands():
                self._is_missing.clear()
                log.warning("broker.starting_over")
                await self.look_again()
                # Who finds something missing over and over must not make this a tight loop.
                await asyncio.sleep(LOOK_SPACING)

    async def _stands(self) -> bool:
        """Whether each queue consumed has a consumer; what else is missing is made again."""
        connection = self._connection
        if connection is None or connection.transport is None:
            return True  # all of it is made when the broker is there again
        try:
            async with asyncio.timeout(link.SETUP_TIMEOUT):
                consumers = await self._declare(connection)
        except link.AWAY as error:
            log.warning("broker.look_failed", error=type(error).__name__)
            return True
        return all(consumers.get(queue.name, 0) > 0 for queue, _ in self._consuming)

    async def _consume(self, connection: aio_pika.abc.AbstractConnection) -> None:
        await self._declare(connection)
        self._connection = connection
        if self._stopped:
            return
        channel = await link.open_channel(connection)
        await channel.set_qos(prefetch_count=PREFETCH)
        self._consuming = []
        for address in filter(self._serves, self._addresses):
            if self._is_stopped():
                return
            queue = await channel.get_queue(self.names.queue(address), ensure=False)
            tag = await queue.consume(self._hand_over(address))
            self._consuming.append((queue, tag))
        # A channel that the broker closes takes its consumers along, and a queue that is deleted
        # its own: start over with all of it.
        channel.close_callbacks.add(lambda *_: asyncio.ensure_future(connection.close()))
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: connection.close())

    def _is_stopped(self) -> bool:
        return self._stopped

    def _hand_over(
        self, address: str
    ) -> Callable[[aio_pika.abc.AbstractIncomingMessage], Awaitable[None]]:
        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            assert self._deliver is not None
            self._deliver(address, message)

        return take

    async def _declare(self, connection: aio_pika.abc.AbstractConnection) -> dict[str, int]:
        """Declares all there must be; returns how many consumers each request queue has."""
        names = self.names
        consumers = {}
        channel = await link.open_channel(connection)
        try:
            requests = await channel.declare_exchange(
                names.requests, aio_pika.ExchangeType.TOPIC, durable=True
            )
            await channel.declare_exchange(names.events, aio_pika.ExchangeType.TOPIC, durable=True)
            dead = await channel.declare_exchange(
                names.dead, aio_pika.ExchangeType.FANOUT, durable=True
            )
            letters = await channel.declare_queue(
                names.dead, durable=True, arguments=dict(names.dead_queue_arguments())
            )
            await letters.bind(dead)
            for address in self._addresses:
                queue = await channel.declare_queue(
                    names.queue(address), durable=True, arguments=dict(names.queue_arguments())
                )
                await queue.bind(requests, routing_key=address)
                consumers[queue.name] = queue.declaration_result.consumer_count or 0
        except aio_pika.exceptions.ChannelPreconditionFailed as error:
            raise TopologyMismatch(
                f"the broker has something of that name with other arguments: {error}; "
                "remove it there (once it is empty) or use another namespace"
            ) from error
        await channel.close()
        return consumers


async def _cancel(queue: aio_pika.abc.AbstractQueue, tag: str) -> None:
    try:
        await queue.cancel(tag, timeout=link.CLOSE_TIMEOUT)
    except link.AWAY as error:
        log.info("broker.cancel_failed", error=type(error).__name__)
