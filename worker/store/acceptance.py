"""Requests on their way to being jobs: what they need, and how they are stored."""

import dataclasses
import datetime
import enum
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from messages import resources
from worker.store import database, jobs


class LockMode(enum.StrEnum):
    """How a job needs a volume."""

    EXCLUSIVE = "x"
    CONTROL = "c"
    """One at a time, beside readers."""
    READ = "r"


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What a job needs of one volume, and what it is refused at once for."""

    volume_id: uuid.UUID
    mode: LockMode
    known: bool = True
    """The volume must exist; else it must not."""
    at_home: bool = True
    """The volume must live at the address that the request was sent to."""
    idle: bool = False
    """No connection and no attachment."""
    statuses: Collection[resources.VolumeStatus] | None = None

    def to_json(self) -> dict[str, Any]:
        """As the SQL function ``refusal`` reads it."""
        return {
            "volume_id": str(self.volume_id),
            "mode": self.mode,
            "known": self.known,
            "at": self.at_home,
            "idle": self.idle,
            "statuses": None if self.statuses is None else sorted(self.statuses),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class NewVolume:
    """A volume that a job is to create."""

    id: uuid.UUID
    name: str
    size_bytes: int
    metadata: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """As the SQL function ``accept_jobs`` reads it."""
        return {
            "id": str(self.id),
            "name": self.name,
            "size_bytes": self.size_bytes,
            "metadata": dict(self.metadata),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class NewJob:
    """A request about to be accepted."""

    id: uuid.UUID
    method: str
    address: str
    slot: jobs.Slot
    body: bytes
    properties: Mapping[str, Any]
    fingerprint: bytes
    deadline: datetime.datetime | None
    reply_to: str | None
    correlation_id: str
    status_updates: bool
    parent_job: uuid.UUID | None
    needs: Sequence[Need]
    creates: NewVolume | None = None
    """The volume whose record is made with the job, where that starts at once."""


class Verdict(enum.StrEnum):
    """What became of a request when it was stored."""

    RUNNING = "running"
    """Stored and to be run now: the lease is the worker's already."""
    QUEUED = "queued"
    REPEATED = "repeated"
    """The same job, unfinished: its result goes to the newest caller."""
    FINISHED = "finished"
    """The same job, ended: the stored result is in the outbox once more."""
    REUSED = "reused"
    """Another job has that id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A request that was stored."""

    verdict: Verdict
    job: jobs.Job
    outbox_id: int | None
    begun: Mapping[str, Any] | None
    """The row of the volume that it is to create, where that was made already."""


async def accept(
    store: database.Database,
    new: Sequence[NewJob],
    *,
    owner: uuid.UUID,
    lease: float,
    free: Mapping[jobs.Slot, int],
) -> list[Accepted]:
    """Stores requests in order; ``lease`` is in seconds, ``free`` the slots to start jobs in."""
    rows = await store.fetch(
        "accept_jobs",
        owner,
        lease,
        free[jobs.Slot.CONTROL],
        free[jobs.Slot.DATA],
        [job.id for job in new],
        [job.method for job in new],
        [job.address for job in new],
        [job.slot for job in new],
        [job.body for job in new],
        [dict(job.properties) for job in new],
        [job.fingerprint for job in new],
        [_storable(job.deadline) for job in new],
        [job.reply_to for job in new],
        [job.correlation_id for job in new],
        [job.status_updates for job in new],
        [job.parent_job for job in new],
        [[need.to_json() for need in job.needs] for job in new],
        [None if job.creates is None else job.creates.to_json() for job in new],
    )
    return [
        Accepted(Verdict(row["verdict"]), jobs.from_row(row["job"]), row["outbox_id"], row["begun"])
        for row in rows
    ]


_ONE_TICK = datetime.timedelta(microseconds=1)
_FIRST = datetime.datetime.min.replace(tzinfo=datetime.UTC) + _ONE_TICK
_LAST = datetime.datetime.max.replace(tzinfo=datetime.UTC) - _ONE_TICK


def _storable(moment: datetime.datetime | None) -> datetime.datetime | None:
    """The moment, but for the very first and the very last.

    asyncpg takes these for infinity, and gives them back without a zone.
    """
    return None if moment is None else min(max(moment, _FIRST), _LAST)
