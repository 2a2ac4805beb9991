"""Work on dead letters, one after the other: what is done is stored, then the letter removed.

In this order, so that a command that is killed loses nothing: a letter that it could not remove any
more is found again, and known for what it is.
"""

import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import aio_pika.abc

from messages import errors, topology
from worker import settings
from worker.cli import dead_lock, dead_queue, dead_replay, letter, reach
from worker.cli.dead_replay import Done, Outcome
from worker.store import database

Deed = Callable[[dead_queue.Taken], Awaitable[Done]]
"""What is done with a letter; it is removed then, unless it was refused."""

_REMOVED: Final = (Outcome.REPLAYED, Outcome.ALREADY_REPLAYED, Outcome.DISCARDED)


class Ambiguous(errors.VolumeWorkerError):
    """An edit is for one letter, and several are meant."""


@dataclasses.dataclass(slots=True)
class Work:
    """Work on the letters that are meant, and what has become of them so far."""

    configured: settings.Settings
    wanted: dead_queue.Filter
    dry_run: bool
    total: int | None = None
    """Letters that there were; None while nobody has looked."""
    done: list[tuple[letter.Letter, Done]] = dataclasses.field(default_factory=list)

    async def replay(self, edit: Mapping[str, Any] | None) -> None:
        """Replays letters.

        Raises:
            Ambiguous: there is an edit, and it is not for one letter.
            Unreachable: broker or database are away; what was done by then stays done.
        """
        async with self._hold() as (store, connection, hold):
            # Of one job there may be a letter that was replayed and could not be removed.
            requests = {one.letter.job_id or number for number, one in enumerate(hold.meant)}
            if edit is not None and len(requests) > 1:
                raise Ambiguous(
                    f"--edit is for one letter, and {len(requests)} are meant: nothing was done; "
                    "name one by --id"
                )
            replayer = dead_replay.Replayer(
                store=store,
                connection=connection,
                channel=await connection.channel(publisher_confirms=True, on_return_raises=True),
                names=self._names,
                limit=self.configured.max_request_bytes,
                edit=edit,
                dry_run=self.dry_run,
            )
            await self._do(hold, replayer.replay)

    async def discard(self) -> None:
        """Removes letters; the records of their jobs stay.

        Raises:
            Unreachable: broker or database are away; what was done by then stays done.
        """

        async def discard(_: dead_queue.Taken) -> Done:
            return Done(Outcome.DISCARDED)

        async with self._hold() as (_, _, hold):
            await self._do(hold, discard)

    def count(self, *outcomes: Outcome) -> int:
        """How many letters have come to one of these ends."""
        return sum(done.outcome in outcomes for _, done in self.done)

    @property
    def left(self) -> int:
        """How many letters stay."""
        return (self.total or 0) - self.count(*_REMOVED)

    def to_wire(self) -> dict[str, Any]:
        """All of it, as JSON data."""
        counts = collections.Counter(done.outcome for _, done in self.done)
        return {
            "dry_run": self.dry_run,
            "letters": [
                {
                    "message_id": one.message_id,
                    "job_id": one.job_id,
                    "method": one.method,
                    "origin": one.origin,
                    "outcome": done.outcome,
                    "text": done.text,
                }
                for one, done in self.done
            ],
            "totals": {
                "in": self.total,
                **{outcome.replace(" ", "_"): counts[outcome] for outcome in Outcome},
                "left": self.left,
            },
        }

    @property
    def _names(self) -> topology.Topology:
        return topology.Topology(self.configured.namespace)

    @contextlib.asynccontextmanager
    async def _hold(
        self,
    ) -> AsyncIterator[tuple[database.Database, aio_pika.abc.AbstractConnection, dead_queue.Hold]]:
        async with contextlib.AsyncExitStack() as stack:
            store = await stack.enter_async_context(reach.records(self.configured))
            if not self.dry_run:
                await stack.enter_async_context(dead_lock.held(store))
            connection = await stack.enter_async_context(dead_queue.connected(self.configured))
            hold = await stack.enter_async_context(
                dead_queue.held(connection, self._names, self.wanted)
            )
            self.total = hold.total
            yield store, connection, hold

    async def _do(self, hold: dead_queue.Hold, deed: Deed) -> None:
        for taken in hold.meant:
            done = await deed(taken)
            self.done.append((taken.letter, done))
            if done.outcome in _REMOVED and not self.dry_run:
                await taken.message.ack()
