"""Telling: replies, status updates, events and dead letters, on their way to the broker.

What must not be lost (a job's end, a volume's last word, a dead letter) stands in the outbox table
until the broker has confirmed it; what a later word always follows (``running``, ``creating``,
progress) is only said. Of an object's events only the newest of a batch is sent, and events wait a
moment for a newer one. Replies do not wait, and the events of what they answer go before them: who
has a reply may go on, and cause the next event at another host.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aio_pika
import structlog

from messages import envelope, errors, letters, link, replies, resources, topology
from worker import broker
from worker.store import connections, database, jobs
from worker.store import outbox as outbox_store

log = structlog.get_logger(__name__)

LINGER: Final = 0.05
"""Seconds that an event waits for a newer one of the same object."""
BATCH: Final = 200
SWEEP_INTERVAL: Final = 5.0
"""Seconds between looks for what a worker that is gone left in the table."""
SWEEP_AGE: Final = 10.0
DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"


class _Parcel:
    """An entry of the outbox table with the messages it takes to tell it."""

    def __init__(self, entry_id: int, parts: int) -> None:
        self.entry_id = entry_id
        self.parts = parts


@dataclasses.dataclass(slots=True)
class _Item:
    """One message to publish."""

    exchange: str
    routing_key: str
    message: aio_pika.Message
    mandatory: bool
    parcel: _Parcel | None = None
    job_id: uuid.UUID | None = None
    subject: str | None = None
    """What an event is about; None for what is no event."""


class Outbox:
    """Publishes what the worker has to say, in order per object."""

    def __init__(
        self,
        store: database.Database,
        to: broker.Broker,
        *,
        owner: uuid.UUID,
        addresses: Sequence[str],
    ) -> None:
        self._store = store
        self._broker = to
        self._names = to.names
        self._owner = owner
        self._addresses = addresses
        self._replies: list[_Item] = []
        self._events: dict[str, _Item] = {}
        self._due: set[str] = set()
        """What events are about that must not wait."""
        self._open: set[int] = set()
        self._told: list[int] = []
        self._wake = asyncio.Event()

    # What is only said

    def say_job(self, job: jobs.Job) -> None:
        """A job's state or progress: an event, and a status message to a caller that asked."""
        at = _now()
        self._say_job_event(job, None)
        if job.status_updates and job.reply_to and job.state not in resources.ENDED:
            body = replies.status(dataclasses.asdict(job), at)
            self._reply(job, body, replies.ReplyType.STATUS, None)

    def say_volume(self, event: Mapping[str, Any]) -> None:
        """A volume's passing status."""
        self._say_volume_event(event, None)

    def say_stats(self, address: str, seq: int, stats: Mapping[str, Any]) -> None:
        """A backend's stats."""
        body = {"at": _now(), "seq": seq, "stats": dict(stats)}
        self._event(f"backend:{address}", topology.Topology.stats_event(address), body, None)

    # What must arrive

    async def tell(self, entry: outbox_store.Entry) -> None:
        """What stands in the outbox table: published until the broker has confirmed it."""
        if entry.id in self._open:
            return
        self._open.add(entry.id)
        try:
            await self._tell_once(entry)
        except BaseException as error:
            # It stands in the table, and is told when it is swept up.
            self._open.discard(entry.id)
            if not isinstance(error, Exception):
                raise
            log.warning("outbox.put_off", entry_id=entry.id, exc_info=error)

    async def _tell_once(self, entry: outbox_store.Entry) -> None:
        if entry.letter is not None:
            self._tell_letter(entry.id, entry.letter)
        elif entry.job is not None:
            await self._tell_job(entry, entry.job)
        else:
            self._told.append(entry.id)
            self._wake.set()

    async def tell_end(self, ended: jobs.Ended) -> None:
        """A job's end, and with it its volume's last word."""
        await self.tell(outbox_store.Entry(ended.outbox_id, job=ended.job, event=ended.event))

    def _tell_letter(self, entry_id: int, letter: outbox_store.Letter) -> None:
        message = letters.restore(letter.body, letter.properties, letter.properties["reasons"])
        self._replies.append(
            _Item(self._names.dead, "", message, mandatory=True, parcel=_Parcel(entry_id, parts=1))
        )
        self._wake.set()

    async def _tell_job(self, entry: outbox_store.Entry, job: jobs.Job) -> None:
        parcel = _Parcel(entry.id, parts=1)
        result = await self._result(job) if job.reply_to else None
        if not entry.reply_only:
            self._say_end(entry, job, parcel)
        if result is not None:
            parcel.parts += 1
            self._reply(job, result, replies.ReplyType.RESULT, parcel)
        self._settle(parcel)
        self._wake.set()

    def _say_end(self, entry: outbox_store.Entry, job: jobs.Job, parcel: _Parcel) -> None:
        if _is_dead_letter(job):
            parcel.parts += 1
            self._replies.append(self._dead_letter(job, parcel))
        parcel.parts += 1
        subjects = {self._say_job_event(job, parcel)}
        if entry.event is not None:
            parcel.parts += 1
            subjects.add(self._say_volume_event(entry.event, parcel))
        if job.reply_to:
            self._due |= subjects

    async def _result(self, job: jobs.Job) -> dict[str, Any]:
        if job.error is not None and job.state is not resources.JobState.SUCCEEDED:
            return replies.failure(job.id, job.method, job.error)
        result = dict(job.result or {})
        if job.connection_id is None:
            return replies.result(job.id, job.method, result)
        # The secrets are kept with the connection alone, and go with it.
        connection = await connections.find(self._store, job.connection_id)
        if connection is None or connection.state is not connections.State.LIVE:
            gone = errors.ConnectionNotFound("the connection has ended since")
            return replies.failure(job.id, job.method, gone)
        result["data"] = connections.with_secrets(connection)
        return replies.result(job.id, job.method, result)

    def _dead_letter(self, job: jobs.Job, parcel: _Parcel) -> _Item:
        reasons = letters.reason_headers(
            error=job.error or {},
            origin=job.address,
            job_id=job.id,
            attempts=job.attempt,
            first_failed_at=job.first_failed_at,
        )
        message = letters.restore(job.body, job.properties, reasons)
        return _Item(self._names.dead, "", message, mandatory=True, parcel=parcel, job_id=job.id)

    # Making messages

    def _reply(
        self,
        job: jobs.Job,
        body: Mapping[str, Any],
        kind: replies.ReplyType,
        parcel: _Parcel | None,
    ) -> None:
        assert job.reply_to is not None
        identity = (
            replies.reply_id(job.id, job.endings)
            if kind is replies.ReplyType.RESULT
            else uuid.uuid4()
        )
        message = reply_message(body, kind, identity, job.correlation_id)
        self._replies.append(
            _Item("", job.reply_to, message, may_be_mandatory(job.reply_to), parcel, job.id)
        )
        self._wake.set()

    def _say_job_event(self, job: jobs.Job, parcel: _Parcel | None) -> str:
        body = {"at": _now(), "seq": job.version, "job": job.to_wire()}
        key = self._names.job_event(job.id, job.state)
        return self._event(f"job:{job.id}", key, body, parcel)

    def _say_volume_event(self, event: Mapping[str, Any], parcel: _Parcel | None) -> str:
        volume = event["volume"]
        key = self._names.volume_event(volume["id"], volume["status"])
        return self._event(f"volume:{volume['id']}", key, event, parcel)

    def _event(
        self, subject: str, routing_key: str, body: Mapping[str, Any], parcel: _Parcel | None
    ) -> str:
        message = aio_pika.Message(
            json.dumps(body).encode(),
            content_type=envelope.CONTENT_TYPE,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        # Taken out first, so that the newest of an object also keeps the order among objects.
        overtaken = self._events.pop(subject, None)
        self._events[subject] = _Item(
            self._names.events,
            routing_key,
            message,
            mandatory=False,
            parcel=parcel,
            subject=subject,
        )
        if overtaken is not None and overtaken.parcel is not None:
            self._settle(overtaken.parcel)
        self._wake.set()
        return subject

    # Publishing

    async def run(self) -> None:
        """Publishes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_all())
            group.create_task(self._sweep())

    async def flush(self, timeout: float) -> bool:
        """Waits until everything is told, ``timeout`` seconds at most; whether it is."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._replies or self._events or self._open:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _publish_all(self) -> None:
        loop = asyncio.get_running_loop()
        events_at = 0.0
        while True:
            await self._wait_for_work(events_at)
            batch = self._take_events(all_of_them=loop.time() >= events_at)
            if batch and not self._events:
                events_at = loop.time() + LINGER
            batch += self._replies[:BATCH]
            self._replies = self._replies[BATCH:]
            kept = await self._publish_batch(batch)
            await self._forget_told()
            if kept:
                self._keep(kept)
                await asyncio.sleep(0.5)

    def _take_events(self, *, all_of_them: bool) -> list[_Item]:
        """The events of the next batch; one that comes from now on belongs to a later one."""
        if all_of_them:
            taken, self._events = list(self._events.values()), {}
        else:
            taken = [self._events.pop(one) for one in self._due if one in self._events]
        self._due = set()
        return taken

    async def _forget_told(self) -> None:
        told, self._told = self._told, []
        if not told:
            return
        try:
            await outbox_store.delete(self._store, told)
        except errors.Unreachable as error:
            log.warning("outbox.database_away", error=error.message)
            self._told = told + self._told
        else:
            self._open.difference_update(told)

    async def _wait_for_work(self, events_at: float) -> None:
        """Waits for a reply, or for events whose time has come."""
        loop = asyncio.get_running_loop()
        while not (self._replies or self._told):
            if self._events and loop.time() >= events_at:
                return
            self._wake.clear()
            patience = max(events_at - loop.time(), 0) if self._events else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._wake.wait()

    def _keep(self, items: Sequence[_Item]) -> None:
        """Puts back what the broker did not take; an event only if no newer one has come."""
        for item in reversed(items):
            if item.subject is None:
                self._replies.insert(0, item)
            elif item.subject not in self._events:
                self._events[item.subject] = item
            elif item.parcel is not None:
                self._settle(item.parcel)

    async def _publish_batch(self, batch: Sequence[_Item]) -> list[_Item]:
        """Publishes all at once; returns what has to be tried again."""
        sent = await asyncio.gather(*(self._publish(item) for item in batch))
        kept = []
        for item, is_sent in zip(batch, sent, strict=True):
            if is_sent and item.parcel is not None:
                self._settle(item.parcel)
            elif not is_sent and (item.parcel is not None or item.exchange):
                kept.append(item)
        return kept

    async def _publish(self, item: _Item) -> bool:
        try:
            await self._broker.publish(
                item.message,
                exchange=item.exchange,
                routing_key=item.routing_key,
                mandatory=item.mandatory,
            )
        except link.Unroutable:
            if item.exchange:
                log.warning("outbox.unroutable", exchange=item.exchange, job_id=str(item.job_id))
                return False
            # The result stays readable with get_job; a caller that is gone costs nothing.
            log.warning("reply.undeliverable", job_id=str(item.job_id), reply_to=item.routing_key)
        except errors.Unreachable:
            return False
        return True

    def _settle(self, parcel: _Parcel) -> None:
        parcel.parts -= 1
        if parcel.parts == 0:
            self._told.append(parcel.entry_id)
            self._wake.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            try:
                entries = await outbox_store.pending(
                    self._store,
                    addresses=self._addresses,
                    older_than=SWEEP_AGE,
                    except_ids=self._open,
                    limit=BATCH,
                )
            except errors.Unreachable:
                continue
            for entry in entries:
                await self.tell(entry)


def may_be_mandatory(reply_to: str) -> bool:
    """Whether a reply may be published mandatory: the pseudo-queue gets it and returns it, both."""
    return not reply_to.startswith(DIRECT_REPLY)


def reply_message(
    body: Mapping[str, Any], kind: replies.ReplyType, identity: uuid.UUID, correlation_id: str
) -> aio_pika.Message:
    """A reply as it is published."""
    return aio_pika.Message(
        json.dumps(body).encode(),
        type=kind,
        content_type=envelope.CONTENT_TYPE,
        correlation_id=correlation_id,
        message_id=str(identity),
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )


def _is_dead_letter(job: jobs.Job) -> bool:
    """A job that died, and a cast that failed, since no caller hears of it."""
    match job.state:
        case resources.JobState.DEAD:
            return True
        case resources.JobState.FAILED:
            return not job.reply_to
        case _:
            return False


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
