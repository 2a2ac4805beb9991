"""Sending what the outbox hands over: in batches, in order per object, confirmed.

Of an object's events only the newest of a batch is sent, and events wait a moment for a newer one.
Replies do not wait. One that has nowhere to go holds up no other: it is tried again by itself. Nor
does one over which the broker ends the connection: it is found out, and given up.
"""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import structlog

from messages import errors, frames, link
from worker import broker, retry, suspects

log = structlog.get_logger(__name__)

LINGER: Final = 0.05
"""Seconds that an event waits for a newer one of the same object."""
BATCH: Final = 200
PAUSE: Final = 0.5
"""Seconds until what the broker did not take is sent again."""
APART_BASE: Final = 1.0
APART_CAP: Final = 30.0
"""Seconds between tries of what its queue does not take, and what others need not wait for."""
MANY: Final = 10_000
"""Items beyond which nothing more is taken in: it stands in the outbox table."""
MOST_PATIENT: Final = 1000
"""Replies that may wait for their queue, each until its caller's deadline, however far that is."""
SHUN_FOR: Final = 60.0
"""Seconds for which nothing is sent to a direct reply-to that the connection was ended over."""
MOST_SHUNNED: Final = 1000
"""Of these, the newest are remembered."""


class Parcel:
    """An entry of the outbox table with the messages it takes to tell it."""

    def __init__(self, entry_id: int, parts: int) -> None:
        self.entry_id = entry_id
        self.parts = parts


@dataclasses.dataclass(slots=True)
class Item:
    """One message to publish; it is made when it is, since many are overtaken before."""

    exchange: str
    routing_key: str
    make: Callable[[], frames.Message]
    mandatory: bool
    parcel: Parcel | None = None
    job_id: uuid.UUID | None = None
    subject: str | None = None
    """What an event is about; None for what is no event."""
    until: float = 0.0
    """By the loop's clock: until then somebody may wait for it although no queue is there."""
    tries: int = 0
    apart_since: float = 0.0
    """By the loop's clock."""
    bare: Callable[[], frames.Message] | None = None
    """How a letter is made without its sender's headers, where it cannot be sent with them."""

    @property
    def is_reply(self) -> bool:
        """Whether it goes to a caller, who can also ask with ``get_job``."""
        return not self.exchange

    @property
    def is_letter(self) -> bool:
        """Whether it is a dead letter, of which there is no other copy."""
        return not self.is_reply and self.subject is None


Left = Sequence[tuple[Item, errors.VolumeWorkerError]]


