"""What the job machine reads in the database, and what is always true of it."""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from messages import resources
from messages.resources import JobState
from tests.integration import machine_bench, machine_jobs
from worker.store.acceptance import LockMode
from worker.store.jobs import Slot

Row = Mapping[str, Any]

_ROWS = """
SELECT jsonb_build_object(
    'jobs', (SELECT coalesce(jsonb_agg(to_jsonb(jobs) || jsonb_build_object(
            'is_due', state = 'queued' AND run_at <= now(),
            'is_expired', state = 'running' AND lease_until < now()) ORDER BY seq), '[]')
        FROM jobs),
    'locks', (SELECT coalesce(jsonb_agg(to_jsonb(job_locks) ORDER BY seq, volume_id), '[]')
        FROM job_locks),
    'outbox', (SELECT coalesce(jsonb_agg(to_jsonb(outbox) ORDER BY id), '[]') FROM outbox))
"""
_UNSEEN = frozenset(
    {
        # What no reader of a job is shown, or what a change of has no bearing on what is.
        "version",
        "owner",
        "lease_token",
        "lease_until",
        "is_expired",
        "is_due",
        "run_at",
        "children",
        "reply_to",
        "correlation_id",
        "deadline",
        "status_updates",
        "cancel_requested",
        "slot",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """All jobs in the order of acceptance, their locks and the outbox."""

    jobs: Sequence[Row]
    locks: Sequence[Row]
    outbox: Sequence[Row]

    @property
    def by_id(self) -> dict[str, Row]:
        return {row["id"]: row for row in self.jobs}


def read(ground: machine_bench.Ground) -> Rows:
    """What is stored now."""
    return Rows(**ground.document(_ROWS))


def check_alone(rows: Rows, limits: Mapping[Slot, int]) -> None:
    """What holds of any rows, whatever has led to them; ``limits`` are each worker's slots."""
    unfinished = set()
    for row in rows.jobs:
        is_running = row["state"] == JobState.RUNNING
        has_ended = row["state"] in resources.ENDED
        assert row["attempt"] >= 0, row
        assert (row["finished_at"] is not None) == has_ended, row
        assert (row["owner"] is not None) == (row["lease_until"] is not None) == is_running, row
        assert (row["error"] is None) or row["first_failed_at"] is not None, row
        assert is_running or row["children"] == [], row
        if not has_ended and row["refusal"] is None:
            unfinished.add(row["id"])
    locking = {lock["job_id"] for lock in rows.locks}
    assert locking <= unfinished, "only what has not ended, and was not refused, has locks"
    assert {one for one in unfinished if rows.by_id[one]["volume_ids"]} == locking
    _check_held(rows)
    _check_slots(rows, limits)


def _check_held(rows: Rows) -> None:
    """Nobody has a volume beside another who needs it alone, but a child beside its parent."""
    held = [lock for lock in rows.locks if lock["held"]]
    for lock in held:
        assert rows.by_id[lock["job_id"]]["state"] == JobState.RUNNING, lock
    for one in held:
        for other in held:
            is_family = other["parent_job"] == one["job_id"] or one["parent_job"] == other["job_id"]
            if one is other or one["volume_id"] != other["volume_id"] or is_family:
                continue
            modes = LockMode(one["mode"]), LockMode(other["mode"])
            assert not machine_jobs.conflict(*modes), (one, other)


def _check_slots(rows: Rows, limits: Mapping[Slot, int]) -> None:
    taken = [
        (row["owner"], row["slot"])
        for row in rows.jobs
        if row["state"] == JobState.RUNNING and row["refusal"] is None
    ]
    for owner, slot in taken:
        if slot != Slot.WAITING:
            assert taken.count((owner, slot)) <= limits[Slot(slot)], taken


def check_step(before: Rows, after: Rows) -> None:
    """What holds of any step."""
    old = before.by_id
    newest = max((row["lease_token"] or 0 for row in before.jobs), default=0)
    for row in after.jobs:
        was = old.get(row["id"])
        if was is None:
            continue
        if _seen(row) != _seen(was):
            assert row["version"] > was["version"], (was, row)
        assert row["version"] >= was["version"], (was, row)
        if row["lease_token"] != was["lease_token"]:
            assert row["lease_token"] > newest, "a token that an earlier lease may have had"
        if was["state"] in resources.ENDED:
            _check_ended(was, row)
        assert row["endings"] >= was["endings"], (was, row)


def _check_ended(was: Row, row: Row) -> None:
    if row["state"] == was["state"]:
        assert _seen(row) == _seen(was), "what has ended changed"
        return
    # Only a replay takes it back, behind all others.
    assert was["state"] in {JobState.DEAD, JobState.FAILED}, (was, row)
    assert row["state"] == JobState.QUEUED, (was, row)
    assert row["history"]["replays"] == was["endings"], (was, row)
    assert row["seq"] > was["seq"], (was, row)


def _seen(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _UNSEEN}


def check_model(
    rows: Rows, model: machine_jobs.Model, told: Mapping[int, tuple[uuid.UUID, bool]]
) -> None:
    """That the rows are what the model says; ``told``: the outbox, each a job and whether only
    its reply."""
    assert [row["id"] for row in rows.jobs] == [str(job.id) for job in model.in_order()]
    for row, job in zip(rows.jobs, model.in_order(), strict=True):
        refusal = None if row["refusal"] is None else row["refusal"]["code"]
        assert _stored(row) == _expected(job), (row, job)
        assert refusal == job.refusal, (row, job)
        assert (row["history"] or {"attempts": 0})["attempts"] == job.earlier, (row, job)
    assert sorted(
        (lock["job_id"], lock["volume_id"], lock["mode"], lock["held"]) for lock in rows.locks
    ) == sorted(
        (str(job.id), str(need.volume_id), str(need.mode), job.holds)
        for job in model.unfinished()
        if job.is_locking
        for need in job.needs
    )
    assert {row["id"]: (row["job_id"], row["reply_only"]) for row in rows.outbox} == {
        outbox_id: (str(job_id), reply_only) for outbox_id, (job_id, reply_only) in told.items()
    }


def _stored(row: Row) -> dict[str, object]:
    return {
        "state": row["state"],
        "attempt": row["attempt"],
        "owner": row["owner"],
        "slot": row["slot"],
        "due": row["is_due"],
        "expired": row["is_expired"],
        "endings": row["endings"],
        "cancelled": row["cancel_requested"],
        "begun": row["started_at"] is not None,
        "resumed": row["resumed"],
    }


def _expected(job: machine_jobs.Job) -> dict[str, object]:
    return {
        "state": job.state,
        "attempt": job.attempt,
        "owner": None if job.owner is None else str(job.owner),
        "slot": job.slot,
        "due": job.state is JobState.QUEUED and job.is_due,
        "expired": job.is_expired,
        "endings": job.endings,
        "cancelled": job.is_cancelled,
        "begun": job.has_begun,
        "resumed": job.is_resumed,
    }
