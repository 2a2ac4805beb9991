"""What the volume machine reads in the database, and what is always true of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from messages import resources
from messages.resources import AttachStatus, VolumeStatus
from tests.integration import machine_bench, machine_volumes
from worker.store import reconciliation

Row = Mapping[str, Any]

_ROWS = """
SELECT jsonb_build_object(
    'volumes', (SELECT coalesce(jsonb_agg(to_jsonb(volumes) ORDER BY id), '[]') FROM volumes),
    'attachments', (SELECT coalesce(jsonb_agg(to_jsonb(attachments) ORDER BY id), '[]')
        FROM attachments),
    'connections', (SELECT coalesce(jsonb_agg(to_jsonb(connections) ORDER BY id), '[]')
        FROM connections),
    'jobs', (SELECT coalesce(jsonb_agg(to_jsonb(jobs) ORDER BY seq), '[]') FROM jobs),
    'locks', (SELECT coalesce(jsonb_agg(to_jsonb(job_locks)), '[]') FROM job_locks))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """All volumes with what hangs on them, and all jobs."""

    volumes: Sequence[Row]
    attachments: Sequence[Row]
    connections: Sequence[Row]
    jobs: Sequence[Row]
    locks: Sequence[Row]


def read(ground: machine_bench.Ground) -> Rows:
    """What is stored now."""
    return Rows(**ground.document(_ROWS))


def check_alone(rows: Rows) -> None:
    """What holds of any rows, whatever has led to them."""
    for volume in rows.volumes:
        _check_held(volume, rows)
        _check_attached(volume, [one for one in rows.attachments if _is_of(one, volume)])
        assert (volume["export"] == "none") == (volume["export_job"] is None), volume
        is_bad = volume["status"].startswith("error") or volume["status_job"] is not None
        assert is_bad or volume["error"] is None, volume
        live = [
            (one["connector_host"], one["identity"], one["connection_key"])
            for one in rows.connections
            if _is_of(one, volume) and one["state"] != "ended"
        ]
        assert len(live) == len(set(live)), "a connector has two connections"
    for one in [*rows.attachments, *rows.connections]:
        assert any(_is_of(one, volume) for volume in rows.volumes), "its volume is gone"
    for connection in rows.connections:
        has_ended = connection["state"] == "ended"
        assert has_ended == (connection["credentials"] is None), connection
        assert not has_ended or connection["data"] is None, connection


def _is_of(one: Row, volume: Row) -> bool:
    return bool(one["volume_id"] == volume["id"])


def _check_held(volume: Row, rows: Rows) -> None:
    """A passing status is held by a job that has not ended, and nothing else is."""
    is_passing = volume["status"] in reconciliation.PASSING
    assert (volume["status_job"] is not None) == is_passing, volume
    assert volume["previous_status"] is None or is_passing, volume
    if is_passing:
        (holder,) = [job for job in rows.jobs if job["id"] == volume["status_job"]]
        assert holder["state"] not in resources.ENDED, (volume, holder)
        locks = [lock for lock in rows.locks if lock["job_id"] == holder["id"]]
        assert [(lock["volume_id"], lock["mode"] != "r") for lock in locks] == [
            (volume["id"], True)
        ]


def _check_attached(volume: Row, attachments: Sequence[Row]) -> None:
    status, attach_status = volume["status"], volume["attach_status"]
    match status:
        case VolumeStatus.ATTACHING:
            assert attach_status == AttachStatus.ATTACHING, volume
        case VolumeStatus.DETACHING:
            assert attach_status == AttachStatus.DETACHING, volume
        case _:
            expected = AttachStatus.ATTACHED if attachments else AttachStatus.DETACHED
            assert attach_status == expected, (volume, attachments)
            assert all(one["status"] == "attached" for one in attachments), attachments
    if status in {VolumeStatus.AVAILABLE, VolumeStatus.IN_USE}:
        assert (status == VolumeStatus.IN_USE) == bool(attachments), (volume, attachments)


def check_step(before: Rows, after: Rows) -> None:
    """What holds of any step."""
    old = {(row["id"], row["created_by"]): row for row in before.volumes}
    for row in after.volumes:
        was = old.get((row["id"], row["created_by"]))
        if was is None or row == was:
            continue
        assert row["seq"] > was["seq"], (was, row)
    ended = {row["id"] for row in before.connections if row["state"] == "ended"}
    for row in after.connections:
        assert row["id"] not in ended or row["state"] == "ended", "what has ended came back"


def check_model(rows: Rows, model: machine_volumes.Model) -> None:
    """That the rows are what the model says."""
    assert {row["id"]: _stored(row, rows) for row in rows.volumes} == {
        str(volume.id): _expected(volume) for volume in model.volumes.values()
    }
    assert {row["id"]: row["state"] for row in rows.jobs} == {
        str(job.id): str(job.state) for job in model.jobs
    }
    assert sorted((lock["job_id"], lock["held"]) for lock in rows.locks) == sorted(
        (str(job.id), job.is_running)
        for job in model.jobs
        if job.refusal is None and not job.has_ended
    )


def _stored(row: Row, rows: Rows) -> dict[str, object]:
    return {
        **{name: row[name] for name in ("status", "attach_status", "export", "seq", "created_by")},
        **{name: row[name] for name in ("status_job", "previous_status", "export_job")},
        "attachments": {one["id"]: one["status"] for one in rows.attachments if _is_of(one, row)},
        "connections": {
            one["id"]: (one["connection_key"], one["state"], one["access_mode"], one["is_local"])
            for one in rows.connections
            if _is_of(one, row)
        },
        "made by": sorted(one["made_by"] for one in rows.connections if _is_of(one, row)),
    }


def _expected(volume: machine_volumes.Volume) -> dict[str, object]:
    return {
        "status": str(volume.status),
        "attach_status": str(volume.attach_status),
        "export": str(volume.export),
        "seq": volume.seq,
        "created_by": str(volume.created_by),
        "status_job": _text(volume.holder),
        "previous_status": _text(volume.previous),
        "export_job": _text(volume.export_job),
        "attachments": {str(one): str(status) for one, status in volume.attachments.items()},
        "connections": {
            str(one_id): (one.key, str(one.state), one.access_mode, one.is_local)
            for one_id, one in volume.connections.items()
        },
        "made by": sorted(str(one.made_by) for one in volume.connections.values()),
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)
