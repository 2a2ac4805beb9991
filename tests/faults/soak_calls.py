"""What the soak asks and what comes back: each call to its end, whatever dies meanwhile.

A plain caller does what the contract tells callers to do: it publishes with confirms until the
broker has its request, and asks ``get_job`` where no reply comes.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import enum
import json
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

import aio_pika
import aio_pika.abc
import aio_pika.exceptions

from messages import client, errors, link, requests
from tests.services import amqp

PATIENCE: Final = 8.0
"""Seconds until a caller asks what has become of its request."""
GRACE: Final = 3.0
"""Seconds that a reply may come later than the record says that the job has ended."""
OK: Final = "ok"
AWAY: Final = "Internal, retryable"
"""What a read may hear while the database is away."""
_ENDED: Final = ("succeeded", "failed", "dead", "cancelled")


class Via(enum.StrEnum):
    """How a request is sent."""

    PLAIN = "plain AMQP"
    CLIENT = "messages.client"
    CAST = "casts"


@dataclasses.dataclass(eq=False)
class Call:
    """One request, and everything that became of it."""

    method: str
    address: str
    args: Mapping[str, Any]
    via: Via = Via.PLAIN
    expects: Collection[str] = ()
    """Where given, the only outcomes that are right."""
    body: bytes | None = None
    """Sent instead of a request."""
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    key: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    """The correlation id."""
    has_job: bool = True
    """Whether its id is that of a job, once it is accepted."""
    sent: float = dataclasses.field(default_factory=time.monotonic)
    replies: list[amqp.Reply] = dataclasses.field(default_factory=list)
    outcome: str | None = None
    """``ok``, or an error's code."""
    result: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by_record: bool = False
    """Whether the outcome is from ``get_job``."""
    timeout: float | None = None
    """Seconds after which a plain caller waits no more, so it says."""
    queue_lost: bool = False
    """Whether its reply queue was deleted while it waited."""
    repeats: int = 0

    def __post_init__(self) -> None:
        method = requests.METHODS.get(self.method)
        if method is None or method.kind is not requests.Kind.JOB or self.body is not None:
            self.has_job = False

    @property
    def is_ok(self) -> bool:
        """Whether it was carried out."""
        return self.outcome == OK

    def end(self, body: Mapping[str, Any]) -> None:
        """Notes the result's body."""
        if body["ok"]:
            self.outcome, self.result = OK, body["result"]
        else:
            self.fail(body["error"]["code"], retryable=body["error"]["retryable"])

    def fail(self, code: str, *, retryable: bool) -> None:
        """Notes an error."""
        is_passing = code == "Internal" and retryable and not self.has_job
        self.outcome = AWAY if is_passing else code

    def end_by_record(self, job: Mapping[str, Any]) -> None:
        """Notes what ``get_job`` says of a job that has ended."""
        self.by_record = True
        succeeded = job["state"] == "succeeded"
        self.outcome = OK if succeeded else (job["error"] or {}).get("code", job["state"])
        self.result = job["result"] or {}

    def __str__(self) -> str:
        return f"{self.method} {self.id} at {self.address} {dict(self.args)} -> {self.outcome}"


