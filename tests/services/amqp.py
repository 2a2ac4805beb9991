"""A caller that speaks plain AMQP: it knows the contract, and nothing of the project's client."""

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

import aio_pika
import aio_pika.abc

TIMEOUT: Final = 30.0
"""Seconds that a test waits for what must come."""
QUIET: Final = 0.4
"""Seconds after which what has not come is taken not to come."""

T = TypeVar("T")

_MADE: Final = "made"


class Failed(Exception):
    """A result that is an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']} {error['details']}")
        self.code: str = error["code"]
        self.message: str = error["message"]
        self.retryable: bool = error["retryable"]
        self.details: Mapping[str, Any] = error["details"]


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply as it came."""

    kind: str | None
    body: dict[str, Any]
    message_id: str | None
    correlation_id: str | None
    content_type: str | None


@dataclasses.dataclass(frozen=True)
class Event:
    """An event as it came, and when."""

    key: str
    body: dict[str, Any]
    at: float

    @property
    def status(self) -> str:
        """The last word of the routing key."""
        return self.key.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Letter:
    """A dead letter."""

    body: bytes
    headers: Mapping[str, Any]
    message_id: str | None
    reply_to: str | None
    correlation_id: str | None
    content_type: str | None
    type: str | None


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request that the broker has taken."""

    message_id: str | None
    correlation_id: str


class Events:
    """The events of an installation since this was opened."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    async def take(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Called with each message."""
        self.all.append(
            Event(message.routing_key or "", json.loads(message.body), time.monotonic())
        )

    def of(self, prefix: str) -> list[Event]:
        """Those whose routing key begins so."""
        return [event for event in self.all if event.key.startswith(prefix)]

    async def wait(self, key: str, *, timeout: float = TIMEOUT) -> Event:
        """Waits for an event with this routing key."""

        def found() -> Event | None:
            return next((event for event in self.all if event.key == key), None)

        return await eventually(found, timeout=timeout, what=f"event {key}")


