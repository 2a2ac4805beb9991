"""Running jobs: claimed from PostgreSQL, each under a lease, within the slots of its class.

Who holds a lease renews it in time, and stops its job before it runs out; what an attempt does is
in :mod:`worker.attempt`.
"""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from messages import client, errors, requests
from messages.resources import JobState
from worker import attempt, backend, cancellation, outbox, process
from worker.connectors import registry
from worker.store import acceptance, database, jobs

log = structlog.get_logger(__name__)

POLL_INTERVAL: Final = 1.0
"""Seconds between looks for jobs whose turn has come without this worker being told."""
WATCH_INTERVAL: Final = 0.5
"""Seconds between looks at the leases."""


@dataclasses.dataclass(slots=True)
class _Running:
    """An attempt at work here."""

    attempt: attempt.Attempt
    task: asyncio.Task[None]
    until: float
    """When its lease ends, by this process's clock: counted from before it was asked for."""

    @property
    def job(self) -> jobs.Job:
        return self.attempt.job


class Runner:
    """Runs jobs in tasks of their own."""

    def __init__(
        self,
        store: database.Database,
        *,
        outbox: outbox.Outbox,
        remote: client.Client,
        connectors: registry.Registry,
        backends: Mapping[str, backend.Backend],
        host: str,
        owner: uuid.UUID,
        slots: Mapping[jobs.Slot, int],
        lease: float,
        max_attempts: int,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._backends = backends
        self._owner = owner
        self._slots = slots
        self._lease = lease
        # What works for a job is given its grace before another worker may have it.
        self._margin = min(process.GRACE + 2 * WATCH_INTERVAL, lease / 4)
        self._parts = attempt.Parts(
            store=store,
            outbox=outbox,
            remote=remote,
            connectors=connectors,
            backends=backends,
            host=host,
            lease=lease,
            max_attempts=max_attempts,
            cancel=self.cancel,
            on_ending=self._note_free_slot,
        )
        self._running: dict[uuid.UUID, _Running] = {}
        self._unstored: set[int] = set()
        """Tokens of attempts whose end could not be stored: their jobs are left to their lease."""
        self._watch = cancellation.Watch(
            store,
            owner=owner,
            is_busy=lambda: bool(self._running),
            stop=self._stop_cancelled,
            is_moving=lambda: any(one.job.slot is jobs.Slot.DATA for one in self._running.values()),
            throttle=self._throttle,
        )
        self._stopping = False
        self._wake = asyncio.Event()
        self._is_more = True
        """Whether jobs may be queued at these addresses."""
        # Slots are counted, filled from the database, and taken: one at a time.
        self._filling = asyncio.Lock()

    async def accept(self, new: Sequence[acceptance.NewJob]) -> list[acceptance.Accepted]:
        """Stores requests and starts at once those that can be.

        Raises:
            Unreachable: the database stayed away; nothing is known to be stored.
        """
        async with self._filling:
            until = self._lease_from_now()
            accepted = await acceptance.accept(
                self._store,
                [self._as_it_can(one) for one in new],
                owner=self._owner,
                lease=self._lease,
                free=self._free(),
            )
            for stored in accepted:
                self._start_accepted(stored, until)
            await self._start_lost(accepted)
        for stored in accepted:
            if stored.job.state is JobState.QUEUED:
                await self._cancel_what_waits(stored.job)
        return accepted

    def _as_it_can(self, new: acceptance.NewJob) -> acceptance.NewJob:
        """Without the record of a volume that its backend could not make now."""
        if new.creates is None or self._backends[new.address].ready:
            return new
        return dataclasses.replace(new, creates=None)

    def _start_accepted(self, stored: acceptance.Accepted, until: float) -> None:
        job = stored.job
        match stored.verdict:
            case acceptance.Verdict.RUNNING:
                self._start(job, until, begun=stored.begun)
            case acceptance.Verdict.QUEUED:
                self._is_more = True
                self._outbox.say_job(job)
                # What it waits for may have ended before anybody could know of it.
                self.wake()
            case (
                acceptance.Verdict.REPEATED
                | acceptance.Verdict.FINISHED
                | acceptance.Verdict.REUSED
            ):
                pass

    async def _start_lost(self, accepted: Sequence[acceptance.Accepted]) -> None:
        """Starts jobs that an earlier try of the statement has taken, and whose answer was lost."""
        lost = [
            stored.job
            for stored in accepted
            if stored.verdict is acceptance.Verdict.REPEATED
            and stored.job.state is JobState.RUNNING
            and stored.job.owner == self._owner
            and stored.job.id not in self._running
            and stored.job.lease_token not in self._unstored
        ]
        if not lost:
            return
        until = self._lease_from_now()
        kept = await jobs.renew(self._store, lost, lease=self._lease)
        for job in lost:
            if job.id in kept:
                self._start(job, until, is_repeated=True)

    def wake(self) -> None:
        """A job's turn may have come: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Claims jobs and keeps their leases until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim())
            group.create_task(self._renew())
            group.create_task(self._watch_leases())
            group.create_task(self._watch.run())

    async def drain(self, timeout: float) -> None:
        """Takes no more jobs; gives those that run ``timeout`` seconds, then puts them back."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            # What is being claimed meanwhile starts; a database that does not answer cannot hold
            # up those that run.
            async with asyncio.timeout(timeout), self._filling:
                pass
        for running in list(self._running.values()):
            if running.job.slot is jobs.Slot.WAITING:
                # It may wait for longer than a drain lasts, and whoever takes it up waits on.
                running.attempt.stop(attempt.Stop.DRAIN, running.task)
        tasks = [running.task for running in self._running.values()]
        if tasks:
            log.info("runner.draining", jobs=len(tasks), timeout=timeout)
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for running in list(self._running.values()):
                running.attempt.stop(attempt.Stop.DRAIN, running.task)
            if late:
                await asyncio.wait(late)

    def _free(self) -> dict[jobs.Slot, int]:
        """How many more jobs of each class may start; less than none while draining."""
        if self._stopping:
            return dict.fromkeys(self._slots, -1)
        taken = [
            one.job.slot
            for one in self._running.values()
            if one.job.refusal is None and not one.attempt.is_ending
        ]
        return {slot: max(most - taken.count(slot), 0) for slot, most in self._slots.items()}

    async def _claim(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._wake.wait()
            self._wake.clear()
            try:
                async with self._filling:
                    await self._claim_once()
            except errors.Unreachable as error:
                log.warning("runner.claim_failed", error=error.message)

    async def _claim_once(self) -> None:
        if self._stopping:
            return
        until = self._lease_from_now()
        claimed = await jobs.claim(
            self._store,
            owner=self._owner,
            lease=self._lease,
            free=self._free(),
            addresses=[at for at, one in self._backends.items() if not one.is_standby],
        )
        self._is_more = bool(claimed)
        for job in claimed:
            self._start(job, until)

    def _note_free_slot(self) -> None:
        if self._is_more:
            self.wake()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            held = [running.job for running in self._running.values()]
            if not held:
                continue
            until = self._lease_from_now()
            try:
                kept = await jobs.renew(self._store, held, lease=self._lease)
            except errors.Unreachable as error:
                log.warning("runner.renew_failed", error=error.message)
                continue
            for job in held:
                running = self._running.get(job.id)
                if running is None or running.job is not job:
                    continue
                if job.id in kept:
                    running.until = until
                else:
                    self._lose(running)

    async def _watch_leases(self) -> None:
        """Stops what could not be renewed, before another worker may take it over."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            now = asyncio.get_running_loop().time()
            for running in list(self._running.values()):
                if running.until - self._margin < now:
                    self._lose(running)

    def _lose(self, running: _Running) -> None:
        if running.attempt.stop(attempt.Stop.LEASE_LOST, running.task):
            log.error("job.lease_lost", job_id=str(running.job.id), method=running.job.method)

    def _lease_from_now(self) -> float:
        return asyncio.get_running_loop().time() + self._lease

    def _start(
        self,
        job: jobs.Job,
        until: float,
        *,
        begun: Mapping[str, Any] | None = None,
        is_repeated: bool = False,
    ) -> None:
        before = self._running.get(job.id)
        if before is not None and before.job.lease_token == job.lease_token:
            return
        if before is not None:
            # Its own job, taken over after a pause that was longer than the lease.
            self._lose(before)
        started = attempt.Attempt(self._parts, job, begun=begun, is_repeated=is_repeated)
        task = asyncio.create_task(
            self._run(started, after=before.task if before else None), name=f"job {job.id}"
        )
        running = self._running[job.id] = _Running(started, task, until)
        task.add_done_callback(lambda _: self._ended(running))

    def _ended(self, running: _Running) -> None:
        if self._running.get(running.job.id) is running:
            del self._running[running.job.id]
        if not running.attempt.is_stored:
            self._unstored.add(running.job.lease_token)
        self._watch.note_end(running.job.id)
        if running.attempt.leaves_more:
            self._is_more = True
            self.wake()

    async def _run(self, started: attempt.Attempt, *, after: asyncio.Task[None] | None) -> None:
        job = started.job
        structlog.contextvars.bind_contextvars(
            job_id=str(job.id), method=job.method, address=job.address, attempt=job.attempt
        )
        if after is not None:
            await asyncio.wait({after})
        await started.run()

    # Cancelling

    async def cancel(self, job_id: uuid.UUID) -> jobs.Job:
        """Has a job cancelled, wherever it runs; returns it when it has ended.

        Raises:
            JobNotFound: there is none.
        """
        # One that is stored after it was asked for, and before it is waited for, would not end.
        await jobs.get(self._store, job_id)
        await self._ask_to_cancel(job_id)
        return await self._watch.ended(job_id)

    async def _ask_to_cancel(self, job_id: uuid.UUID) -> None:
        until = self._lease_from_now()
        never_begun = await jobs.cancel(
            self._store, job_id, owner=self._owner, lease=self._lease, cleanups=_CLEANUPS
        )
        for job in never_begun:
            self._start(job, until)
        self._stop_cancelled(job_id)
        self.wake()

    def _stop_cancelled(self, job_id: uuid.UUID) -> None:
        if (running := self._running.get(job_id)) is not None:
            running.attempt.stop(attempt.Stop.CANCEL, running.task)

    def _throttle(self, job_id: uuid.UUID, said: Mapping[str, Any]) -> None:
        if (running := self._running.get(job_id)) is not None:
            running.attempt.throttle.say(said)

    async def _cancel_what_waits(self, job: jobs.Job) -> None:
        """A connection that is to be ended need not be made before."""
        if job.method != "terminate_connection":
            return
        args = requests.TerminateConnection.model_validate(job.args)
        for other in await jobs.queued_connects(self._store, args.volume_id, job.id):
            wanted = requests.InitializeConnection.model_validate(other.args).connector
            if (args.force and args.connector is None and args.connection_id is None) or (
                args.connector is not None and args.connector.is_same_as(wanted)
            ):
                await self._ask_to_cancel(other.id)


_CLEANUPS: Final = tuple(
    method.name for method in requests.METHODS.values() if method.despite_deadline
)
"""What is carried out even where nobody wants its parent's work any more."""
