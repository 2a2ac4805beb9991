"""One attempt at a job: carried out, undone where it has to be, and ended.

It ends in one of five ways: it succeeds, it fails, it is cancelled, it is put back to be tried
again, or its lease is lost, and then whatever it does is void. Every end is one statement that
names the fencing token.
"""

import asyncio
import contextlib
import dataclasses
import enum
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import structlog

from messages import client, errors, requests, resources
from messages.resources import JobState
from worker import backend, children, operations, outbox, process, retry, throttle
from worker.connectors import registry
from worker.operations import base
from worker.store import database, jobs

log = structlog.get_logger(__name__)

RETRY_BASE: Final = 1.0
RETRY_CAP: Final = 60.0

End = Coroutine[Any, Any, None]


class Stop(enum.Enum):
    """Why an attempt is cut short."""

    DRAIN = enum.auto()
    LEASE_LOST = enum.auto()
    CANCEL = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What every attempt works with."""

    store: database.Database
    outbox: outbox.Outbox
    remote: client.Client
    connectors: registry.Registry
    backends: Mapping[str, backend.Backend]
    host: str
    lease: float
    max_attempts: int
    cancel: Callable[[uuid.UUID], Awaitable[jobs.Job]]
    on_ending: Callable[[], None]
    """Called when an attempt has left its slot."""


class Attempt:
    """A job at work here, in a task of its own: :meth:`run`."""

    def __init__(
        self,
        parts: Parts,
        job: jobs.Job,
        *,
        begun: Mapping[str, Any] | None = None,
        is_repeated: bool = False,
    ) -> None:
        self.job = job
        self._begun = begun
        # The statement that stored it may have made the record of its volume.
        self._may_have_made = is_repeated or begun is not None
        self.is_ending = False
        """Its end is being stored and told, which nothing may cut short."""
        self.is_stored = True
        """Whether its end could be stored, or was another worker's to store."""
        self.leaves_more = True
        """Whether jobs may wait for their turn when it has ended."""
        self.throttle = throttle.Throttle(job.throttle)
        """How fast it may go; to be told of what is said of that while it runs."""
        self._parts = parts
        self._stopped: Stop | None = None
        self._children: list[Mapping[str, Any]] = []
        self._undoing = False
        self._has_begun = False

    def stop(self, why: Stop, task: asyncio.Task[None]) -> bool:
        """Cuts it short, unless it is ending already; what it did is undone first.

        Returns whether this is what stops it.
        """
        if self.is_ending or self._stopped is why:
            return False
        if why is Stop.CANCEL and (self._undoing or self._stopped is not None):
            # What it did is being undone, and only what hurries that goes on top. One that was to
            # be put back need not be.
            if self._stopped is Stop.DRAIN:
                self._stopped = why
            return False
        self._stopped = why
        if self._has_begun:
            task.cancel()
        return True

    async def run(self) -> None:
        """Carries the job out and ends the attempt."""
        self._has_begun = True
        log.debug("job.started")
        self._parts.outbox.say_job(self.job)
        end = await self._carry_out()
        self.is_ending = True
        self._parts.on_ending()
        ending = asyncio.ensure_future(self._finish(end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # Cancelled while it ends: what became of it must be stored all the same.
            await asyncio.wait({ending})
            raise

    async def _carry_out(self) -> End:
        """Carries the job out; returns how its attempt is to be ended."""
        context: base.Context | None = None
        has_begun = self.job.resumed or self._may_have_made
        try:
            context = self._context()
            await self._end_recorded_children()
            self._may_start()
            has_begun = True
            outcome = await operations.OPERATIONS[self.job.method].run(context)
        except database.LeaseLost as error:
            return self._give_up(str(error))
        except asyncio.CancelledError:
            if self._stopped is not Stop.CANCEL:
                return self._put_back()
            _uncancel()
            failure: errors.VolumeWorkerError = _cancelled()
        except errors.VolumeWorkerError as error:
            failure = error
        except Exception as error:
            log.exception("job.crashed")
            fault = f"{type(error).__name__} in {self.job.method}; see the log"
            failure = errors.Internal(fault)
        else:
            return self._succeed(outcome)
        match self._stopped:
            # It may fail at what it undoes, or make another error of it.
            case Stop.CANCEL:
                _uncancel()
                failure = _cancelled()
            case Stop.DRAIN | Stop.LEASE_LOST:
                return self._put_back()
        return await self._after_failure(failure, context if has_begun else None)

    async def _after_failure(
        self, failure: errors.VolumeWorkerError, context: base.Context | None
    ) -> End:
        """Undoes what has to be; returns how the attempt is to be ended."""
        if context is None:
            return self._fail(failure, None)
        self._undoing = True
        try:
            await self._undo(failure, context)
        except database.LeaseLost as error:
            return self._give_up(str(error))
        except asyncio.CancelledError:
            return self._put_back()
        return self._fail(failure, context)

    async def _undo(self, failure: errors.VolumeWorkerError, context: base.Context) -> None:
        """Gives back what was acquired; what fails is left to be swept up.

        An operation undoes what it did itself where it fails. What it did before it was cancelled,
        and what an earlier attempt did where this one may not start, is undone here.
        """
        operation = operations.OPERATIONS[self.job.method]
        earlier = operation.undo if self.job.resumed else None
        if isinstance(failure, errors.Cancelled):
            undo = operation.take_back or earlier
            context.on_failure = context.on_cancel
        elif isinstance(failure, errors.WorkerLost | errors.DeadlineExceeded):
            undo = operation.undo
        else:
            return
        if undo is None:
            return
        try:
            await undo(context)
        except errors.VolumeWorkerError as error:
            log.warning("job.undo_failed", code=error.code, error=error.message)
        except database.LeaseLost:
            raise
        except Exception:
            log.exception("job.undo_failed")

    # Before it starts

    def _may_start(self) -> None:
        """Raises what ends a job before its operation begins."""
        job = self.job
        if self._stopped is not None:
            # Before its task had begun: cancelled then, it would have ended without a word.
            raise asyncio.CancelledError
        if job.refusal is not None:
            raise base.refusal(job)
        if job.cancel_requested:
            raise _cancelled()
        if job.attempt > self._parts.max_attempts:
            raise errors.WorkerLost(
                f"the worker was lost in each of {self._parts.max_attempts} attempts"
            )
        if job.overdue and not requests.METHODS[job.method].despite_deadline:
            raise errors.DeadlineExceeded("the deadline had passed before this attempt began")

    async def _end_recorded_children(self) -> None:
        """Ends what the worker that had the job before has left running: it works for nobody."""
        # Ticks since another boot name nothing.
        here = [child for child in self.job.children if child["boot"] == children.boot_id()]
        for child in here:
            if await process.end_recorded(child["pid"], child["started"]):
                log.warning("job.child_ended", pid=child["pid"])

    def _context(self) -> base.Context:
        parts = self._parts
        return base.Context(
            job=self.job,
            args=base.parse(self.job),
            host=parts.host,
            backends=parts.backends,
            store=parts.store,
            remote=parts.remote,
            connectors=parts.connectors,
            lease=parts.lease,
            say_volume=parts.outbox.say_volume,
            progress=self._progress,
            cancel=parts.cancel,
            keep_checkpoint=self._keep_checkpoint,
            on_child=self._keep_child,
            begun=self._begun,
            throttle=self.throttle,
        )

    async def _progress(self, now: resources.Progress) -> None:
        parts = self._parts
        # How far it has come is worth no failure: whether it may go on is for its lease to say.
        with contextlib.suppress(errors.Unreachable):
            parts.outbox.say_job(await jobs.set_progress(parts.store, self.job, now))

    async def _keep_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        # Without it the next attempt begins further back.
        with contextlib.suppress(errors.Unreachable):
            await jobs.set_checkpoint(self._parts.store, self.job, checkpoint)

    async def _keep_child(self, pid: int) -> None:
        started = process.start_time(pid)
        if started is not None:
            self._children.append({"pid": pid, "started": started, "boot": children.boot_id()})
            await jobs.set_children(self._parts.store, self.job, self._children)

    # The end

    async def _finish(self, end: End) -> None:
        try:
            await end
        except database.LeaseLost as error:
            log.warning("job.lease_lost", statement=str(error))
        except Exception:
            # The lease runs out, and the job is taken up again.
            self.is_stored = False
            log.exception("job.end_not_stored")

    async def _give_up(self, statement: str) -> None:
        log.warning("job.lease_lost", statement=statement)

    async def _succeed(self, outcome: base.Outcome) -> None:
        await self._tell_end(
            jobs.Ending(
                self.job,
                JobState.SUCCEEDED,
                result=outcome.result,
                change=outcome.change,
                connection_id=outcome.connection_id,
            )
        )

    async def _tell_end(self, ending: jobs.Ending) -> None:
        ended = await jobs.finish(self._parts.store, ending)
        self.leaves_more = ended.is_more
        if (error := ending.error) is None:
            log.info("job.succeeded")
        else:
            log.warning("job.failed", state=ending.state, code=error.code, error=error.message)
        await self._parts.outbox.tell_end(ended)

    async def _fail(self, error: errors.VolumeWorkerError, context: base.Context | None) -> None:
        job, parts = self.job, self._parts
        if error.transient and job.attempt < parts.max_attempts:
            delay = retry.backoff(job.attempt, base=RETRY_BASE, cap=RETRY_CAP)
            back = await jobs.requeue(parts.store, job, delay=delay, error=error)
            log.warning("job.retried", code=error.code, error=error.message, delay=delay)
            parts.outbox.say_job(back)
            return
        state = _final_state(error)
        change = None if context is None else context.on_failure
        await self._tell_end(jobs.Ending(job, state, error=error, change=change))

    async def _put_back(self) -> None:
        """The attempt was cut short by a drain, or its lease is lost, which the store knows."""
        back = await jobs.requeue(self._parts.store, self.job, delay=0, error=None, counts=False)
        log.info("job.put_back")
        self._parts.outbox.say_job(back)


def _final_state(error: errors.VolumeWorkerError) -> JobState:
    if isinstance(error, errors.Cancelled):
        return JobState.CANCELLED
    is_dead = error.transient or isinstance(error, errors.WorkerLost)
    return JobState.DEAD if is_dead else JobState.FAILED


def _cancelled() -> errors.Cancelled:
    return errors.Cancelled("the job was cancelled")


def _uncancel() -> None:
    """Lets the task go on after a cancellation; else a timeout in it could not tell its own."""
    task = asyncio.current_task()
    assert task is not None
    while task.cancelling():
        task.uncancel()
