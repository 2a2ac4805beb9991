"""A connection to the broker that is made again whenever it breaks.

aio-pika's robust connection is not used: it makes a connection again with every channel and queue
that it ever had, in a fixed rhythm, and one queue that is refused keeps all from coming back. Here
the owner sets up what it needs, each time, and says what is fatal.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic

from messages import decoding, errors

# Not structlog, which prints to stdout where a caller has not set it up.
log = logging.getLogger(__name__)

PUBLISH_TIMEOUT: Final = 30.0
"""Seconds that a publish waits for its confirm; a broker under an alarm sends none."""
CONNECT_TIMEOUT: Final = 15.0
MAX_BACKOFF: Final = 10.0
CLOSE_TIMEOUT: Final = 3.0

AWAY: Final = (
    OSError,
    TimeoutError,
    aio_pika.exceptions.AMQPError,
    aio_pika.exceptions.ChannelInvalidStateError,
    asyncio.IncompleteReadError,
)
"""What publishing or declaring raises when the broker, or the way to it, is in trouble."""

decoding.tolerate()

Setup = Callable[[aio_pika.abc.AbstractConnection], Awaitable[None]]


class Unroutable(errors.VolumeWorkerError):
    """The broker returned the message: no queue is bound for it."""


class Link:
    """Keeps one connection open; :meth:`run` is its life.

    Args:
        setup: called with each new connection, before :meth:`ready` lets anybody through. An
            error of :data:`AWAY` is tried again with the next connection; any other ends the link.
    """

    def __init__(self, url: pydantic.SecretStr, name: str, setup: Setup) -> None:
        self._url = url
        self._name = name
        self._setup = setup
        self._up = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether it is connected and set up."""
        return self._up.is_set()

    async def ready(self) -> None:
        """Waits until it is connected and set up."""
        await self._up.wait()

    async def run(self) -> None:
        """Connects, again and again, until cancelled."""
        failures = 0
        while True:
            try:
                await self._live_once()
                failures = 0
            except AWAY as error:
                if failures in (0, 5) or failures % 30 == 0:
                    log.warning(
                        "broker.away", extra={"link": self._name, "error": _describe(error)}
                    )
            _end_if_cancelled()
            # Full jitter, so that workers do not come back to a restarted broker all at once.
            await asyncio.sleep(random.uniform(0.05, min(MAX_BACKOFF, 0.25 * 2**failures)))  # noqa: S311
            failures = min(failures + 1, 10)

    async def _live_once(self) -> None:
        connection = await self._connect()
        closed = asyncio.Event()
        connection.close_callbacks.add(lambda *_: closed.set())
        try:
            await self._setup(connection)
            _end_if_cancelled()
            self._up.set()
            log.info("broker.connected", extra={"link": self._name})
            await closed.wait()
            log.warning("broker.connection_lost", extra={"link": self._name})
        finally:
            self._up.clear()
            with contextlib.suppress(*AWAY):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await connection.close()

    async def _connect(self) -> aio_pika.abc.AbstractConnection:
        return await aio_pika.connect(
            self._url.get_secret_value(),
            timeout=CONNECT_TIMEOUT,
            client_properties={"connection_name": self._name},
        )


def _end_if_cancelled() -> None:
    """Ends a task that was cancelled: connecting and closing may have swallowed that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _describe(error: BaseException) -> str:
    # The URL, with its password, may be part of the text.
    return f"{type(error).__name__}: {error}".split("amqp", 1)[0].strip()


class Publisher:
    """Publishes with confirms over a link of its own."""

    def __init__(self, url: pydantic.SecretStr, name: str) -> None:
        self._channel: aio_pika.abc.AbstractChannel | None = None
        self._exchanges: dict[str, aio_pika.abc.AbstractExchange] = {}
        self.link = Link(url, name, self._set_up)

    async def _set_up(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._channel = None
        self._channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        self._exchanges = {}

    async def publish(
        self,
        message: aio_pika.Message,
        *,
        exchange: str,
        routing_key: str,
        mandatory: bool,
        timeout: float = PUBLISH_TIMEOUT,
    ) -> None:
        """Publishes one message and waits for the broker's confirm.

        Raises:
            Unroutable: it was mandatory, and there is no queue for it.
            Unreachable: no confirm came; the message may or may not have arrived.
        """
        channel = self._channel
        if channel is None or channel.is_closed:
            if channel is not None and self.link.is_up:
                await self._renew_channel(channel)
            raise errors.Unreachable("the broker is not connected")
        try:
            target = await self._exchange(channel, exchange)
            await target.publish(message, routing_key, mandatory=mandatory, timeout=timeout)
        except aio_pika.exceptions.DeliveryError as error:
            # A nack (a full queue, a broker in trouble) carries no return of the message.
            if isinstance(error, aio_pika.exceptions.PublishError):
                raise Unroutable(f"no queue is bound for {routing_key!r}") from None
            raise errors.Unreachable("the broker refused the message for now") from error
        except aio_pika.exceptions.ChannelNotFoundEntity:
            raise Unroutable(f"there is no exchange {exchange!r}") from None
        except AWAY as error:
            raise errors.Unreachable(f"the broker did not confirm: {_describe(error)}") from error

    async def _exchange(
        self, channel: aio_pika.abc.AbstractChannel, name: str
    ) -> aio_pika.abc.AbstractExchange:
        if not name:
            return channel.default_exchange
        if name not in self._exchanges:
            # Without asking the broker: its owner has declared it.
            self._exchanges[name] = await channel.get_exchange(name, ensure=False)
        return self._exchanges[name]

    async def _renew_channel(self, channel: aio_pika.abc.AbstractChannel) -> None:
        # The broker closes a channel on a publish to an exchange that is not there.
        with contextlib.suppress(*AWAY):
            await channel.reopen()
            self._exchanges = {}
