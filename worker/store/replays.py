"""Replays: dead jobs taken back to be run again, and the lock of the operator who does it."""

import dataclasses
import datetime
import enum
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from worker.store import acceptance, database, jobs


class Outcome(enum.StrEnum):
    """What became of a job that was to be revived."""

    REVIVED = "revived"
    STALE = "stale"
    """It has been revived since it ended so; ``why`` has its ``state``."""
    REFUSED = "refused"
    """``why`` is what a new request would be refused with, as in a job's ``refusal``."""
    OVERTAKEN = "overtaken"
    """A later job has changed its volume: ``why`` has ``volume_id``, ``job_id``, ``method``."""
    ORPHANED = "orphaned"
    """The job that it worked for has ended: ``why`` has its ``job_id``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Revival:
    """What became of a job that was to be revived, and why."""

    outcome: Outcome
    why: Mapping[str, Any]


async def revive(
    store: database.Database,
    job: jobs.Job,
    *,
    ending: int,
    body: bytes | None,
    slot: jobs.Slot,
    needs: Sequence[acceptance.Need],
    dry_run: bool,
) -> Revival:
    """Takes a job that has ended back to be run again, behind all that was accepted since.

    Args:
        ending: which of the job's endings it is to come back from; a later one stands.
        body: the request as edited; None to leave it.
        dry_run: only finds out what would become of it.
    """
    checks = [need.to_json() for need in needs]
    row = await store.own("revive_job", job.id, ending, body, slot, checks, dry_run)
    return Revival(Outcome(row["outcome"]), row["why"] or {})


async def fingerprint(store: database.Database, job_id: uuid.UUID) -> bytes | None:
    """What a repeat of a job's request must have; None where there is no such job."""
    row = await store.row("get_fingerprint", job_id)
    return None if row is None else bytes(row["fingerprint"])


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an operator's lock, for people, and until when if they do not go on."""

    who: str
    until: datetime.datetime


async def take_lock(
    store: database.Database, name: str, holder: uuid.UUID, *, who: str, lease: float
) -> Holder | None:
    """Takes a lock for ``lease`` seconds; returns who has it where it is not free."""
    while True:
        if await store.row("take_operator_lock", name, holder, who, lease) is not None:
            return None
        row = await store.row("get_operator_lock", name)
        if row is not None:
            return Holder(row["who"], row["until"])
        # It was given back in between.


async def keep_lock(
    store: database.Database, name: str, holder: uuid.UUID, *, lease: float
) -> bool:
    """Holds a lock for ``lease`` seconds more; whether it is the holder's still."""
    return await store.row("keep_operator_lock", name, holder, lease) is not None


async def drop_lock(store: database.Database, name: str, holder: uuid.UUID) -> None:
    """Gives a lock back."""
    await store.fetch("drop_operator_lock", name, holder)
