"""The broker: what is declared there, what comes from it, what goes to it.

Two connections, so that a broker that throttles publishers does not hold up deliveries. The
callback of a delivery only hands over: it dies with its channel.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic
import structlog

from messages import errors, link, topology

log = structlog.get_logger(__name__)

PREFETCH: Final = 256
"""Requests per backend that are stored in a batch at most, and unacknowledged at a time."""

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
        self._channel: aio_pika.abc.AbstractChannel | None = None
        self._consuming: list[tuple[aio_pika.abc.AbstractQueue, str]] = []
        self._stopped = False

    @property
    def is_up(self) -> bool:
        """Whether requests come in and replies go out."""
        return self._consumers.is_up and self._publisher.link.is_up

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

    async def publish(
        self, message: aio_pika.Message, *, exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Publishes with a confirm.

        Raises:
            Unroutable: it was mandatory, and there is no queue for it.
            Unreachable: no confirm came.
        """
        await self._publisher.publish(
            message, exchange=exchange, routing_key=routing_key, mandatory=mandatory
        )

    async def look_again(self) -> None:
        """Takes requests for other addresses than before: what ``serves`` says has changed."""
        if self._channel is not None and not self._channel.is_closed:
            # Its end starts everything over, as if the broker had been away for a moment.
            await self._channel.close()

    async def stop_consuming(self) -> None:
        """Lets no more requests in; those delivered can still be acknowledged."""
        self._stopped = True
        for queue, tag in self._consuming:
            try:
                await queue.cancel(tag, timeout=link.CLOSE_TIMEOUT)
            except link.AWAY as error:
                log.info("broker.cancel_failed", error=type(error).__name__)
        self._consuming = []

    async def _consume(self, connection: aio_pika.abc.AbstractConnection) -> None:
        await self._declare(connection)
        if self._stopped:
            return
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        self._consuming = []
        for address in filter(self._serves, self._addresses):
            queue = await channel.get_queue(self.names.queue(address), ensure=False)
            tag = await queue.consume(self._hand_over(address))
            self._consuming.append((queue, tag))
        # A channel that the broker closes takes its consumers along, and a queue that is deleted
        # its own: start over with all of it.
        channel.close_callbacks.add(lambda *_: asyncio.ensure_future(connection.close()))
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: connection.close())
        self._channel = channel

    def _hand_over(
        self, address: str
    ) -> Callable[[aio_pika.abc.AbstractIncomingMessage], Awaitable[None]]:
        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            assert self._deliver is not None
            self._deliver(address, message)

        return take

    async def _declare(self, connection: aio_pika.abc.AbstractConnection) -> None:
        names = self.names
        channel = await connection.channel()
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
        except aio_pika.exceptions.ChannelPreconditionFailed as error:
            raise TopologyMismatch(
                f"the broker has something of that name with other arguments: {error}; "
                "remove it there (once it is empty) or use another namespace"
            ) from error
        await channel.close()