class Caller:
    """Sends requests and keeps what comes back."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.reply_queue = f"test-replies-{uuid.uuid4()}"
        self.replies: list[Reply] = []
        self._came = asyncio.Event()
        self._connection: aio_pika.abc.AbstractConnection
        self._channel: aio_pika.abc.AbstractChannel

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, broker_url: str, namespace: str) -> AsyncIterator["Caller"]:
        """A caller for the time of the block, with a reply queue of its own."""
        caller = cls(namespace)
        caller._connection = await aio_pika.connect(broker_url)
        async with caller._connection:
            caller._channel = await caller._connection.channel(on_return_raises=True)
            queue = await caller._channel.declare_queue(
                caller.reply_queue, exclusive=True, auto_delete=True
            )
            await queue.consume(caller._take, no_ack=True)
            yield caller

    # Calling

    async def call(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any] | None = None,
        *,
        timeout: float = TIMEOUT,
        **properties: Any,
    ) -> dict[str, Any]:
        """Sends a request and returns its result.

        Raises:
            Failed: the result is an error.
        """
        reply = await self.result(
            await self.send(method, address, args, **properties), timeout=timeout
        )
        if not reply.body["ok"]:
            raise Failed(reply.body["error"])
        result: dict[str, Any] = reply.body["result"]
        return result

    async def fails(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> Failed:
        """Sends a request that must fail; returns its error."""
        try:
            result = await self.call(method, address, args, **properties)
        except Failed as error:
            return error
        raise AssertionError(f"{method} {args} succeeded: {result}")

    async def send(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any] | None = None,
        *,
        version: Any = "1.0",
        **properties: Any,
    ) -> Sent:
        """Sends a request; see :meth:`publish` for the properties."""
        body = {"method": method, "version": version, "args": dict(args or {})}
        return await self.publish(json.dumps(body).encode(), address, **properties)

    async def publish(
        self,
        body: bytes,
        address: str,
        *,
        message_id: str | None = _MADE,
        reply_to: str | None = _MADE,
        correlation_id: str | None = _MADE,
        headers: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Sent:
        """Publishes any body, persistent, mandatory, with a confirm.

        ``message_id``, ``reply_to`` and ``correlation_id`` are made where not given; None leaves
        them away.
        """
        if message_id == _MADE:
            message_id = str(uuid.uuid4())
        if correlation_id == _MADE:
            correlation_id = f"c-{uuid.uuid4()}"
        message = aio_pika.Message(
            body,
            message_id=message_id,
            reply_to=self.reply_queue if reply_to == _MADE else reply_to,
            correlation_id=correlation_id,
            headers=dict(headers or {}),
            **{
                "content_type": "application/json",
                "delivery_mode": aio_pika.DeliveryMode.PERSISTENT,
                **more,
            },
        )
        exchange = await self._channel.get_exchange(self.namespace, ensure=False)
        await exchange.publish(message, address, mandatory=True, timeout=TIMEOUT)
        return Sent(message_id, correlation_id or message_id or "")

    async def result(self, sent: Sent, *, timeout: float = TIMEOUT) -> Reply:
        """Waits for the result of a request: the first one that has come."""
        try:
            async with asyncio.timeout(timeout):
                while not (results := self.results(sent)):
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise AssertionError(f"no result of {sent} within {timeout} s") from None
        return results[0]

    async def only_result(self, sent: Sent, *, timeout: float = TIMEOUT) -> Reply:
        """Waits for the result of a request, and makes sure that there is no second one."""
        reply = await self.result(sent, timeout=timeout)
        await asyncio.sleep(QUIET)
        assert len(self.results(sent)) == 1
        return reply

    def results(self, sent: Sent) -> list[Reply]:
        """The results of a request so far."""
        return [r for r in self._of(sent) if r.kind == "result"]

    def statuses(self, sent: Sent) -> list[Reply]:
        """The status messages of a request so far."""
        return [r for r in self._of(sent) if r.kind == "status"]

    def _of(self, sent: Sent) -> list[Reply]:
        return [r for r in self.replies if r.correlation_id == sent.correlation_id]

    async def _take(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        self.replies.append(
            Reply(
                message.type,
                json.loads(message.body),
                message.message_id,
                message.correlation_id,
                message.content_type,
            )
        )
        self._came.set()

    # Events and dead letters

    @contextlib.asynccontextmanager
    async def events(self, *keys: str) -> AsyncIterator[Events]:
        """Collects events for the time of the block: all, or those that ``keys`` match."""
        events = Events()
        channel = await self._connection.channel()
        queue = await channel.declare_queue(exclusive=True, auto_delete=True)
        for key in keys or ("#",):
            await queue.bind(f"{self.namespace}.events", routing_key=key)
        await queue.consume(events.take, no_ack=True)
        try:
            yield events
        finally:
            await channel.close()

    @contextlib.asynccontextmanager
    async def peeking(self) -> AsyncIterator[list[aio_pika.abc.AbstractIncomingMessage]]:
        """The messages in the dead-letter queue, which go back into it after the block."""
        channel = await self._connection.channel()
        queue = await channel.get_queue(f"{self.namespace}.dead", ensure=False)
        found = []
        while (message := await queue.get(fail=False)) is not None:
            found.append(message)
        try:
            yield found
        finally:
            await channel.close()

    async def letters(self) -> list[Letter]:
        """The dead letters that there are; they stay."""
        async with self.peeking() as messages:
            return [
                Letter(
                    message.body,
                    message.headers,
                    message.message_id,
                    message.reply_to,
                    message.correlation_id,
                    message.content_type,
                    message.type,
                )
                for message in messages
            ]

    async def letters_with(self, correlation_id: str) -> list[Letter]:
        """The dead letters of one request."""
        return [one for one in await self.letters() if one.correlation_id == correlation_id]

    async def letter(self, sent: Sent, *, timeout: float = 10.0) -> Letter:
        """Waits for the dead letter of a request, by its correlation id or message id."""

        async def found() -> Letter | None:
            for one in await self.letters():
                same = one.correlation_id == sent.correlation_id
                if same or (one.message_id is not None and one.message_id == sent.message_id):
                    return one
            return None

        deadline = time.monotonic() + timeout
        while (letter := await found()) is None:
            assert time.monotonic() < deadline, f"no dead letter of {sent}"
            await asyncio.sleep(0.1)
        return letter


async def eventually(
    look: Callable[[], T | None], *, timeout: float = TIMEOUT, what: str = "what was waited for"
) -> T:
    """Looks until there is something, and returns it."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout} s"
        await asyncio.sleep(0.02)
    return found
