"""Running jobs: claimed from PostgreSQL, each under a lease, within the slots of its class.

A job's attempt ends in one of four ways: it succeeds, it fails, it is put back to be tried again,
or its lease is lost, and then whatever it does is void. Every end is one statement that names the
fencing token.
"""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from messages import client, errors, requests, resources
from messages.resources import JobState
from worker import backend, operations, outbox, retry
from worker.connectors import registry
from worker.operations import base
from worker.store import database, jobs

log = structlog.get_logger(__name__)

POLL_INTERVAL: Final = 1.0
"""Seconds between looks for jobs whose turn has come without this worker being told."""
WATCH_INTERVAL: Final = 0.5
"""Seconds between looks at the leases; one that has less than that left counts as ended."""
RETRY_BASE: Final = 1.0
RETRY_CAP: Final = 60.0


@dataclasses.dataclass(slots=True)
class _Running:
    """A job at work here."""

    job: jobs.Job
    task: asyncio.Task[None]
    until: float
    """When its lease ends, by this process's clock: counted from before it was asked for."""
    is_ending: bool = False
    """Its end is being stored and told, which nothing may cut short."""


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
        self._remote = remote
        self._connectors = connectors
        self._backends = backends
        self._host = host
        self._owner = owner
        self._slots = slots
        self._lease = lease
        self._max_attempts = max_attempts
        self._running: dict[uuid.UUID, _Running] = {}
        self._stopping = False
        self._wake = asyncio.Event()
        # Slots are counted, filled from the database, and taken: one at a time.
        self._filling = asyncio.Lock()

    async def accept(self, new: Sequence[jobs.NewJob]) -> list[jobs.Accepted]:
        """Stores requests and starts at once those that can be.

        Raises:
            Unreachable: the database stayed away; nothing is known to be stored.
        """
        async with self._filling:
            until = self._lease_from_now()
            accepted = await jobs.accept(
                self._store, new, owner=self._owner, lease=self._lease, free=self._free()
            )
            for stored in accepted:
                self._start_accepted(stored, until)
        return accepted

    def _start_accepted(self, stored: jobs.Accepted, until: float) -> None:
        job = stored.job
        match stored.verdict:
            case jobs.Verdict.RUNNING:
                self._start(job, until)
            case jobs.Verdict.QUEUED:
                self._outbox.say_job(job)
            case jobs.Verdict.REPEATED:
                # The answer to an earlier try of the same statement may have been lost.
                if job.owner == self._owner and job.state is JobState.RUNNING:
                    self._start(job, until)
            case jobs.Verdict.FINISHED | jobs.Verdict.REUSED:
                pass

    def wake(self) -> None:
        """A job's turn may have come: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Claims jobs and keeps their leases until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim())
            group.create_task(self._renew())
            group.create_task(self._watch_leases())

    async def drain(self, timeout: float) -> None:
        """Takes no more jobs; gives those that run ``timeout`` seconds, then puts them back."""
        self._stopping = True
        async with self._filling:
            # What was being claimed meanwhile has started by now.
            tasks = [running.task for running in self._running.values()]
        if tasks:
            log.info("runner.draining", jobs=len(tasks), timeout=timeout)
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _free(self) -> dict[jobs.Slot, int]:
        if self._stopping:
            return dict.fromkeys(jobs.Slot, 0)
        taken = [one.job.slot for one in self._running.values() if one.job.refusal is None]
        return {slot: max(self._slots[slot] - taken.count(slot), 0) for slot in jobs.Slot}

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
        free = self._free()
        if not any(free.values()):
            return
        until = self._lease_from_now()
        claimed = await jobs.claim(
            self._store,
            owner=self._owner,
            lease=self._lease,
            free=free,
            addresses=[at for at, one in self._backends.items() if not one.is_standby],
        )
        for job in claimed:
            self._start(job, until)

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
                if running.until - WATCH_INTERVAL < now:
                    self._lose(running)

    def _lose(self, running: _Running) -> None:
        if not (running.is_ending or running.task.cancelling()):
            log.error("job.lease_lost", job_id=str(running.job.id), method=running.job.method)
            running.task.cancel()

    def _lease_from_now(self) -> float:
        return asyncio.get_running_loop().time() + self._lease

    def _start(self, job: jobs.Job, until: float) -> None:
        before = self._running.get(job.id)
        if before is not None and before.job.lease_token == job.lease_token:
            return
        if before is not None:
            # Its own job, taken over after a pause that was longer than the lease.
            self._lose(before)
        task = asyncio.create_task(
            self._run(job, after=before.task if before else None), name=f"job {job.id}"
        )
        running = self._running[job.id] = _Running(job, task, until)
        task.add_done_callback(lambda _: self._ended(running))

    def _ended(self, running: _Running) -> None:
        if self._running.get(running.job.id) is running:
            del self._running[running.job.id]
        self.wake()

    async def _run(self, job: jobs.Job, *, after: asyncio.Task[None] | None) -> None:
        structlog.contextvars.bind_contextvars(
            job_id=str(job.id), method=job.method, address=job.address, attempt=job.attempt
        )
        if after is not None:
            await asyncio.wait({after})
        log.info("job.started")
        self._outbox.say_job(job)
        end = await self._attempt(job)
        running = self._running.get(job.id)
        if running is not None and running.job is job:
            running.is_ending = True
        ending = asyncio.ensure_future(self._end(job, end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # Cancelled while it ends: what became of it must be stored all the same.
            await asyncio.wait({ending})
            raise

    async def _attempt(self, job: jobs.Job) -> Coroutine[Any, Any, None]:
        """Carries the job out; returns how its attempt is to be ended."""
        context: base.Context | None = None
        try:
            context = self._context(job)
            operation = operations.OPERATIONS[job.method]
            try:
                self._may_start(job)
            except errors.VolumeWorkerError:
                await self._undo(operation, context)
                raise
            outcome = await operation.run(context)
        except database.LeaseLost as error:
            return self._give_up(str(error))
        except asyncio.CancelledError:
            return self._put_back(job)
        except errors.VolumeWorkerError as error:
            return self._fail(job, error, context)
        except Exception as error:
            log.exception("job.crashed")
            fault = errors.Internal(f"{type(error).__name__} in {job.method}; see the log")
            return self._fail(job, fault, context)
        return self._succeed(job, outcome)

    async def _end(self, job: jobs.Job, ending: Coroutine[Any, Any, None]) -> None:
        try:
            await ending
        except database.LeaseLost as error:
            log.warning("job.lease_lost", statement=str(error))
        except Exception:
            # The lease runs out, and the job is taken up again.
            log.exception("job.end_not_stored")

    async def _give_up(self, statement: str) -> None:
        log.warning("job.lease_lost", statement=statement)

    def _context(self, job: jobs.Job) -> base.Context:
        async def progress(now: resources.Progress) -> None:
            self._outbox.say_job(await jobs.set_progress(self._store, job, now))

        return base.Context(
            job=job,
            args=base.parse(job),
            host=self._host,
            backends=self._backends,
            store=self._store,
            remote=self._remote,
            connectors=self._connectors,
            say_volume=self._outbox.say_volume,
            progress=progress,
        )

    def _may_start(self, job: jobs.Job) -> None:
        """Raises what ends a job before its operation begins."""
        if job.refusal is not None:
            raise base.refusal(job)
        if job.attempt > self._max_attempts:
            raise errors.WorkerLost(f"the worker was lost in each of {self._max_attempts} attempts")
        if job.overdue and not requests.METHODS[job.method].despite_deadline:
            raise errors.DeadlineExceeded("the deadline had passed before this attempt began")

    async def _undo(self, operation: base.Operation, context: base.Context) -> None:
        """Gives back what earlier attempts have acquired; what fails is left to be swept up."""
        if operation.undo is None or context.job.attempt == 1:
            return
        try:
            await operation.undo(context)
        except errors.VolumeWorkerError as error:
            log.warning("job.undo_failed", code=error.code, error=error.message)

    async def _succeed(self, job: jobs.Job, outcome: base.Outcome) -> None:
        ended = await jobs.finish(
            self._store,
            job,
            state=JobState.SUCCEEDED,
            result=outcome.result,
            change=outcome.change,
            connection_id=outcome.connection_id,
            owner=self._owner,
        )
        log.info("job.succeeded")
        await self._outbox.tell_end(ended)

    async def _fail(
        self, job: jobs.Job, error: errors.VolumeWorkerError, context: base.Context | None
    ) -> None:
        if error.transient and job.attempt < self._max_attempts:
            delay = retry.backoff(job.attempt, base=RETRY_BASE, cap=RETRY_CAP)
            log.warning("job.retried", code=error.code, error=error.message, delay=delay)
            self._outbox.say_job(await jobs.requeue(self._store, job, delay=delay, error=error))
            return
        is_dead = error.transient or isinstance(error, errors.WorkerLost)
        state = JobState.DEAD if is_dead else JobState.FAILED
        log.warning("job.failed", state=state, code=error.code, error=error.message)
        ended = await jobs.finish(
            self._store,
            job,
            state=state,
            error=error,
            change=None if context is None else context.on_failure,
            owner=self._owner,
        )
        await self._outbox.tell_end(ended)

    async def _put_back(self, job: jobs.Job) -> None:
        """The attempt was cut short by a drain, or its lease is lost, which the store knows."""
        back = await jobs.requeue(self._store, job, delay=0, error=None, counts=False)
        log.info("job.put_back")
        self._outbox.say_job(back)
