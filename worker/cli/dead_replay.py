"""Replaying one letter: the job that it tells of is revived, or its message sent again.

A job goes by the database, and by nothing that anybody could publish. A message that never became
a job, or whose job is forgotten, goes to its address once more, and is checked here first as the
worker there would: what would only come back as a letter stays one.
"""

import dataclasses
import enum
import uuid
from collections.abc import Mapping
from typing import Any, Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import asyncpg

from messages import envelope, errors, letters, requests, topology
from worker import operations
from worker.cli import dead_edit, dead_queue, letter
from worker.operations import base
from worker.store import database, jobs, replays

PUBLISH_TIMEOUT: Final = 30.0
"""Seconds for the broker's confirm."""
_NEW_IDS: Final = uuid.UUID("6f0f2ac5-62a5-5d4c-8b4e-0f6a5b9d2f57")


class Outcome(enum.StrEnum):
    """What became of a letter."""

    REPLAYED = "replayed"
    ALREADY_REPLAYED = "already replayed"
    """By a command that could not remove it any more."""
    DISCARDED = "discarded"
    REFUSED = "refused"
    """It stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """What became of a letter, and what there is to say of it."""

    outcome: Outcome
    text: str | None = None


class Refused(errors.VolumeWorkerError):
    """The letter cannot be replayed; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replayer:
    """Replays letters.

    Args:
        channel: of the connection, to publish on, with confirms, and returns raised.
        limit: in bytes, for a request.
        edit: to be applied to the request.
        dry_run: only finds out what would become of a letter.
    """

    store: database.Database
    connection: aio_pika.abc.AbstractConnection
    channel: aio_pika.abc.AbstractChannel
    names: topology.Topology
    limit: int
    edit: Mapping[str, Any] | None
    dry_run: bool
    _served: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Whether there is a queue for an address, as far as that was asked."""

    async def replay(self, taken: dead_queue.Taken) -> Done:
        """Replays a letter; when this returns, whatever it says is stored.

        Raises:
            Unreachable: the database or the broker went away; the letter may have been replayed.
        """
        try:
            job = await self._job(taken.letter)
            if job is not None:
                return await self._revive(job, taken.letter)
            return await self._send(taken)
        except errors.Unreachable:
            raise
        except errors.VolumeWorkerError as error:
            return Done(Outcome.REFUSED, error.message)
        except asyncpg.PostgresError as error:
            # It says something against this letter: others may do.
            return Done(Outcome.REFUSED, f"the database refused: {error}")

    async def _job(self, found: letter.Letter) -> jobs.Job | None:
        identity = _uuid(found.job_id)
        if identity is None:
            return None
        try:
            return await jobs.get(self.store, identity)
        except errors.JobNotFound:
            return None

    # A job

    async def _revive(self, job: jobs.Job, found: letter.Letter) -> Done:
        body = job.body if self.edit is None else dead_edit.apply(self.edit, job.body)
        request = envelope.read_body(body, max(self.limit, len(job.body)), job.address)
        if request.method.name != job.method:
            raise Refused(
                f"the method of a job cannot be changed ({job.method}); send what is wanted as a "
                "new request, and discard this letter"
            )
        operation = operations.OPERATIONS[job.method]
        is_served = await self._is_served(job.address)
        revival = await replays.revive(
            self.store,
            job,
            ending=found.replays + 1,
            body=None if self.edit is None else body,
            slot=operation.slot,
            needs=operation.needs(job.id, request.args),
            # Where its backend was removed, it would wait for ever.
            dry_run=self.dry_run or not is_served,
        )
        if revival.outcome is replays.Outcome.REVIVED and not is_served:
            raise _no_queue(job.address)
        return self._as_done(job, revival)

    def _as_done(self, job: jobs.Job, revival: replays.Revival) -> Done:
        why = revival.why
        match revival.outcome:
            case replays.Outcome.REVIVED:
                return Done(Outcome.REPLAYED)
            case replays.Outcome.STALE:
                unedited = "" if self.edit is None else "; it was not edited"
                return Done(Outcome.ALREADY_REPLAYED, f"its job is {why['state']}{unedited}")
            case replays.Outcome.REFUSED:
                refusal = base.refusal(dataclasses.replace(job, refusal=why))
                raise Refused(f"{refusal.code}: {refusal.message}")
            case replays.Outcome.OVERTAKEN:
                raise Refused(
                    f"volume {why['volume_id']} has moved on: {why['method']} (job "
                    f"{why['job_id']}) came since; send what is wanted now as a new request, and "
                    "discard this letter"
                )
            case replays.Outcome.ORPHANED:
                raise Refused(f"job {why['job_id']}, for which it was to run, has ended")

    # A message

    async def _send(self, taken: dead_queue.Taken) -> Done:
        found = taken.letter
        if not topology.is_address(found.origin):
            raise Refused("it does not say at which address it was")
        body = taken.message.body
        if self.edit is not None:
            body = dead_edit.apply(self.edit, body)
        identity = new_id(taken) if _uuid(found.message_id) is None else found.message_id
        assert identity is not None
        again = letters.as_request(taken.message, body, message_id=identity)
        await self._check(again, found.origin)
        if not await self._is_served(found.origin):
            raise _no_queue(found.origin)
        if not self.dry_run:
            await self._publish(again, found.origin)
        return Done(
            Outcome.REPLAYED,
            None if identity == found.message_id else f"under the new message_id {identity}",
        )

    async def _check(self, again: aio_pika.Message, address: str) -> None:
        """Refuses what the worker would refuse."""
        if again.reply_to and self.names.is_reserved(again.reply_to):
            raise Refused("its reply_to names a queue of the installation")
        properties = envelope.read_properties(
            again.message_id, again.reply_to, again.correlation_id, again.headers
        )
        try:
            request = envelope.read_body(again.body, self.limit, address)
        except errors.VolumeWorkerError as error:
            raise Refused(
                f"it would be refused again ({error.code}: {error.message}); mend it with --edit"
            ) from None
        if request.method.kind is requests.Kind.UNSUPPORTED:
            raise Refused(f"{request.method.name} is not built in this version")
        known = await replays.fingerprint(self.store, properties.message_id)
        if known is not None and known != request.fingerprint:
            raise Refused(
                f"its message_id belongs to job {properties.message_id}, which is another "
                "request; send this one under a new id, and discard this letter"
            )

    async def _is_served(self, address: str) -> bool:
        if address not in self._served:
            # On a channel of its own, which the broker closes where there is none.
            channel = await self.connection.channel()
            try:
                await channel.declare_queue(self.names.queue(address), passive=True)
                self._served[address] = True
                await channel.close()
            except aio_pika.exceptions.ChannelNotFoundEntity:
                self._served[address] = False
        return self._served[address]

    async def _publish(self, again: aio_pika.Message, address: str) -> None:
        exchange = await self.channel.get_exchange(self.names.requests, ensure=False)
        try:
            await exchange.publish(again, address, mandatory=True, timeout=PUBLISH_TIMEOUT)
        except aio_pika.exceptions.PublishError:
            raise _no_queue(address) from None
        except aio_pika.exceptions.DeliveryError:
            raise Refused(f"the broker does not take it for {address} now; try again") from None


def _no_queue(address: str) -> Refused:
    return Refused(f"there is no queue for {address}: no such backend was ever started")


def new_id(taken: dead_queue.Taken) -> str:
    """An id for a message that has none that is valid.

    The same again for the same letter, so that one that is replayed twice, since the first command
    was killed, is one request. What the broker made of messages without an id looks all the same.
    """
    found = taken.letter
    if found.made_by_broker and not found.message_id:
        return str(uuid.uuid4())
    marks = (found.message_id, found.origin, found.first_failed_at, taken.message.body.hex())
    return str(uuid.uuid5(_NEW_IDS, repr(marks)))


def _uuid(text: str | None) -> uuid.UUID | None:
    try:
        return uuid.UUID(text or "")
    except ValueError:
        return None
