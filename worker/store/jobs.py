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
    WAITING = "waiting"
    """For the end of another job; of these there may be any number."""


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
    resumed: bool
    cancel_requested: bool
    throttle: Mapping[str, Any] | None
    """``bytes_per_second`` (None for no limit), where somebody has said so after it was sent."""
    checkpoint: Mapping[str, Any] | None
    """How far a copy has safely come, and of which source."""
    children: Sequence[Mapping[str, Any]]
    refusal: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    progress: Mapping[str, Any] | None
    connection_id: uuid.UUID | None
    edited: bool
    endings: int
    history: Mapping[str, Any] | None
    """Before the last replay: how many ``replays``, ``attempts`` in all, the newest ``lives``."""
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
        return {
            "id": str(self.id),
            "method": self.method,
            "address": self.address,
            "state": self.state,
            "attempt": self.attempt,
            "args": redaction.mask_tree(self.args),
            "result": self.result,
            "error": self.error,
            "progress": self.progress,
            "parent_job": None if self.parent_job is None else str(self.parent_job),
            "edited": self.edited,
            **{name: resources.rfc3339(getattr(self, name)) for name in _SHOWN_TIMES},
        }


_SHOWN_TIMES = ("created_at", "started_at", "finished_at")
_TIMES = ("deadline", "first_failed_at", "created_at", "started_at", "finished_at")


def from_row(row: Mapping[str, Any]) -> Job:
    """A job from its row."""
    values = {name: row[name] for name in _COLUMNS}
    values["slot"] = Slot(values["slot"])
    values["state"] = resources.JobState(values["state"])
    return Job(**values)


_COLUMNS = tuple(field.name for field in dataclasses.fields(Job))


def from_json(row: Mapping[str, Any], body: bytes) -> Job:
    """A job from its row as JSON, in which ids and times are text."""
    values: dict[str, Any] = {**row, "body": body}
    for name in ("id", "owner", "parent_job", "connection_id"):
        values[name] = uuid.UUID(row[name]) if row[name] else None
    for name in _TIMES:
        values[name] = datetime.datetime.fromisoformat(row[name]) if row[name] else None
    return from_row(values)


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


async def cancel(
    store: database.Database,
    job_id: uuid.UUID,
    *,
    owner: uuid.UUID,
    lease: float,
    cleanups: Collection[str],
) -> list[Job]:
    """Asks for a job to be cancelled, and with it the jobs that it called for elsewhere.

    ``cleanups`` are methods that a parent's cancelling leaves alone. Returns the jobs that have
    never begun: they are the caller's, under a lease of seconds, to be ended.
    """
    rows = await store.fetch("cancel_job", job_id, owner, lease, list(cleanups))
    return [from_row(row) for row in rows]


async def to_cancel(store: database.Database, owner: uuid.UUID) -> set[uuid.UUID]:
    """The running jobs of a worker that somebody wants to be cancelled."""
    return {row["id"] for row in await store.fetch("jobs_to_cancel", owner)}


async def throttle(
    store: database.Database,
    job_id: uuid.UUID,
    bytes_per_second: int | None,
    *,
    methods: Collection[str],
) -> Job | None:
    """Says how fast a job may go, in bytes a second, None for as fast as it goes.

    Returns the job; None where there is none that has not ended, or not of these ``methods``.
    """
    said = {"bytes_per_second": bytes_per_second}
    row = await store.row("throttle_job", job_id, said, list(methods))
    return None if row is None else from_row(row)


async def throttled(
    store: database.Database, owner: uuid.UUID
) -> Mapping[uuid.UUID, Mapping[str, Any]]:
    """The running jobs of a worker of which somebody has said how fast they may go, with that."""
    return {row["id"]: row["throttle"] for row in await store.fetch("throttled_jobs", owner)}


async def ended(store: database.Database, ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
    """Which of some jobs have ended."""
    return {row["id"] for row in await store.fetch("ended_jobs", list(ids))}


async def queued_connects(
    store: database.Database, volume_id: uuid.UUID, before: uuid.UUID
) -> list[Job]:
    """Jobs that wait to connect a volume and were accepted before the job ``before``."""
    return [from_row(row) for row in await store.fetch("queued_connects", volume_id, before)]


async def set_children(
    store: database.Database, job: Job, children: Sequence[Mapping[str, Any]]
) -> None:
    """Keeps which processes work for a job, each with ``pid``, ``started`` and ``boot``.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    await store.own("set_children", job.id, job.lease_token, list(children))


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
    is_more: bool = True
    """Whether jobs wait for their turn at its address, or have just been let go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a job is to end. Without ``result``, one that succeeded has its volume's record, as
    changed, for result."""

    job: Job
    state: resources.JobState
    result: Mapping[str, Any] | None = None
    error: errors.VolumeWorkerError | None = None
    change: VolumeChange | None = None
    connection_id: uuid.UUID | None = None
    """The connection whose secrets belong into the result."""

    @property
    def subjects(self) -> Collection[uuid.UUID]:
        """What no other ending of one statement may have.

        The volume that it changes, where that is known here. Where the statement finds it, only a
        job and those that it calls for have it in common.
        """
        changed = None if self.change is None else self.change.id
        return {one for one in (changed, self.job.id, self.job.parent_job) if one is not None}


async def finish(store: database.Database, ending: Ending) -> Ended:
    """Ends a job: its state, its volume, its reply and events, in one statement.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    ended = await store.together(_finish_all, ending, keys=lambda one: one.subjects)
    if ended is None:
        raise database.LeaseLost("finish_jobs")
    return ended


async def _finish_all(
    store: database.Database, endings: Sequence[Ending]
) -> Sequence[Ended | None]:
    rows = await store.fetch(
        "finish_jobs",
        [one.job.id for one in endings],
        [one.job.lease_token for one in endings],
        [one.state for one in endings],
        [one.result for one in endings],
        [
            None if one.error is None else redaction.mask_tree(one.error.to_wire())
            for one in endings
        ],
        [one.connection_id for one in endings],
        [None if one.change is None else one.change.to_json() for one in endings],
        [one.result is None and one.error is None for one in endings],
        list({one.job.address for one in endings}),
    )
    found = {row["id"]: row for row in rows}
    return [_ended(one.job, found.get(one.job.id)) for one in endings]


def _ended(job: Job, row: database.Row | None) -> Ended | None:
    if row is None:
        return None
    values = {name: row[name] for name in _SET_AT_THE_END}
    values["state"] = resources.JobState(values["state"])
    event = row["event"]
    if event is not None and event["volume"] is None:
        event["volume"] = row["result"]
    ended = dataclasses.replace(job, owner=None, children=(), **values)
    return Ended(ended, row["outbox_id"], event, row["is_more"])


_SET_AT_THE_END = (
    *("state", "result", "error", "progress", "connection_id", "endings", "version"),
    *("first_failed_at", "finished_at"),
    # By a repeat of the request while it ran.
    *("deadline", "reply_to", "correlation_id", "status_updates"),
)


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


async def set_checkpoint(store: database.Database, job: Job, checkpoint: Mapping[str, Any]) -> None:
    """Keeps how far a copy has safely come, for its next attempt.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    await store.own("set_checkpoint", job.id, job.lease_token, dict(checkpoint))


async def get(store: database.Database, job_id: uuid.UUID) -> Job:
    """One job.

    Raises:
        JobNotFound: there is none.
    """
    row = await store.row("get_job", job_id)
    if row is None:
        raise errors.JobNotFound(
            f"there is no job {job_id}; a request that its worker has not taken yet is none"
        )
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
