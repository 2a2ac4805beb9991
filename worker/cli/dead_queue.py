"""The dead-letter queue: looked at without taking anything out of it, and worked on.

All letters are taken by one consumer, without an acknowledgement, and return when its channel is
closed, save those that were acknowledged meanwhile. All of them, however few are wanted: a quorum
queue puts what returns behind what returned earlier, so that a look at some would change the order
of all. The broker counts each look as a delivery, which is why the queue's delivery limit is out of
reach. Letters in somebody else's hands cannot be seen: while there are consumers, nobody knows that
all letters are there, and everybody waits for the others.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import random
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
_LOOK_PATIENCE: Final = 5.0
"""Seconds that a look waits for letters that others have; it tells of the rest then."""
_WORK_PATIENCE: Final = 30.0
"""Seconds that work on letters waits likewise; it does nothing then."""


class NoQueue(errors.VolumeWorkerError):
    """There is no dead-letter queue."""


class InOtherHands(errors.VolumeWorkerError):
    """Somebody else has letters, who gives them back when they are done."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a look has found."""

    letters: list[letter.Letter]
    is_all: bool
    """Nobody else had letters meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A letter that is in our hands, with the message that it is."""

    message: aio_pika.abc.AbstractIncomingMessage
    letter: letter.Letter


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """All letters, in our hands; :data:`MOST` of them at a time."""

    total: int
    """Letters that there are."""
    meant: list[Taken]
    """The oldest first."""


async def look(configured: settings.Settings, wanted: Filter, *, limit: int | None) -> Seen:
    """The letters that are meant, the oldest first; ``limit`` of them at most.

    Raises:
        NoQueue: no worker has ever run in this namespace.
        Unreachable: the broker is away.
    """
    names = topology.Topology(configured.namespace)
    async with connected(configured) as connection:
        return await _look(connection, names, wanted, limit)


@contextlib.asynccontextmanager
async def connected(
    configured: settings.Settings,
) -> AsyncIterator[aio_pika.abc.AbstractConnection]:
    """A connection to the broker for the time of the block.

    Raises:
        Unreachable: it is away, or went away in the block.
    """
    try:
        async with reach.broker(configured.broker_url) as connection:
            yield connection
    except link.AWAY as error:
        place = reach.place(configured.broker_url)
        raise errors.Unreachable(
            f"the broker at {place} went away: {type(error).__name__}; every letter that was not "
            "dealt with stays there"
        ) from error


async def _look(
    connection: aio_pika.abc.AbstractConnection,
    names: topology.Topology,
    wanted: Filter,
    limit: int | None,
) -> Seen:
    patience = _Patience(_LOOK_PATIENCE)
    while True:
        is_last = patience.is_over
        async with _channel(connection, names) as opened:
            if is_last or not opened.is_shared:
                seen = 0
                found: list[letter.Letter] = []
                async for message in opened.messages():
                    seen += 1
                    one = letter.read(message, names)
                    if wanted.matches(one) and (limit is None or len(found) < limit):
                        found.append(one)
                is_all = seen == opened.count and not opened.is_shared
                if is_last or is_all:
                    return Seen(found, is_all)
        await patience.pause()


@contextlib.asynccontextmanager
async def held(
    connection: aio_pika.abc.AbstractConnection, names: topology.Topology, wanted: Filter
) -> AsyncIterator[Hold]:
    """All letters, for the time of the block; those not acknowledged return in their order.

    Raises:
        NoQueue: no worker has ever run in this namespace.
        InOtherHands: somebody else would not give letters back.
    """
    patience = _Patience(_WORK_PATIENCE)
    while True:
        is_last = patience.is_over
        async with _channel(connection, names) as opened:
            hold = None if opened.is_shared else await _take(opened, names, wanted)
            if hold is not None:
                yield hold
                return
        if is_last:
            raise InOtherHands(
                f"somebody else has letters of {names.dead} in their hands (dead list, or another "
                "program that reads them): nothing was done; try again when they are back"
            )
        await patience.pause()


async def _take(opened: "_Open", names: topology.Topology, wanted: Filter) -> Hold | None:
    """All letters, or None where some went into other hands."""
    seen = 0
    meant: list[Taken] = []
    async for message in opened.messages():
        seen += 1
        one = letter.read(message, names)
        if wanted.matches(one):
            meant.append(Taken(message, one))
    return Hold(opened.ready, meant) if seen == opened.count else None


class _Patience:
    """Trying again for some seconds, and not in step with somebody who waits likewise."""

    def __init__(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._deadline

    async def pause(self) -> None:
        await asyncio.sleep(random.uniform(0.05, 0.3))  # noqa: S311


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """The queue, on a channel of its own."""

    channel: aio_pika.abc.AbstractChannel
    queue: aio_pika.abc.AbstractQueue

    @property
    def is_shared(self) -> bool:
        """Whether others have letters; who gets them one by one counts as a consumer, too."""
        return bool(self.queue.declaration_result.consumer_count)

    @property
    def ready(self) -> int:
        """How many letters were there that nobody had."""
        return self.queue.declaration_result.message_count or 0

    @property
    def count(self) -> int:
        """How many to take: one that comes meanwhile is for later."""
        return min(self.ready, MOST)

    async def messages(self) -> AsyncIterator[aio_pika.abc.AbstractIncomingMessage]:
        """The messages, without those that others get instead."""
        if not self.count:
            return
        # Always said: without it the broker gives a consumer no more than 2,000.
        await self.channel.set_qos(prefetch_count=self.count)
        came: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
        await self.queue.consume(came.put, no_ack=False)
        for _ in range(self.count):
            try:
                message = await asyncio.wait_for(came.get(), _IDLE)
            except TimeoutError:
                return
            yield message


@contextlib.asynccontextmanager
async def _channel(
    connection: aio_pika.abc.AbstractConnection, names: topology.Topology
) -> AsyncIterator[_Open]:
    channel = await connection.channel()
    try:
        queue = await channel.declare_queue(names.dead, passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        raise NoQueue(
            f"there is no queue {names.dead}: no worker has run in namespace "
            f"{names.namespace!r} yet"
        ) from None
    try:
        yield _Open(channel, queue)
    finally:
        await channel.close()
