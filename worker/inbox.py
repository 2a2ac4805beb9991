"""Requests, from the broker's frame to the stored job: checked, stored, then acknowledged.

Many deliveries, one transaction: while one batch is being stored the next one gathers. Reads are
answered here and leave no job. What cannot be read is answered where it names a reply queue, and
kept as a dead letter. Nothing that a message holds stops the rest.
"""

import asyncio
import collections
import contextlib
import dataclasses
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import aio_pika.abc
import aio_pika.exceptions
import asyncpg
import structlog

from messages import envelope, errors, letters, link, replies, requests, wire
from worker import broker, operations, outbox, reads, runner
from worker.store import acceptance, database
from worker.store import outbox as outbox_store

log = structlog.get_logger(__name__)

BATCH: Final = 128
LONG: Final = 64 * 1024
"""Bytes of a body that takes long to be read."""
TROUBLE_PAUSE: Final = 1.0
"""Seconds until a delivery is dealt with again that could not be stored or answered."""
MAX_REFUSALS: Final = 1
"""How often an answer is sent again whose queue has no room; whoever needs it can ask again."""
MAX_READS: Final = 64
"""Reads that are answered at a time."""
MAX_UPKEEP_ANSWERS: Final = 4
"""Long answers of methods beside the jobs that are on their way at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """A message from the broker, and the address that it was sent to."""

    address: str
    message: aio_pika.abc.AbstractIncomingMessage
    tries: int = 0
    """How often it was put back."""

    @property
    def reply_to(self) -> str | None:
        """Where an answer would go, read before anything was checked."""
        return self.message.reply_to or None


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """A delivery that was read."""

    delivery: Delivery
    properties: envelope.Properties
    body: envelope.Body


class Inbox:
    """Takes deliveries in (:meth:`receive`) and deals with them (:meth:`run`)."""

    def __init__(
        self,
        store: database.Database,
        to: broker.Broker,
        *,
        runner: runner.Runner,
        outbox: outbox.Outbox,
        reader: reads.Reader,
        max_request_bytes: int,
    ) -> None:
        self._store = store
        self._broker = to
        self._runner = runner
        self._outbox = outbox
        self._reader = reader
        self._limit = max_request_bytes
        self._waiting: collections.deque[Delivery] = collections.deque()
        self._wake = asyncio.Event()
        self._reading = asyncio.Semaphore(MAX_READS)
        self._telling = asyncio.Semaphore(MAX_UPKEEP_ANSWERS)

    def receive(self, address: str, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Hands a delivery over; called by the broker's callback, which must not wait."""
        self._wait(Delivery(address, message))

    async def run(self) -> None:
        """Deals with deliveries until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                if not self._waiting:
                    self._wake.clear()
                await self._take(batch, group)

    def _wait(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._wake.set()

    async def _take(self, batch: Sequence[Delivery], group: asyncio.TaskGroup) -> None:
        to_store: list[tuple[Delivery, acceptance.NewJob]] = []
        for delivery in batch:
            if len(delivery.message.body) > LONG:
                # A batch of them must not keep all else from going on.
                await asyncio.sleep(0)
            try:
                request = self._read(delivery)
                new = self._new_job(request)
            except errors.VolumeWorkerError as error:
                self._apart(group, delivery, self._refuse(delivery, error))
            except Exception:
                # Whatever it holds, it must not keep the others from being read.
                log.exception("inbox.unreadable", address=delivery.address)
                unreadable = envelope.Malformed("the message cannot be read")
                self._apart(group, delivery, self._refuse(delivery, unreadable))
            else:
                if new is None:
                    self._apart(group, delivery, self._answer_read(request))
                else:
                    to_store.append((delivery, new))
        if to_store:
            await self._store_all(to_store, group)

    def _apart(
        self, group: asyncio.TaskGroup, delivery: Delivery, answering: Coroutine[Any, Any, None]
    ) -> None:
        """Answers one delivery in a task of its own, whose failure is that delivery's alone."""

        async def guarded() -> None:
            try:
                await answering
            except Exception:
                log.exception("inbox.not_answered", address=delivery.address)
                with contextlib.suppress(*link.AWAY):
                    # The broker keeps it as a dead letter.
                    await delivery.message.reject(requeue=False)

        group.create_task(guarded())

    def _put_back(self, delivery: Delivery) -> None:
        """Deals with a delivery again in a while: broker or database are in trouble.

        One whose channel has closed comes again by itself.
        """

        def again() -> None:
            # To ask for a channel that is closed is an error already.
            with contextlib.suppress(aio_pika.exceptions.ChannelInvalidStateError):
                if not delivery.message.channel.is_closed:
                    self._wait(dataclasses.replace(delivery, tries=delivery.tries + 1))

        asyncio.get_running_loop().call_later(TROUBLE_PAUSE, again)

    # Reading

    def _read(self, delivery: Delivery) -> _Request:
        message = delivery.message
        if delivery.reply_to and self._broker.names.is_reserved(delivery.reply_to):
            raise envelope.Malformed(
                "reply_to must not name a queue of the installation", member="reply_to"
            )
        try:
            properties = envelope.read_properties(
                message.message_id, message.reply_to, message.correlation_id, message.headers or {}
            )
        except envelope.Malformed:
            raise
        except errors.InvalidRequest:
            # A body that cannot be read is worse, and is kept for it.
            envelope.read_body(message.body, self._limit, delivery.address)
            raise
        body = envelope.read_body(message.body, self._limit, delivery.address)
        return _Request(delivery, properties, body)

    def _new_job(self, request: _Request) -> acceptance.NewJob | None:
        """The job that a request asks for, or None where it only reads."""
        method, args = request.body.method, request.body.args
        if method.kind is requests.Kind.UNSUPPORTED:
            raise errors.NotSupported(f"{method.name} is not built in this version")
        if reads.is_read(method, args):
            return None
        operation = operations.OPERATIONS[method.name]
        parent = request.properties.parent_job
        if parent is not None and not operation.takes_parent:
            raise errors.InvalidRequest(
                f"parent-job means nothing to {method.name}", member="parent-job"
            )
        properties = request.properties
        return acceptance.NewJob(
            id=properties.message_id,
            method=method.name,
            address=request.delivery.address,
            slot=operation.slot,
            body=request.delivery.message.body,
            properties=letters.keep_properties(request.delivery.message),
            fingerprint=request.body.fingerprint,
            deadline=properties.deadline,
            reply_to=properties.reply_to,
            correlation_id=properties.correlation_id,
            status_updates=properties.status_updates,
            parent_job=parent,
            needs=operation.needs(properties.message_id, args),
            creates=operation.creates and operation.creates(properties.message_id, args),
        )

    # Storing

    async def _store_all(
        self, batch: Sequence[tuple[Delivery, acceptance.NewJob]], group: asyncio.TaskGroup
    ) -> None:
        try:
            accepted = await self._runner.accept([new for _, new in batch])
        except errors.Unreachable:
            # Not acknowledged, so not lost.
            log.warning("inbox.database_away", requests=len(batch))
            for delivery, _ in batch:
                self._put_back(delivery)
            return
        except Exception as error:
            await self._store_apart(batch, group, error)
            return
        done = []
        for (delivery, _), stored in zip(batch, accepted, strict=True):
            if stored.verdict is acceptance.Verdict.REUSED:
                self._apart(group, delivery, self._refuse(delivery, _reused()))
                continue
            done.append(delivery)
            if stored.outbox_id is not None:
                entry = outbox_store.Entry(stored.outbox_id, job=stored.job, reply_only=True)
                group.create_task(self._outbox.tell(entry))
        await self._acknowledge(*done)

    async def _store_apart(
        self,
        batch: Sequence[tuple[Delivery, acceptance.NewJob]],
        group: asyncio.TaskGroup,
        error: Exception,
    ) -> None:
        """One of a batch cannot be stored: alone, it is refused alone."""
        if len(batch) > 1:
            for one in batch:
                await self._store_all([one], group)
            return
        [(delivery, new)] = batch
        log.error("inbox.not_storable", job_id=str(new.id), exc_info=error)
        is_its_fault = isinstance(error, asyncpg.DataError | asyncpg.ProgramLimitExceededError)
        refusal: errors.VolumeWorkerError = (
            envelope.Malformed("the request holds what cannot be stored")
            if is_its_fault
            else errors.Internal("the request could not be stored; see the worker's log")
        )
        self._apart(group, delivery, self._refuse(delivery, refusal))

    # Answering

    async def _answer_read(self, request: _Request) -> None:
        if request.body.method.kind is requests.Kind.UPKEEP:
            # It may wait long for its turn, and no read must wait with it.
            body = await self._body(request)
            async with self._telling:
                await self._tell(request, body)
            return
        async with self._reading:
            await self._tell(request, await self._body(request))

    async def _body(self, request: _Request) -> dict[str, Any] | None:
        """The answer to a read; None where it cannot be read just now."""
        identity, method = request.properties.message_id, request.body.method.name
        try:
            result = await self._reader.answer(method, request.delivery.address, request.body.args)
            return replies.result(identity, method, result)
        except errors.Unreachable:
            return None
        except errors.VolumeWorkerError as error:
            return replies.failure(identity, method, error)
        except Exception:
            log.exception("read.failed", method=method)
            return replies.failure(identity, method, errors.Internal())

    async def _tell(self, request: _Request, body: dict[str, Any] | None) -> None:
        properties, delivery = request.properties, request.delivery
        if body is not None and await self._reply(
            delivery, body, properties.message_id, properties.correlation_id
        ):
            await self._acknowledge(delivery)
        else:
            self._put_back(delivery)

    async def _refuse(self, delivery: Delivery, error: errors.VolumeWorkerError) -> None:
        """Answers what never became a job, and keeps it where nobody else would hear of it."""
        message = delivery.message
        log.info("request.refused", address=delivery.address, code=error.code, why=error.message)
        try:
            if not await self._answer_error(delivery, error, _identity(message.message_id)):
                self._put_back(delivery)
                return
            if self._is_to_be_kept(delivery, error):
                await self._keep(delivery, error)
        except errors.Unreachable:
            self._put_back(delivery)
            return
        await self._acknowledge(delivery)

    def _is_answerable(self, delivery: Delivery) -> bool:
        reply_to = delivery.reply_to
        return reply_to is not None and not self._broker.names.is_reserved(reply_to)

    def _is_to_be_kept(self, delivery: Delivery, error: errors.VolumeWorkerError) -> bool:
        if _is_unreadable(error) or self._is_answerable(delivery):
            return _is_unreadable(error)
        method = requests.METHODS.get(self._method_name(delivery) or "")
        return method is None or not method.only_reads

    async def _keep(self, delivery: Delivery, error: errors.VolumeWorkerError) -> None:
        reasons = letters.reason_headers(error=error, origin=delivery.address)
        kept = {**letters.keep_properties(delivery.message), "reasons": reasons}
        letter = outbox_store.Letter(delivery.address, delivery.message.body, kept)
        for entry in await outbox_store.add_letters(self._store, [letter]):
            await self._outbox.tell(entry)

    async def _answer_error(
        self, delivery: Delivery, error: errors.VolumeWorkerError, job_id: uuid.UUID | None
    ) -> bool:
        if not self._is_answerable(delivery):
            return True
        body = replies.failure(job_id, self._method_name(delivery), error)
        correlation = delivery.message.correlation_id or delivery.message.message_id or ""
        return await self._reply(delivery, body, job_id or uuid.uuid4(), correlation)

    def _method_name(self, delivery: Delivery) -> str | None:
        """What the caller called the method, if that much can be read."""
        body = delivery.message.body
        if len(body) > self._limit:
            return None
        try:
            data = envelope.parse_json(body)
        except errors.InvalidRequest:
            return None
        name = data.get("method") if isinstance(data, dict) else None
        return name[:100] if isinstance(name, str) else None

    async def _reply(
        self, delivery: Delivery, body: dict[str, object], identity: uuid.UUID, correlation: str
    ) -> bool:
        """Whether the broker has the answer, or there is nobody for it, or no room."""
        if delivery.reply_to is None:
            return True
        message = outbox.reply_message(
            body, replies.ReplyType.RESULT, replies.reply_id(identity, 0), correlation
        )
        try:
            await self._broker.publish(
                message,
                exchange="",
                routing_key=delivery.reply_to,
                mandatory=outbox.may_be_mandatory(delivery.reply_to),
            )
        except link.Unroutable as error:
            log.warning("reply.undeliverable", reply_to=delivery.reply_to, why=error.message)
        except link.ConnectionLost:
            if outbox.may_be_mandatory(delivery.reply_to):
                return False
            # Delivered again it might end the connection again, for ever; and a caller that waits
            # with a direct reply-to is gone when that is.
            self._outbox.say_again(delivery.reply_to, message)
        except link.Refused as error:
            # Kept longer, it would keep the requests of others from being delivered.
            if delivery.tries < MAX_REFUSALS:
                return False
            log.warning("reply.given_up", reply_to=delivery.reply_to, why=error.message)
        except errors.Unreachable:
            return False
        return True

    async def _acknowledge(self, *deliveries: Delivery) -> None:
        # One whose channel is gone comes again, and is known by its message_id.
        await wire.acknowledge(delivery.message for delivery in deliveries)


def _reused() -> errors.InvalidRequest:
    return errors.InvalidRequest(
        "this message_id belongs to another request; use a new one",
        member="message_id",
        reason="message_id_reused",
    )


def _is_unreadable(error: errors.VolumeWorkerError) -> bool:
    kinds = (envelope.Malformed, errors.UnknownMethod, errors.UnsupportedVersion)
    return isinstance(error, kinds)


def _identity(message_id: str | None) -> uuid.UUID | None:
    try:
        return uuid.UUID(message_id or "")
    except ValueError:
        return None
