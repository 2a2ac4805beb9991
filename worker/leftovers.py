"""What jobs that have ended left behind: connections, and exports made for them alone.

Their undoing failed, because the target was away, or their worker was lost for good. Each is ended
by a job like any other, so that it waits its turn, is tried again, and is told of.
"""

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from messages import envelope, requests
from worker import operations
from worker.store import acceptance, connections, database

log = structlog.get_logger(__name__)

FIRST_PAUSE: Final = 30.0
"""Seconds until a second job for a leftover that the first one could not end."""
LONGEST_PAUSE: Final = 600.0

Accept = Callable[[Sequence[acceptance.NewJob]], Awaitable[object]]


class Sweeper:
    """Makes jobs for what is left at one address.

    One that is there again and again gets jobs at longer and longer intervals, since each that
    fails is a dead letter.
    """

    def __init__(
        self,
        store: database.Database,
        address: str,
        accept: Accept,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._address = address
        self._accept = accept
        self._clock = clock
        self._tried: dict[connections.Leftover, tuple[int, float]] = {}
        """How often each was tried, and when it may be again."""

    async def sweep(self) -> None:
        """Makes a job for each thing left; not while a job is at work on its volume."""
        found = await connections.leftovers(self._store, self._address)
        due = self._due(found)
        if due:
            log.warning("leftovers.found", address=self._address, count=len(due))
            await self._accept([ending(self._address, leftover) for leftover in due])
            self._note_tries(due)

    def _due(self, found: Sequence[connections.Leftover]) -> list[connections.Leftover]:
        now = self._clock()
        # Not found now may mean that its job is at work: it is forgotten only after a long while.
        self._tried = {
            leftover: (times, until)
            for leftover, (times, until) in self._tried.items()
            if now < until + LONGEST_PAUSE
        }
        return [leftover for leftover in found if now >= self._tried.get(leftover, (0, now))[1]]

    def _note_tries(self, tried: Sequence[connections.Leftover]) -> None:
        now = self._clock()
        for leftover in tried:
            times, _ = self._tried.get(leftover, (0, now))
            pause = min(FIRST_PAUSE * 2**times, LONGEST_PAUSE)
            self._tried[leftover] = (times + 1, now + pause)


def ending(address: str, leftover: connections.Leftover) -> acceptance.NewJob:
    """The job that ends what is left."""
    args: dict[str, object] = {"volume_id": str(leftover.volume_id)}
    method = "remove_export"
    if leftover.connection_id is not None:
        method = "terminate_connection"
        args |= {"connection_id": str(leftover.connection_id), "force": True}
    major, minor = requests.VERSION
    request = {"method": method, "version": f"{major}.{minor}", "args": args}
    body = json.dumps(request).encode()
    read = envelope.read_body(body, len(body), address)
    identity = uuid.uuid4()
    operation = operations.OPERATIONS[method]
    return acceptance.NewJob(
        id=identity,
        method=method,
        address=address,
        slot=operation.slot,
        body=body,
        properties={"message_id": str(identity)},
        fingerprint=read.fingerprint,
        deadline=None,
        reply_to=None,
        correlation_id=str(identity),
        status_updates=False,
        parent_job=None,
        needs=operation.needs(identity, read.args),
    )
