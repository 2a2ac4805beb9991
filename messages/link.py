"""A connection to the broker that is made again whenever it breaks.

aio-pika's robust connection is not used: it makes a connection again with every channel and queue
that it ever had, in a fixed rhythm, and one queue that is refused keeps all from coming back. Here
the owner sets up what it needs, each time, and says what is fatal.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic

from messages import decoding, errors, frames, wire

# Not structlog, which prints to stdout where a caller has not set it up.
log = logging.getLogger(__name__)

PUBLISH_TIMEOUT: Final = 30.0
"""Seconds that a publish waits for its confirm; a broker under an alarm sends none."""
STUCK_AFTER: Final = 5.0
"""Seconds after which a publish without its confirm means that messages do not get through now."""
CONNECT_TIMEOUT: Final = 15.0
SETUP_TIMEOUT: Final = 30.0
HEARTBEAT: Final = 10
"""Seconds between signs of life, where the URL says nothing else (``?heartbeat=``): a peer that is
silent for three of them is gone, however open the connection looks."""
STEADY_AFTER: Final = 10.0
"""Seconds that a connection must have held for the next one to be tried for at once."""
REMIND_EVERY: Final = 30
"""Tries after which trouble that lasts is told again."""
MAX_BACKOFF: Final = 5.0
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


class Refused(errors.Unreachable):
    """The broker has refused this message for now: a queue that it is for has no room."""


class ConnectionLost(errors.Unreachable):
    """The connection, or its channel, ended with the message on its way: maybe because of it."""


class Unpublishable(errors.VolumeWorkerError):
    """The message cannot be sent, however often it is tried."""


class NoExchange(Unroutable):
    """There is no exchange of that name."""


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
        self._held = 0.0
        self.trouble = ""
        """Why it is not connected, in words for a person; empty while it is."""

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
            self._held = 0.0
            try:
                await self._live_once()
            except AWAY as error:
                self._tell(error, failures)
            _end_if_cancelled()
            # One that is lost soon after each start must not be tried for in a tight loop either.
            failures = 0 if self._held > STEADY_AFTER else failures + 1
            # Full jitter, so that workers do not come back to a restarted broker all at once.
            most = min(MAX_BACKOFF, 0.25 * 2 ** min(failures, 10))
            await asyncio.sleep(random.uniform(0.05, most))  # noqa: S311

    def _tell(self, error: BaseException, failures: int) -> None:
        """Logs what has changed, and now and then what has not."""
        before, refusal = self.trouble, _refusal(error)
        self.trouble = refusal or _describe(error)
        if self.trouble == before and failures % REMIND_EVERY:
            return
        told = {"link": self._name, "error": self.trouble}
        if refusal:
            log.error("broker.refused", extra=told)
        else:
            log.warning("broker.away", extra=told)

    async def _live_once(self) -> None:
        connection = await self._connect()
        closed = asyncio.Event()
        connection.close_callbacks.add(lambda *_: closed.set())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SETUP_TIMEOUT):
                await self._setup(connection)
            _end_if_cancelled()
            began = loop.time()
            self.trouble = ""
            self._up.set()
            log.info("broker.connected", extra={"link": self._name})
            await closed.wait()
            self._held = loop.time() - began
            self.trouble = "the connection to the broker was lost"
            log.warning("broker.connection_lost", extra={"link": self._name})
        finally:
            self._up.clear()
            with contextlib.suppress(*AWAY):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await connection.close()

    async def _connect(self) -> aio_pika.abc.AbstractConnection:
        url = self._url.get_secret_value()
        has_heartbeat = "heartbeat" in urllib.parse.parse_qs(url.partition("?")[2])
        return await aio_pika.connect(
            url,
            timeout=CONNECT_TIMEOUT,
            client_properties={"connection_name": self._name},
            heartbeat=None if has_heartbeat else HEARTBEAT,
        )


async def open_channel(
    connection: aio_pika.abc.AbstractConnection, **options: Any
) -> aio_pika.abc.AbstractChannel:
    """A channel of a connection.

    Raises:
        ConnectionError: the connection was closed meanwhile; and what else is of :data:`AWAY`.
    """
    try:
        return await connection.channel(**options)
    except RuntimeError as error:
        raise ConnectionError("the connection to the broker was closed meanwhile") from error


def _end_if_cancelled() -> None:
    """Ends a task that was cancelled: connecting and closing may have swallowed that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _describe(error: BaseException) -> str:
    # The URL, with its password, may be part of the text.
    return f"{type(error).__name__}: {error}".split("amqp", 1)[0].strip()


