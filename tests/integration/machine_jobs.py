"""Jobs as the contract has them, without a database: what the job machine compares with."""

import dataclasses
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence

from messages import resources
from messages.resources import JobState
from worker.store import jobs
from worker.store.acceptance import LockMode
from worker.store.jobs import Slot

CLEANUPS = ("terminate_connection",)
"""Methods that a parent's cancelling leaves alone."""
CHANGING = ("initialize_connection",)
"""Methods of the machine's that stand in the way of a replay once they have succeeded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """How a job needs a volume, and whether that has to exist."""

    volume_id: uuid.UUID
    mode: LockMode
    known: bool


@dataclasses.dataclass(slots=True)
class Job:
    """A job as it should be stored."""

    id: uuid.UUID
    order: int
    """Its place in the order of acceptance."""
    address: str
    method: str
    slot: Slot
    own_slot: Slot
    needs: Sequence[Need]
    parent: uuid.UUID | None
    state: JobState = JobState.QUEUED
    attempt: int = 0
    owner: uuid.UUID | None = None
    is_locking: bool = True
    """Whether it claims its volumes."""
    is_due: bool = True
    is_expired: bool = False
    has_begun: bool = False
    is_resumed: bool = False
    is_cancelled: bool = False
    refusal: str | None = None
    endings: int = 0
    earlier: int = 0
    """Attempts before its last replay."""
    ended_at: int = 0
    """Its place in the order of endings."""

    @property
    def has_ended(self) -> bool:
        return self.state in resources.ENDED

    @property
    def holds(self) -> bool:
        """Whether its volumes are its own now."""
        return self.is_locking and self.state is JobState.RUNNING


def conflict(one: LockMode, other: LockMode) -> bool:
    """Whether two jobs cannot have a volume at the same time."""
    modes = {one, other}
    return LockMode.EXCLUSIVE in modes or modes == {LockMode.CONTROL}


class Model:
    """All jobs.

    Args:
        volumes: those that exist.
    """

    def __init__(self, volumes: Collection[uuid.UUID]) -> None:
        self.volumes = set(volumes)
        self.jobs: dict[uuid.UUID, Job] = {}
        self._orders = 0
        self._ends = 0

    def in_order(self) -> list[Job]:
        """All jobs in the order of acceptance."""
        return sorted(self.jobs.values(), key=lambda job: job.order)

    def where(self, *states: JobState) -> list[Job]:
        """Those in some states, in the order of acceptance."""
        return [job for job in self.in_order() if job.state in states]

    def unfinished(self) -> list[Job]:
        """Those that have not ended."""
        return self.where(JobState.QUEUED, JobState.RUNNING)

    def next_order(self) -> int:
        """The place behind all others."""
        self._orders += 1
        return self._orders

    # Acceptance

    def refusal(
        self, job_id: uuid.UUID, parent: uuid.UUID | None, needs: Iterable[Need]
    ) -> str | None:
        """What a job is refused with at once, or None."""
        codes = [self._refusal(job_id, parent, need) for need in needs]
        return next((code for code in codes if code is not None), None)

    def _refusal(self, job_id: uuid.UUID, parent: uuid.UUID | None, need: Need) -> str | None:
        if parent is not None:
            works_for = self.jobs.get(parent)
            volumes = [] if works_for is None else [one.volume_id for one in works_for.needs]
            if works_for is None or not works_for.holds or need.volume_id not in volumes:
                return "InvalidRequest"
        if need.volume_id in self.volumes:
            return None if need.known else "VolumeExists"
        # One that waits for its create is let in.
        is_awaited = any(
            job.id != job_id
            and job.is_locking
            and not job.has_ended
            and any(
                other.volume_id == need.volume_id and other.mode is LockMode.EXCLUSIVE
                for other in job.needs
            )
            for job in self.jobs.values()
        )
        return "VolumeNotFound" if need.known and not is_awaited else None

    def accept(self, job: Job, owner: uuid.UUID, free: dict[Slot, int]) -> None:
        """Stores a new job; it starts where it can, within the free slots, which shrink."""
        job.refusal = self.refusal(job.id, job.parent, job.needs)
        job.is_locking = job.refusal is None
        self.jobs[job.id] = job
        if not job.is_locking:
            self._start(job, owner)
        elif has_slot(job.slot, free) and not self.must_wait(job):
            self._start(job, owner)
            take_slot(job.slot, free)

    # Turns

    def must_wait(self, job: Job) -> bool:
        """Whether another job that needs one of its volumes goes first."""
        works_for = self.jobs.get(job.parent) if job.parent is not None else None
        if works_for is not None and works_for.has_ended:
            works_for = None
        return job.is_locking and any(
            self._goes_first(other, job, works_for) for other in self.unfinished()
        )

    def _goes_first(self, other: Job, job: Job, works_for: Job | None) -> bool:
        if other is job or other is works_for or not conflicting(other, job):
            return False
        if other.holds:
            return True
        is_sibling = works_for is not None and other.parent == works_for.id
        return other.order < job.order and (works_for is None or is_sibling)

    def can_claim(self, job: Job, addresses: Collection[str], free: Mapping[Slot, int]) -> bool:
        """Whether a worker with these addresses and free slots may take it now."""
        if job.address not in addresses or not has_slot(job.slot, free):
            return False
        match job.state:
            case JobState.QUEUED:
                return job.is_due and not self.must_wait(job)
            case JobState.RUNNING:
                return job.is_expired
            case _:
                return False

    def claim(self, job: Job, owner: uuid.UUID, free: dict[Slot, int]) -> None:
        """A worker takes it, and with it a slot."""
        take_slot(job.slot, free)
        self._start(job, owner)

    def _start(self, job: Job, owner: uuid.UUID) -> None:
        job.state, job.owner, job.is_expired = JobState.RUNNING, owner, False
        job.attempt += 1
        job.is_resumed, job.has_begun = job.has_begun, True

    # The rest of its life

    def finish(self, job: Job, state: JobState) -> None:
        """It ends."""
        self._ends += 1
        job.state, job.owner, job.is_expired, job.ended_at = state, None, False, self._ends
        job.is_locking = False
        job.endings += 1

    def requeue(self, job: Job, *, is_due: bool, counts: bool) -> None:
        """It is put back; what was no attempt cannot be taken off."""
        job.state, job.owner, job.is_expired = JobState.QUEUED, None, False
        job.is_due = is_due or job.is_cancelled
        job.attempt -= not counts and job.attempt > 0

    def cancel(self, job: Job, owner: uuid.UUID) -> list[Job]:
        """Somebody wants it cancelled; returns those that are the canceller's to end."""
        mine = []
        for one in self.unfinished():
            if one is not job and (one.parent != job.id or one.method in CLEANUPS):
                continue
            one.is_cancelled, one.slot = True, Slot.WAITING
            if one.state is JobState.QUEUED and not one.has_begun:
                one.state, one.owner = JobState.RUNNING, owner
                one.refusal, one.is_locking = "Cancelled", False
                mine.append(one)
            else:
                one.is_due = True
        return mine

    def revival(self, job: Job, ending: int) -> str:
        """What becomes of a job that is to be revived."""
        if job.endings != ending or job.state not in {JobState.DEAD, JobState.FAILED}:
            return "stale"
        parent = self.jobs.get(job.parent) if job.parent is not None else None
        is_alive = parent is not None and not parent.has_ended
        if job.parent is not None and not is_alive and job.method not in CLEANUPS:
            return "orphaned"
        for need in job.needs:
            if self.refusal(job.id, job.parent if is_alive else None, [need]) is not None:
                return "refused"
            if need.mode is LockMode.EXCLUSIVE and self._has_changed(job, need.volume_id):
                return "overtaken"
        return "revived"

    def _has_changed(self, since: Job, volume_id: uuid.UUID) -> bool:
        return any(
            job.state is JobState.SUCCEEDED
            and job.order > since.order
            and job.parent != since.id
            and job.method in CHANGING
            and volume_id in [need.volume_id for need in job.needs]
            for job in self.jobs.values()
        )

    def revive(self, job: Job) -> None:
        """It goes back behind all others."""
        job.state, job.order, job.slot = JobState.QUEUED, self.next_order(), job.own_slot
        job.earlier += job.attempt
        job.attempt = 0
        job.is_locking = job.is_due = True
        job.has_begun = job.is_cancelled = False
        job.refusal = None


def conflicting(one: Job, other: Job) -> bool:
    """Whether two jobs claim a volume that they cannot have at the same time."""
    return (
        one.is_locking
        and other.is_locking
        and any(
            mine.volume_id == its.volume_id and conflict(mine.mode, its.mode)
            for mine in one.needs
            for its in other.needs
        )
    )


def has_slot(slot: jobs.Slot, free: Mapping[Slot, int]) -> bool:
    """Whether there is room for a job of a class."""
    return slot is Slot.WAITING or free[slot] > 0


def take_slot(slot: jobs.Slot, free: dict[Slot, int]) -> None:
    """One place less."""
    if slot in free:
        free[slot] -= 1
