"""Telling: replies, status updates, events and dead letters, on their way to the broker.

What must not be lost (a job's end, a volume's last word, a dead letter) stands in the outbox table
until the broker has confirmed it; what a later word always follows (``running``, ``creating``,
progress) is only said. The events of what a reply answers go before it: who has a reply may go on,
and cause the next event at another host. How all this is sent is in :mod:`worker.dispatcher`.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from messages import errors, fitting, frames, letters, replies, resources, topology
from worker import broker, dispatcher
from worker.store import connections, database, jobs
from worker.store import outbox as outbox_store

log = structlog.get_logger(__name__)

SWEEP_INTERVAL: Final = 2.0
"""Seconds between looks for what a worker that is gone left in the table."""
SWEEP_AGE: Final = 6.0
"""Seconds for which nobody has touched what nobody is about to tell; who is touches it in time."""
SWEEP_BATCH: Final = 200
DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"


class Outbox:
    """Publishes what the worker has to say, in order per object."""

    def __init__(
        self, store: database.Database, to: broker.Broker, *, addresses: Sequence[str]
    ) -> None:
        self._store = store
        self._names = to.names
        self._addresses = addresses
        self._dispatcher = dispatcher.Dispatcher(to, self._forget)
        self._open: set[int] = set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatcher.run())
            group.create_task(self._sweep())

    async def flush(self, timeout: float) -> bool:
        """Waits until all that can be told is, ``timeout`` seconds at most; whether it is."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._dispatcher.is_busy or self._open - set(self._dispatcher.apart):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    # What is only said

    def say_job(self, job: jobs.Job) -> None:
        """A job's state or progress: an event, and a status message to a caller that asked."""
        self._say_job_event(job, None)
        if job.status_updates and job.reply_to and job.state not in resources.ENDED:
            body = replies.status(dataclasses.asdict(job), _now())
            self._reply(job, body, replies.ReplyType.STATUS, None)

    def say_volume(self, event: Mapping[str, Any]) -> None:
        """A volume's passing status."""
        self._say_volume_event(event, None)

    def say_stats(self, address: str, seq: int, stats: Mapping[str, Any]) -> None:
        """A backend's stats."""
        at = _now()
        self._event(
            f"backend:{address}",
            topology.Topology.stats_event(address),
            lambda: {"at": at, "seq": seq, "stats": dict(stats)},
            None,
        )

    def say_again(self, reply_to: str, message: frames.Message) -> None:
        """An answer that the connection was lost with, and maybe because of it."""
        mandatory = may_be_mandatory(reply_to)
        item = dispatcher.Item("", reply_to, lambda: message, mandatory=mandatory)
        self._dispatcher.suspect([item])

    # What must arrive

    async def tell(self, entry: outbox_store.Entry) -> None:
        """What stands in the outbox table: published until the broker has confirmed it."""
        if entry.id in self._open or self._dispatcher.is_full:
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
            self._dispatcher.note_told(entry.id)

    async def tell_end(self, ended: jobs.Ended) -> None:
        """A job's end, and with it its volume's last word."""
        await self.tell(outbox_store.Entry(ended.outbox_id, job=ended.job, event=ended.event))

    def _tell_letter(self, entry_id: int, letter: outbox_store.Letter) -> None:
        # At once: one that cannot be restored must not stop the others.
        reasons = letter.properties["reasons"]
        parcel = dispatcher.Parcel(entry_id, parts=1)
        self._dispatcher.put(self._letter(letter.body, letter.properties, reasons, parcel, None))

    async def _tell_job(self, entry: outbox_store.Entry, job: jobs.Job) -> None:
        parcel = dispatcher.Parcel(entry.id, parts=1)
        result = replies.marked(await self._result(job), job.endings) if job.reply_to else None
        if not entry.reply_only:
            self._say_end(entry, job, parcel)
        if result is not None:
            parcel.parts += 1
            self._reply(job, result, replies.ReplyType.RESULT, parcel)
        self._dispatcher.settle(parcel)

    def _say_end(self, entry: outbox_store.Entry, job: jobs.Job, parcel: dispatcher.Parcel) -> None:
        if _is_dead_letter(job):
            parcel.parts += 1
            self._dispatcher.put(self._dead_letter(job, parcel))
        parcel.parts += 1
        subjects = {self._say_job_event(job, parcel)}
        if entry.event is not None:
            parcel.parts += 1
            subjects.add(self._say_volume_event(entry.event, parcel))
        if job.reply_to:
            self._dispatcher.hurry(subjects)

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

    def _dead_letter(self, job: jobs.Job, parcel: dispatcher.Parcel) -> dispatcher.Item:
        reasons = letters.reason_headers(
            error=job.error or {},
            origin=job.address,
            job_id=job.id,
            attempts=job.attempt,
            first_failed_at=job.first_failed_at,
            history=job.history,
        )
        return self._letter(job.body, job.properties, reasons, parcel, job.id)

    def _letter(
        self,
        body: bytes,
        properties: Mapping[str, Any],
        reasons: Mapping[str, Any],
        parcel: dispatcher.Parcel,
        job_id: uuid.UUID | None,
    ) -> dispatcher.Item:
        message = letters.restore(body, properties, reasons)
        return dispatcher.Item(
            self._names.dead,
            "",
            lambda: message,
            mandatory=True,
            parcel=parcel,
            job_id=job_id,
            bare=lambda: letters.restore_without_headers(body, properties, reasons),
        )

    async def _forget(self, told: Sequence[int]) -> bool:
        try:
            await outbox_store.delete(self._store, told)
        except errors.Unreachable as error:
            log.warning("outbox.database_away", error=error.message)
            return False
        self._open.difference_update(told)
        return True

    async def _sweep(self) -> None:
        """Tells what a worker that is gone had still to tell; keeps others from telling ours."""
        before: set[int] = set()
        while True:
            with contextlib.suppress(errors.Unreachable):
                # Most are told before they would have to be touched.
                if lasting := self._open & before:
                    await outbox_store.touch(self._store, lasting)
                before = set(self._open)
                await self._adopt()
            await asyncio.sleep(SWEEP_INTERVAL)

    async def _adopt(self) -> None:
        count = SWEEP_BATCH
        while count == SWEEP_BATCH and not self._dispatcher.is_full:
            entries = await outbox_store.adopt(
                self._store, addresses=self._addresses, older_than=SWEEP_AGE, limit=SWEEP_BATCH
            )
            count = len(entries)
            for entry in entries:
                await self.tell(entry)

    # Making messages

    def _reply(
        self,
        job: jobs.Job,
        body: Mapping[str, Any],
        kind: replies.ReplyType,
        parcel: dispatcher.Parcel | None,
    ) -> None:
        assert job.reply_to is not None
        identity = (
            replies.reply_id(job.id, job.endings)
            if kind is replies.ReplyType.RESULT
            else uuid.uuid4()
        )
        patience = 0.0
        if job.deadline is not None:
            patience = (job.deadline - datetime.datetime.now(datetime.UTC)).total_seconds()
        self._dispatcher.put(
            dispatcher.Item(
                "",
                job.reply_to,
                lambda: reply_message(body, kind, identity, job.correlation_id),
                may_be_mandatory(job.reply_to),
                parcel,
                job.id,
                until=asyncio.get_running_loop().time() + patience,
            )
        )

    def _say_job_event(self, job: jobs.Job, parcel: dispatcher.Parcel | None) -> str:
        at = _now()
        return self._event(
            f"job:{job.id}",
            self._names.job_event(job.id, job.state),
            lambda: {"at": at, "seq": job.version, "job": job.to_wire()},
            parcel,
        )

    def _say_volume_event(self, event: Mapping[str, Any], parcel: dispatcher.Parcel | None) -> str:
        volume = event["volume"]
        key = self._names.volume_event(volume["id"], volume["status"])
        return self._event(f"volume:{volume['id']}", key, lambda: event, parcel)

    def _event(
        self,
        subject: str,
        routing_key: str,
        body: Callable[[], Mapping[str, Any]],
        parcel: dispatcher.Parcel | None,
    ) -> str:
        if parcel is None and self._dispatcher.is_full:
            return subject  # a later word always follows
        item = dispatcher.Item(
            self._names.events,
            routing_key,
            lambda: _event_message(body()),
            mandatory=False,
            parcel=parcel,
            subject=subject,
        )
        self._dispatcher.put_event(subject, item)
        return subject


def may_be_mandatory(reply_to: str) -> bool:
    """Whether a reply may be published mandatory: the pseudo-queue gets it and returns it, both."""
    return not reply_to.startswith(DIRECT_REPLY)


def reply_message(
    body: Mapping[str, Any], kind: replies.ReplyType, identity: uuid.UUID, correlation_id: str
) -> frames.Plain:
    """A reply as it is published."""
    return frames.Plain(
        fitting.encode(body, within="result" if body.get("ok") else "error"),
        str(identity),
        type=kind,
        correlation_id=correlation_id,
    )


def _event_message(body: Mapping[str, Any]) -> frames.Plain:
    within = next(name for name in body if name not in ("at", "seq"))
    return frames.Plain(fitting.encode(body, within=within), str(uuid.uuid4()))


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