def _refusal(error: BaseException) -> str:
    """What to do where the broker answers, and says no; empty where it is another trouble."""
    text = str(error)
    if isinstance(error, aio_pika.exceptions.AuthenticationError) or "Login was refused" in text:
        return "the broker refuses broker_url's credentials: look at its user and password"
    if "ACCESS_REFUSED" in text:
        return f"the broker's user lacks a right (rabbitmqctl set_permissions): {_describe(error)}"
    # Where the vhost is none of its, RabbitMQ closes the connection instead of opening it.
    if "NOT_ALLOWED" in text or "Connection.OpenOk" in text:
        return (
            "the broker refuses the vhost: look at the end of broker_url, and at the user's rights"
        )
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and where it goes."""

    message: frames.Message
    exchange: str
    routing_key: str
    mandatory: bool


class Publisher:
    """Publishes with confirms over a link of its own."""

    def __init__(self, url: pydantic.SecretStr, name: str) -> None:
        self._channel: aio_pika.abc.AbstractChannel | None = None
        self._wire: wire.Wire | None = None
        self._underlay: Any = None
        self._renewing = asyncio.Lock()
        self._unconfirmed: dict[object, float] = {}
        """When what is on its way was sent, the oldest first."""
        self._confirmed_at = 0.0
        self.link = Link(url, name, self._set_up)

    @property
    def is_up(self) -> bool:
        """Whether it is connected, and messages get through."""
        oldest = next(iter(self._unconfirmed.values()), None)
        now = asyncio.get_running_loop().time()
        is_stuck = oldest is not None and now - max(oldest, self._confirmed_at) > STUCK_AFTER
        return self.link.is_up and not is_stuck and not self._is_blocked()

    def _is_blocked(self) -> bool:
        """Whether the broker has said that it takes no messages: an alarm of its memory or disk."""
        if self._underlay is None:
            return False
        # One step: it waits, or it does not.
        waiting = self._underlay.ready()
        try:
            waiting.send(None)
        except StopIteration:
            return False
        waiting.close()
        return True

    async def _set_up(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._channel = self._wire = self._underlay = None
        self._channel = await open_channel(
            connection, publisher_confirms=True, on_return_raises=True
        )
        self._wire = wire.Wire(await self._channel.get_underlay_channel())
        assert connection.transport is not None
        self._underlay = connection.transport.connection

    async def publish(
        self,
        message: frames.Message,
        *,
        exchange: str,
        routing_key: str,
        mandatory: bool,
        timeout: float = PUBLISH_TIMEOUT,
    ) -> None:
        """Publishes one message and waits for the broker's confirm.

        Raises:
            Unroutable: it was mandatory, and there is no queue for it.
            NoExchange: there is no such exchange.
            Unreachable: no confirm came; the message may or may not have arrived.
        """
        outgoing = Outgoing(message, exchange, routing_key, mandatory)
        [error] = await self.publish_all([outgoing], timeout=timeout)
        if error is not None:
            raise error

    async def publish_all(
        self, messages: Sequence[Outgoing], *, timeout: float = PUBLISH_TIMEOUT
    ) -> list[errors.VolumeWorkerError | None]:
        """Publishes messages in one write, in their order, and waits for all confirms.

        What :meth:`publish` raises for one is returned in its place.
        """
        way = self._wire
        if way is None or way.is_closed:
            if self._channel is not None and self.link.is_up:
                await self._renew_channel(self._channel)
            return _away(messages, "the broker is not connected")
        if self._is_blocked():
            # What is sent now is read by the broker later, after it was sent again.
            return _away(messages, "the broker takes no messages now: its memory or disk is full")
        ticket = object()
        self._unconfirmed[ticket] = asyncio.get_running_loop().time()
        try:
            confirms = [
                way.publish(
                    one.message,
                    exchange=one.exchange,
                    routing_key=one.routing_key,
                    mandatory=one.mandatory,
                )
                for one in messages
            ]
            is_answering = await self._wait(confirms, timeout)
        finally:
            del self._unconfirmed[ticket]
        return [
            _outcome(confirm, one, is_answering=is_answering)
            for confirm, one in zip(confirms, messages, strict=True)
        ]

    async def _wait(self, confirms: Sequence[wire.Confirm], timeout: float) -> bool:
        """Waits for confirms; whether the broker has given any of them.

        Those that are late although others have come are not waited for any longer: their queue is
        in trouble, and not the broker.
        """
        done, late = await asyncio.wait(confirms, timeout=min(STUCK_AFTER, timeout))
        if late and not done:
            done, _ = await asyncio.wait(
                confirms,
                timeout=max(timeout - STUCK_AFTER, 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        if done:
            self._confirmed_at = asyncio.get_running_loop().time()
        return bool(done)

    async def _renew_channel(self, channel: aio_pika.abc.AbstractChannel) -> None:
        # The broker closes a channel on a publish to an exchange that is not there.
        async with self._renewing:
            # A connection that was closed meanwhile is a RuntimeError to aio-pika.
            with contextlib.suppress(*AWAY, RuntimeError):
                if channel.is_closed:
                    await channel.reopen()
                    self._wire = wire.Wire(await channel.get_underlay_channel())


def _away(messages: Sequence[Outgoing], why: str) -> list[errors.VolumeWorkerError | None]:
    return [errors.Unreachable(why) for _ in messages]


def _outcome(
    confirm: wire.Confirm, message: Outgoing, *, is_answering: bool
) -> errors.VolumeWorkerError | None:
    """The error that a message met, if it met one."""
    if not confirm.done():
        confirm.cancel()
        if is_answering:
            return Refused("the broker confirms others and not this message")
        return errors.Unreachable("the broker did not confirm in time")
    match confirm.exception():
        case None:
            return None
        case aio_pika.exceptions.PublishError():
            return Unroutable(f"no queue is bound for {message.routing_key!r}")
        case wire.Unencodable() as error:
            return Unpublishable(str(error))
        case aio_pika.exceptions.DeliveryError():
            # A nack (a full queue, a broker in trouble) carries no return of the message.
            return Refused("the broker refused the message for now")
        case error:
            # An exchange that is not there takes the channel along, and all that is on its way.
            if message.exchange and f"no exchange '{message.exchange}'" in str(error):
                return NoExchange(f"there is no exchange {message.exchange!r}")
            return ConnectionLost(f"the broker did not confirm: {_describe(error)}")
