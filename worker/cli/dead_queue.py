"""Looking at the dead-letter queue without taking anything out of it.

All letters are taken by one consumer, without an acknowledgement, and return when its channel is
closed. All of them, however few are wanted: a quorum queue puts what returns behind what returned
earlier, so that a look at some would change the order of all. The broker counts each look as a
delivery, which is why the queue's delivery limit is out of reach.
"""

import asyncio
import contextlib
import dataclasses
import datetime
from collections.abc import AsyncIterator
from typing import Final

import aio_pika.abc
import aio_pika.exceptions

from messages import errors, link, topology
from worker import settings
from worker.cli import letter, reach

MOST: Final = 65535
"""Letters in one look: what AMQP has room for in a consumer's prefetch."""
_IDLE: Final = 3.0
"""Seconds without a letter after which the rest is taken to be in somebody else's hands."""
_LOOK_AGAIN: Final = 0.3
"""Seconds after which a look at nothing is repeated: somebody else may have been looking."""


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
    try:
        async with reach.broker(configured.broker_url) as connection:
            return await _look(connection, names, wanted, limit)
    except link.AWAY as error:
        place = reach.place(configured.broker_url)
        raise errors.Unreachable(
            f"the broker at {place} went away: {type(error).__name__}; every letter stays there"
        ) from error


async def _look(
    connection: aio_pika.abc.AbstractConnection,
    names: topology.Topology,
    wanted: Filter,
    limit: int | None,
) -> list[letter.Letter]:
    for delay in (_LOOK_AGAIN, 0):
        seen = 0
        found: list[letter.Letter] = []
        async with _letters(connection, names) as messages:
            async for message in messages:
                seen += 1
                one = letter.read(message, names)
                if wanted.matches(one) and (limit is None or len(found) < limit):
                    found.append(one)
        if seen:
            break
        await asyncio.sleep(delay)
    return found


@contextlib.asynccontextmanager
async def _letters(
    connection: aio_pika.abc.AbstractConnection, names: topology.Topology
) -> AsyncIterator[AsyncIterator[aio_pika.abc.AbstractIncomingMessage]]:
    channel = await connection.channel()
    try:
        queue = await channel.declare_queue(names.dead, passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        raise NoQueue(
            f"there is no queue {names.dead}: no worker has run in namespace "
            f"{names.namespace!r} yet"
        ) from None
    try:
        # No more than were there: a letter that comes meanwhile is for the next look.
        count = min(queue.declaration_result.message_count or 0, MOST)
        if count:
            # Always said: without it the broker gives a consumer no more than 2,000.
            await channel.set_qos(prefetch_count=count)
        yield _each(queue, count)
    finally:
        await channel.close()


async def _each(
    queue: aio_pika.abc.AbstractQueue, count: int
) -> AsyncIterator[aio_pika.abc.AbstractIncomingMessage]:
    if not count:
        return
    came: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
    await queue.consume(came.put, no_ack=False)
    for _ in range(count):
        try:
            message = await asyncio.wait_for(came.get(), _IDLE)
        except TimeoutError:
            return
        yield message