class Dispatcher:
    """Publishes; :meth:`run` is its life.

    Args:
        on_told: called with the entries that need nothing more; False where that could not be
            noted, and is to be tried again.
    """

    def __init__(
        self, to: broker.Broker, on_told: Callable[[Sequence[int]], Awaitable[bool]]
    ) -> None:
        self._broker = to
        self._on_told = on_told
        self._replies: list[Item] = []
        self._events: dict[str, Item] = {}
        self._due: set[str] = set()
        """What events are about that must not wait."""
        self._told: list[int] = []
        self._apart: dict[object, Item] = {}
        """Events, by their subject, and letters that are tried again by themselves."""
        self._patient: dict[object, Item] = {}
        """Replies that are."""
        self._suspects: suspects.Suspects[Item] = suspects.Suspects()
        self._shunned: dict[str, float] = {}
        """Until when nothing is sent to an address, by the loop's clock."""
        self._missing: set[str] = set()
        """Exchanges that are not there."""
        self._events_at = 0.0
        """By the loop's clock: until then events wait for newer ones."""
        self._wake = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether anything waits to be sent that can be."""
        return bool(self._replies or self._events or self._told or self._suspects)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be handed over."""
        in_line = len(self._replies) + len(self._events) + len(self._suspects)
        return in_line + len(self._apart) > MANY

    @property
    def apart(self) -> Collection[int]:
        """The entries that wait for a queue to be there, or to have room."""
        parcels = [item.parcel for item in (*self._apart.values(), *self._patient.values())]
        return {parcel.entry_id for parcel in parcels if parcel is not None}

    def put(self, item: Item) -> None:
        """Sends something with the next batch."""
        self._replies.append(item)
        self._wake.set()

    def suspect(self, items: Sequence[Item]) -> None:
        """Sends again what the connection was lost with, and finds out whether that is why."""
        self._suspects.add(items)
        self._wake.set()

    def put_event(self, subject: str, item: Item) -> None:
        """Sends an event soon, unless a newer one of its subject comes."""
        # Taken out first, so that the newest of an object also keeps the order among objects.
        for overtaken in (self._events.pop(subject, None), self._apart.pop(subject, None)):
            if overtaken is not None and overtaken.parcel is not None:
                self.settle(overtaken.parcel)
        self._events[subject] = item
        self._wake.set()

    def hurry(self, subjects: Collection[str]) -> None:
        """Lets the events of these go with the next batch, before the replies in it."""
        self._due |= set(subjects)

    def settle(self, parcel: Parcel) -> None:
        """One message of an entry needs nothing more."""
        parcel.parts -= 1
        if parcel.parts == 0:
            self.note_told(parcel.entry_id)

    def note_told(self, entry_id: int) -> None:
        """An entry needs nothing more."""
        self._told.append(entry_id)
        self._wake.set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        while True:
            if self._suspects:
                is_all_sent = await self._send_suspects()
            else:
                await self._wait_for_work()
                is_all_sent = await self._send_batch()
            await self._forget_told()
            if not is_all_sent:
                await asyncio.sleep(PAUSE)

    async def _send_batch(self) -> bool:
        loop = asyncio.get_running_loop()
        batch = self._take_events(all_of_them=loop.time() >= self._events_at)
        if batch and not self._events:
            self._events_at = loop.time() + LINGER
        batch += self._replies[:BATCH]
        self._replies = self._replies[BATCH:]
        left = await self._publish(batch)
        lost: Sequence[Item] = []
        others = left
        if _is_lost(left):
            others, lost = _split(left, link.ConnectionLost)
        self._keep([item for item, _ in others])
        self.suspect(lost)
        return not left

    async def _send_suspects(self) -> bool:
        part = self._suspects.part()
        left = await self._publish(part)
        others, unsent = _split(left, errors.Unreachable)
        self._keep([item for item, _ in others])
        culprit = self._suspects.sort_out(part, unsent, is_lost=_is_lost(left))
        if culprit is not None:
            self._give_up(culprit)
        return not left

    async def _wait_for_work(self) -> None:
        """Waits for a reply, or for events whose time has come."""
        loop = asyncio.get_running_loop()
        while not (self._replies or self._told or self._suspects):
            if self._events and loop.time() >= self._events_at:
                return
            self._wake.clear()
            patience = max(self._events_at - loop.time(), 0) if self._events else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._wake.wait()

    def _take_events(self, *, all_of_them: bool) -> list[Item]:
        """The events of the next batch; one that comes from now on belongs to a later one."""
        if all_of_them:
            taken, self._events = list(self._events.values()), {}
        else:
            taken = [self._events.pop(one) for one in self._due if one in self._events]
        self._due = set()
        return taken

    async def _forget_told(self) -> None:
        told, self._told = self._told, []
        if told and not await self._on_told(told):
            self._told = told + self._told

    def _keep(self, items: Sequence[Item]) -> None:
        """Puts back what the broker did not take; an event only if no newer one has come."""
        for item in reversed(items):
            if item.subject is None:
                self._replies.insert(0, item)
            elif item.subject not in self._events:
                self._events[item.subject] = item
            elif item.parcel is not None:
                self.settle(item.parcel)

    async def _publish(self, batch: Sequence[Item]) -> Left:
        """Publishes all at once; returns what has to be tried again, and why."""
        made = [(item, message) for item in batch if (message := self._make(item)) is not None]
        if not made:
            return []
        outcomes = await self._broker.publish_all(
            [
                link.Outgoing(message, item.exchange, item.routing_key, item.mandatory)
                for item, message in made
            ]
        )
        return [
            (item, error)
            for (item, _), error in zip(made, outcomes, strict=True)
            if not self._is_dealt_with(item, error) and error is not None
        ]

    def _make(self, item: Item) -> frames.Message | None:
        if item.is_reply and self._is_shunned(item.routing_key):
            if item.parcel is not None:
                log.warning("reply.given_up", job_id=str(item.job_id), reply_to=item.routing_key)
            self._done(item)
            return None
        try:
            return item.make()
        except Exception:
            # One that cannot be made must not keep the others from being sent, nor come again.
            log.exception("outbox.unpublishable", job_id=str(item.job_id))
            self._done(item)
            return None

    def _is_dealt_with(self, item: Item, error: errors.VolumeWorkerError | None) -> bool:
        """Whether an item need not go with the next batch again."""
        match error:
            case None:
                self._missing.discard(item.exchange)
                self._done(item)
            case link.Refused():
                self._set_apart(item)
            case link.Unpublishable():
                if item.bare is None:
                    log.error("outbox.unpublishable", job_id=str(item.job_id), error=error.message)
                return self._is_given_up(item)
            case link.Unroutable() if not item.exchange:
                self._nowhere(item)
            case link.Unroutable() if item.exchange not in self._missing:
                self._missing.add(item.exchange)
                log.warning("outbox.unroutable", exchange=item.exchange)
                return False
            case _:
                # A status message is of no use later, unless it may be what ends the connection.
                is_suspect = bool(self._suspects) or isinstance(error, link.ConnectionLost)
                return item.parcel is None and item.is_reply and not is_suspect
        return True

    def _is_given_up(self, item: Item) -> bool:
        """Whether nothing more can be done for what cannot be sent; a letter is never lost."""
        if item.bare is not None:
            log.warning("letter.headers_left_out", job_id=str(item.job_id))
            item.make, item.bare = item.bare, None
            return False
        if item.is_letter:
            # Nothing tries it again but the next start: it stands in the table.
            self._apart[id(item)] = item
        else:
            self._done(item)
        return True

    def _give_up(self, item: Item) -> None:
        """Keeps a message away over which the broker ends the connection."""
        log.error(
            "outbox.ends_connection",
            job_id=str(item.job_id),
            exchange=item.exchange,
            routing_key=item.routing_key,
        )
        if item.is_reply and not item.mandatory:
            # What else is said to that caller would have to be found out anew.
            self._shunned[item.routing_key] = asyncio.get_running_loop().time() + SHUN_FOR
            if len(self._shunned) > MOST_SHUNNED:
                del self._shunned[next(iter(self._shunned))]
        if not self._is_given_up(item):
            self._keep([item])

    def _is_shunned(self, reply_to: str) -> bool:
        return self._shunned.get(reply_to, 0.0) > asyncio.get_running_loop().time()

    def _done(self, item: Item) -> None:
        if item.parcel is not None:
            self.settle(item.parcel)

    def _nowhere(self, item: Item) -> None:
        """A reply that no queue is there for: its caller may be coming back."""
        if item.parcel is not None and item.tries == 0:
            # Once. The result stays readable with get_job; a caller that is gone costs nothing.
            log.warning("reply.undeliverable", job_id=str(item.job_id), reply_to=item.routing_key)
        if asyncio.get_running_loop().time() < item.until:
            self._set_apart(item)
        else:
            self._done(item)

    def _set_apart(self, item: Item) -> None:
        """Tries again later what its queue has no room for, or what has no queue; others go on."""
        key: object = item.subject or id(item)
        # A status message is of no use later, and an event that a newer one has overtaken of none.
        if (item.parcel is None and item.subject is None) or key in self._events:
            self._done(item)
            return
        loop = asyncio.get_running_loop()
        item.apart_since = item.apart_since or loop.time()
        item.tries += 1
        self._holder(item)[key] = item
        pause = retry.backoff(item.tries, base=APART_BASE, cap=APART_CAP)
        loop.call_later(pause, self._try_again, key, item)
        if len(self._patient) > MOST_PATIENT:
            self._evict()

    def _holder(self, item: Item) -> dict[object, Item]:
        return self._patient if item.is_reply else self._apart

    def _evict(self) -> None:
        """Gives up the reply that has waited longest; its result stays readable with get_job."""
        key, item = min(self._patient.items(), key=lambda one: one[1].apart_since)
        del self._patient[key]
        log.warning("reply.given_up", job_id=str(item.job_id), reply_to=item.routing_key)
        self._done(item)

    def _try_again(self, key: object, item: Item) -> None:
        # Unless a newer event has taken its place, or it was given up.
        if self._holder(item).get(key) is item:
            del self._holder(item)[key]
            if item.subject is None:
                self.put(item)
            else:
                self.put_event(item.subject, item)


def _is_lost(left: Left) -> bool:
    """Whether the connection was lost with these, and not because an exchange is not there."""
    met = [error for _, error in left]
    return any(isinstance(error, link.ConnectionLost) for error in met) and not any(
        isinstance(error, link.NoExchange) for error in met
    )


def _split(left: Left, kind: type[errors.VolumeWorkerError]) -> tuple[Left, Sequence[Item]]:
    """What has met another error, and the items that have met one of this kind."""
    others = [(item, error) for item, error in left if not isinstance(error, kind)]
    return others, [item for item, error in left if isinstance(error, kind)]
