"""Looking at the dead-letter queue without taking anything out of it.

Letters are got without an acknowledgement, and return, in their order, when the channel is closed.
The broker counts each look as a delivery, which is why the queue's delivery limit is out of reach.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import AsyncIterator

import aio_pika.abc
import aio_pika.exceptions

from messages import errors, topology
from worker import settings
from worker.cli import letter, reach


class NoQueue(errors.VolumeWorkerError):
    """There is no dead-letter queue."""


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """Which letters are meant; what is None does not matter."""

    method: str | None = None
    origin: str | None = None
    reason: str | None = None
    since: datetime.datetime | None = None
    id: str | None = None
    """The message's or the job's."""

    def matches(self, found: letter.Letter) -> bool:
        """Whether a letter is meant."""
        moment = found.first_failed_at
        ids = {(found.message_id or "").lower(), (found.job_id or "").lower()}
        return (
            self.method in (None, found.method)
            and self.origin in (None, found.origin)
            and self.reason in (None, found.reason)
            and (self.since is None or (moment is not None and moment >= self.since))
            and (self.id is None or self.id.lower() in ids)
        )


async def look(
    configured: settings.Settings, wanted: Filter, *, limit: int | None
) -> list[letter.Letter]:
    """The letters that are meant, the oldest first; ``limit`` of them at most.

    Raises:
        NoQueue: no worker has ever run in this namespace.
        Unreachable: the broker is away.
    """
    names = topology.Topology(configured.namespace)
    found: list[letter.Letter] = []
    async with _letters(configured, names) as messages:
        async for message in messages:
            one = letter.read(message, names)
            if wanted.matches(one):
                found.append(one)
                if limit is not None and len(found) >= limit:
                    break
    return found


@contextlib.asynccontextmanager
async def _letters(
    configured: settings.Settings, names: topology.Topology
) -> AsyncIterator[AsyncIterator[aio_pika.abc.AbstractIncomingMessage]]:
    async with reach.broker(configured.broker_url) as connection:
        channel = await connection.channel()
        try:
            queue = await channel.declare_queue(names.dead, passive=True)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            raise NoQueue(
                f"there is no queue {names.dead}: no worker has run in namespace "
                f"{configured.namespace!r} yet"
            ) from None
        try:
            yield _each(queue)
        finally:
            await channel.close()


async def _each(
    queue: aio_pika.abc.AbstractQueue,
) -> AsyncIterator[aio_pika.abc.AbstractIncomingMessage]:
    # No more than were there: a letter that comes meanwhile is for the next look.
    for _ in range(queue.declaration_result.message_count or 0):
        message = await queue.get(no_ack=False, fail=False, timeout=30)
        if message is None:
            return
        yield message
