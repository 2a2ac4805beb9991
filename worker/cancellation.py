"""What somebody wants of a job that another worker may be running: its end, or another speed.

A job says in its row that it is to be cancelled, or how fast it may go. Each worker looks at the
rows of its own jobs, and at those of the jobs whose end somebody here waits for.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from messages import errors, resources
from worker.store import database, jobs

LOOK_INTERVAL: Final = 0.5
"""Seconds between looks."""


class Watch:
    """Looks for jobs that are to be cancelled or slowed down, and for the end of others.

    Args:
        is_busy: whether jobs run here.
        stop: called with each job that runs here and is to be cancelled; again and again, until it
            has ended.
        is_moving: whether any of those that run here heeds how fast it may go.
        throttle: called likewise with what was said of that.
    """

    def __init__(
        self,
        store: database.Database,
        *,
        owner: uuid.UUID,
        is_busy: Callable[[], bool],
        stop: Callable[[uuid.UUID], None],
        is_moving: Callable[[], bool],
        throttle: Callable[[uuid.UUID, Mapping[str, Any]], None],
    ) -> None:
        self._store = store
        self._owner = owner
        self._is_busy = is_busy
        self._stop = stop
        self._is_moving = is_moving
        self._throttle = throttle
        self._awaited: dict[uuid.UUID, asyncio.Event] = {}

    async def ended(self, job_id: uuid.UUID) -> jobs.Job:
        """Waits for a job's end, wherever it runs; returns it.

        Raises:
            JobNotFound: there is none.
        """
        while True:
            # Who waits for the same job shares the event. A job that is not awaited any more is
            # looked at until it has ended, and no longer.
            over = self._awaited.setdefault(job_id, asyncio.Event())
            # Looked at after the event was there, which an end that comes now sets.
            job = await jobs.get(self._store, job_id)
            if job.state in resources.ENDED:
                return job
            await over.wait()

    def note_end(self, job_id: uuid.UUID) -> None:
        """An attempt has ended here: who waits for the job need not wait for the next look."""
        if (over := self._awaited.pop(job_id, None)) is not None:
            over.set()

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            with contextlib.suppress(errors.Unreachable):
                if self._is_busy():
                    for job_id in await jobs.to_cancel(self._store, self._owner):
                        self._stop(job_id)
                if self._is_moving():
                    for job_id, said in (await jobs.throttled(self._store, self._owner)).items():
                        self._throttle(job_id, said)
                if self._awaited:
                    for job_id in await jobs.ended(self._store, list(self._awaited)):
                        self.note_end(job_id)
