"""Jobs: accepted, claimed, renewed, ended."""

import dataclasses
import datetime
import enum
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from messages import errors, redaction, resources
from worker.store import database


class Slot(enum.StrEnum):
    """What a job takes a place of while it runs."""

    CONTROL = "control"
    """Short work; copies can never fill these."""
    DATA = "data"
    """Moving bytes."""


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
class NewJob:
    """A request about to be accepted."""

    id: uuid.UUID
    method: str
    address: str
    slot: Slot
    body: bytes
    properties: Mapping[str, Any]
    fingerprint: bytes
    deadline: datetime.datetime | None
    reply_to: str | None
    correlation_id: str
    status_updates: bool
    parent_job: uuid.UUID | None
    needs: Sequence[Need]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job as stored."""

    id: uuid.UUID
    method: str
    address: str
    slot: Slot
    state: resources.JobState
    attempt: int
    body: bytes
    properties: Mapping[str, Any]
    owner: uuid.UUID | None
    lease_token: int
    deadline: datetime.datetime | None
    reply_to: str | None
    correlation_id: str
    status_updates: bool
    parent_job: uuid.UUID | None
    overdue: bool
    refusal: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    progress: Mapping[str, Any] | None
    connection_id: uuid.UUID | None
    edited: bool
    endings: int
    first_failed_at: datetime.datetime | None
    created_at: datetime.datetime
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    version: int

    @property
    def args(self) -> Mapping[str, Any]:
        """The arguments as they were sent."""
        args: Mapping[str, Any] = json.loads(self.body)["args"]
        return args

    def to_wire(self) -> dict[str, Any]:
        """The Job record of the contract, its secrets masked."""
        record = resources.Job(
            args=redaction.mask_tree(self.args),
            progress=None if self.progress is None else resources.Progress(**self.progress),
            **{name: getattr(self, name) for name in _SHOWN},
        )
        return record.to_wire()


_SHOWN = (
    "id",
    "method",
    "address",
    "state",
    "attempt",
    "result",
    "error",
    "parent_job",
    "edited",
    "created_at",
    "started_at",
    "finished_at",
)
_TIMES = ("deadline", "first_failed_at", "created_at", "started_at", "finished_at")


def from_row(row: Mapping[str, Any]) -> Job:
    """A job from its row."""
    values = {field.name: row[field.name] for field in dataclasses.fields(Job)}
    values["slot"] = Slot(row["slot"])
    values["state"] = resources.JobState(row["state"])
    return Job(**values)


def from_json(row: Mapping[str, Any], body: bytes) -> Job:
    """A job from its row as JSON, in which ids and times are text."""
    values: dict[str, Any] = {**row, "body": body}
    for name in ("id", "owner", "parent_job", "connection_id"):
        values[name] = uuid.UUID(row[name]) if row[name] else None
    for name in _TIMES:
        values[name] = datetime.datetime.fromisoformat(row[name]) if row[name] else None
    return from_row(values)


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
    job: Job
    outbox_id: int | None


async def accept(
    store: database.Database,
    new: Sequence[NewJob],
    *,
    owner: uuid.UUID,
    lease: float,
    free: Mapping[Slot, int],
) -> list[Accepted]:
    """Stores requests in order; ``lease`` is in seconds, ``free`` the slots to start jobs in."""
    rows = await store.fetch(
        "accept_jobs",
        owner,
        lease,
        free[Slot.CONTROL],
        free[Slot.DATA],
        [job.id for job in new],
        [job.method for job in new],
        [job.address for job in new],
        [job.slot for job in new],
        [job.body for job in new],
        [dict(job.properties) for job in new],
        [job.fingerprint for job in new],
        [job.deadline for job in new],
        [job.reply_to for job in new],
        [job.correlation_id for job in new],
        [job.status_updates for job in new],
        [job.parent_job for job in new],
        [[need.to_json() for need in job.needs] for job in new],
    )
    return [
        Accepted(Verdict(row["verdict"]), from_row(row["job"]), row["outbox_id"]) for row in rows
    ]


async def claim(
    store: database.Database,
    *,
    owner: uuid.UUID,
    lease: float,
    free: Mapping[Slot, int],
    addresses: Sequence[str],
) -> list[Job]:
    """Takes jobs whose turn it is, within the free slots, each under a lease of seconds."""
    rows = await store.fetch(
        "claim_jobs", owner, lease, free[Slot.CONTROL], free[Slot.DATA], addresses
    )
    return [from_row(row) for row in rows]


async def renew(store: database.Database, held: Sequence[Job], *, lease: float) -> set[uuid.UUID]:
    """Keeps leases for ``lease`` seconds more; returns the jobs that are still held."""
    ids = [job.id for job in held]
    tokens = [job.lease_token for job in held]
    return {row["id"] for row in await store.fetch("renew_leases", lease, ids, tokens)}


@dataclasses.dataclass(frozen=True, slots=True)
class VolumeChange:
    """What becomes of a volume when its job ends: the columns to set, or that its record goes."""

    id: uuid.UUID
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drop: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the query reads it."""
        return {"id": str(self.id), **self.columns, **({"drop": True} if self.drop else {})}


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended, and what has to be told of it."""

    job: Job
    outbox_id: int
    event: Mapping[str, Any] | None
    """The body of the volume's event."""


async def finish(
    store: database.Database,
    job: Job,
    *,
    state: resources.JobState,
    result: Mapping[str, Any] | None = None,
    error: errors.VolumeWorkerError | None = None,
    change: VolumeChange | None = None,
    connection_id: uuid.UUID | None = None,
    owner: uuid.UUID,
) -> Ended:
    """Ends a job: its state, its volume, its reply and events, in one statement.

    Without ``result``, a job that succeeded has its volume's record, as changed, for result.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.own(
        "finish_job",
        job.id,
        job.lease_token,
        state,
        result,
        None if error is None else redaction.mask_tree(error.to_wire()),
        connection_id,
        owner,
        None if change is None else change.to_json(),
        result is None and error is None,
    )
    return Ended(from_row(row), row["outbox_id"], row["event"])


async def requeue(
    store: database.Database,
    job: Job,
    *,
    delay: float,
    error: errors.VolumeWorkerError | None,
    counts: bool = True,
) -> Job:
    """Puts a job back, to be run again after ``delay`` seconds.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    wire = None if error is None else redaction.mask_tree(error.to_wire())
    return from_row(await store.own("requeue_job", job.id, job.lease_token, delay, wire, counts))


async def set_progress(store: database.Database, job: Job, progress: resources.Progress) -> Job:
    """Keeps how far a job has come.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    return from_row(await store.own("set_progress", job.id, job.lease_token, progress.to_wire()))


async def get(store: database.Database, job_id: uuid.UUID) -> Job:
    """One job.

    Raises:
        JobNotFound: there is none.
    """
    row = await store.row("get_job", job_id)
    if row is None:
        raise errors.JobNotFound(f"there is no job {job_id}")
    return from_row(row)


async def prune(store: database.Database, *, retention: float, limit: int) -> int:
    """Forgets jobs that ended ``retention`` seconds ago; returns how many."""
    return len(await store.fetch("prune_jobs", retention, limit))


async def list_(
    store: database.Database,
    *,
    address: str | None,
    state: str | None,
    volume_id: uuid.UUID | None,
    after: uuid.UUID | None,
    limit: int,
) -> list[Job]:
    """Jobs in the order of acceptance."""
    return [
        from_row(row)
        for row in await store.fetch("list_jobs", address, state, volume_id, after, limit)
    ]