class Ledger:
    """All that was asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, call: Call) -> Call:
        """Keeps a call."""
        self.calls.append(call)
        return call

    def pending(self) -> list[Call]:
        """Those that nobody has an answer to yet."""
        return [one for one in self.calls if one.outcome is None and one.via is not Via.CAST]


class Line(Protocol):
    """A way to the workers."""

    via: Via

    async def carry_out(self, call: Call) -> None:
        """Sends a request and follows it until its outcome is known."""

    async def cast(self, call: Call) -> None:
        """Sends a request that nobody waits for."""


class PlainLine:
    """A caller with a durable reply queue, and nothing of the project's client."""

    via = Via.PLAIN

    def __init__(self, url: str, namespace: str) -> None:
        self.queue = f"soak-replies-{uuid.uuid4()}"
        self._url = url
        self._namespace = namespace
        self._channel: aio_pika.abc.AbstractChannel | None = None
        self._up = asyncio.Event()
        self._came = asyncio.Condition()
        self._waiting: dict[str, Call] = {}
        self._was_up = False

    async def run(self) -> None:
        """Keeps the connection, until cancelled."""
        while True:
            with contextlib.suppress(*link.AWAY):
                await self._live()
            await asyncio.sleep(0.3)

    async def _live(self) -> None:
        connection = await aio_pika.connect(self._url, timeout=5, heartbeat=5)
        try:
            channel = await connection.channel(on_return_raises=True)
            lost = asyncio.Event()
            connection.close_callbacks.add(lambda *_: lost.set())
            channel.close_callbacks.add(lambda *_: lost.set())
            queue = await self._declare(connection, channel)
            underlay = await channel.get_underlay_channel()
            underlay.on_consumer_cancel_callbacks.add(lambda _: lost.set())
            await queue.consume(self._take)
            self._channel = channel
            self._up.set()
            await lost.wait()
        finally:
            self._up.clear()
            with contextlib.suppress(*link.AWAY):
                async with asyncio.timeout(2):
                    await connection.close()

    async def _declare(
        self, connection: aio_pika.abc.AbstractConnection, channel: aio_pika.abc.AbstractChannel
    ) -> aio_pika.abc.AbstractQueue:
        if self._was_up:
            try:
                look = await connection.channel()
                await look.declare_queue(self.queue, passive=True)
            except aio_pika.exceptions.ChannelNotFoundEntity:
                for call in self._waiting.values():
                    call.queue_lost = True
        self._was_up = True
        return await channel.declare_queue(self.queue, durable=True)

    async def _take(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        body = json.loads(message.body)
        call = self._waiting.get(message.correlation_id or "")
        if call is not None and message.type == "result":
            call.replies.append(
                amqp.Reply(message.type, body, message.message_id, call.key, message.content_type)
            )
            if call.outcome is None:
                call.end(body)
            async with self._came:
                self._came.notify_all()
        with contextlib.suppress(*link.AWAY):
            await message.ack()

    # Sending

    async def carry_out(self, call: Call) -> None:
        """See :class:`Line`."""
        self._waiting[call.key] = call
        await self.send(call)
        while not await self._has_ended(call, PATIENCE):
            await self._ask(call)

    async def cast(self, call: Call) -> None:
        """See :class:`Line`."""
        await self.send(call, answered=False)

    async def send(self, call: Call, *, answered: bool = True) -> None:
        """Publishes a request, again and again until the broker has it."""
        body = {"method": call.method, "version": "1.0", "args": dict(call.args)}
        headers: dict[str, Any] = {"status-updates": answered}
        if call.timeout is not None:
            moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=call.timeout)
            headers["deadline"] = moment.isoformat()
        message = aio_pika.Message(
            json.dumps(body).encode() if call.body is None else call.body,
            headers=headers,
            message_id=call.id,
            correlation_id=call.key,
            reply_to=self.queue if answered else None,
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        while True:
            await self._up.wait()
            assert self._channel is not None
            try:
                exchange = await self._channel.get_exchange(self._namespace, ensure=False)
                await exchange.publish(message, call.address, mandatory=True, timeout=5)
            except link.AWAY:
                await asyncio.sleep(0.2)
            else:
                return

    async def repeat(self, call: Call) -> None:
        """Sends a request of this line once more, as it was."""
        call.repeats += 1
        self._waiting[call.key] = call
        await self.send(call)

    async def _has_ended(self, call: Call, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._came:
                await self._came.wait_for(lambda: call.outcome is not None)
        return call.outcome is not None

    async def _ask(self, call: Call) -> None:
        """What has become of a call that no reply came to."""
        if not call.has_job:
            await self.repeat(call)
            return
        asked = Call("get_job", call.address, {"job_id": call.id})
        self._waiting[asked.key] = asked
        await self.send(asked)
        if not await self._has_ended(asked, PATIENCE):
            return
        if asked.outcome == "JobNotFound":
            # It is on its way still, or was refused by an answer that is lost.
            await self.repeat(call)
        elif (
            asked.is_ok
            and asked.result["state"] in _ENDED
            and not await self._has_ended(call, GRACE)
        ):
            call.end_by_record(asked.result)


class ClientLine:
    """The project's own client."""

    via = Via.CLIENT

    def __init__(self, made: client.Client, timeout: float) -> None:
        self._client = made
        self._timeout = timeout

    @property
    def queue(self) -> str:
        """Where its replies come."""
        return self._client._reply_queue

    async def carry_out(self, call: Call) -> None:
        """See :class:`Line`."""
        while call.outcome is None:
            identity = uuid.UUID(call.id)
            try:
                call.result = await self._client.call(
                    call.method, call.address, call.args, timeout=self._timeout, message_id=identity
                )
            except (errors.ReplyTimeout, errors.Unreachable):
                if call.has_job:
                    await self._ask(call)
            except errors.VolumeWorkerError as error:
                call.fail(error.code, retryable=error.retryable)
            else:
                call.outcome = OK

    async def cast(self, call: Call) -> None:
        """See :class:`Line`."""
        with contextlib.suppress(errors.Unreachable):
            await self._client.cast(
                call.method, call.address, call.args, message_id=uuid.UUID(call.id)
            )

    async def _ask(self, call: Call) -> None:
        try:
            job = await self._client.call("get_job", call.address, {"job_id": call.id}, timeout=5)
        except errors.VolumeWorkerError:
            return
        if job["state"] in _ENDED:
            call.end_by_record(job)
