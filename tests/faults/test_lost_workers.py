"""Jobs that kill every worker, and workers that come back under the same name."""

import asyncio
import dataclasses
import datetime
import pathlib
import time
from typing import Any, NamedTuple

import pytest

from tests.faults import cases, checks, suite, world
from tests.faults.points import At, Point
from tests.services import amqp, environment, workers

ATTEMPTS = 3
BY_NAME = {case.name: case for case in cases.CASES}

AS_BEFORE: dict[str, Any] = {"exported": False, "connections": 0, "content": None}
NOT_EXTENDED: dict[str, Any] = {"status": "error_extending", "size_bytes": cases.SIZE}


@pytest.mark.parametrize(
    ("name", "point", "changes"),
    [
        ("initialize_connection", Point.CONNECTION_MADE, AS_BEFORE),
        *(
            pytest.param(*one, marks=pytest.mark.faults(sampled=False))
            for one in (
                ("create_volume", Point.BEGINNING, {"status": None}),
                ("create_volume", Point.DRIVER_DONE, {"status": "error"}),
                ("delete_volume", Point.UNEXPORTED, {"status": "error_deleting"}),
                ("extend_volume", Point.HOLDING, NOT_EXTENDED),
                ("initialize_connection", Point.HALF_SERVED, AS_BEFORE),
                ("terminate_connection", Point.CONNECTION_CUT, AS_BEFORE),
                ("attach_volume", Point.DRIVER_DONE, {"status": "available", "attachments": 0}),
                ("detach_volume", Point.HOLDING, {"status": "in-use", "attachments": 1}),
                ("copy_volume_data", Point.COPYING, AS_BEFORE),
                ("copy_volume_data-src", Point.COPIED, AS_BEFORE),
                ("copy_volume_data-dest", Point.UNDOING, AS_BEFORE),
            )
        ),
    ],
)
async def test_a_job_that_kills_each_worker_at_the_same_point_dies_and_leaves_nothing(
    name: str,
    point: Point,
    changes: dict[str, Any],
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
) -> None:
    case, at = BY_NAME[name], At(point)
    found = checks.Findings()
    async with world.opened(installation, start_worker, tmp_path) as made:
        await suite.start(made, case.scene, at, max_attempts=ATTEMPTS)
        request = await case.prepare(made, f"host-a@{case.scene.backend}")
        await made.arm()
        sent = await made.send(case.method, request)
        for attempt in range(ATTEMPTS):
            if attempt:
                await made.restart("host-a", at=at)
            assert await made.death("host-a", sent), f"attempt {attempt + 1}: {made.reached()}"
        made.disarm()
        await made.restart("host-a")
        error = (await made.caller.result(sent)).body["error"]
        letter = await made.caller.letter(sent)
        job = await made.caller.call("get_job", request.address, {"job_id": sent.message_id})
        wanted = dataclasses.replace(request, expected=await _wanted(made, request, changes))
        await suite.look(made, wanted, None, found)
        await suite.end(made, None, found)
    assert error["code"] == letter.headers["reason"] == "WorkerLost"
    assert letter.message_id == job["id"] == sent.message_id
    assert job["state"] == "dead"
    assert not found.all, str(found)


async def _wanted(
    made: world.World, request: world.Request, changes: dict[str, Any]
) -> tuple[world.Expected, ...]:
    """How the volumes have to be: as they would be, but for the changes."""
    wanted = [dataclasses.replace(one, **changes) for one in request.expected]
    rows = await made.site.rows("SELECT id::text AS id, address, size_bytes FROM volumes")
    if wanted[0].id is None and rows:
        made.volumes.adopt(dict(rows[0]))
        wanted[0] = dataclasses.replace(wanted[0], id=rows[0]["id"])
    return tuple(wanted)


async def test_a_job_is_taken_up_after_its_lease_though_a_worker_of_the_same_name_is_back(
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
) -> None:
    case = BY_NAME["extend_volume"]
    async with world.opened(installation, start_worker, tmp_path) as made:
        await suite.start(made, case.scene, At(Point.DRIVER_DONE))
        request = await case.prepare(made, "host-a@fast")
        await made.arm()
        sent = await made.send(case.method, request)
        assert await made.death("host-a", sent)
        made.disarm()
        before = await _lease(made, sent)
        await made.restart("host-a", after=0)
        deadline = time.monotonic() + amqp.TIMEOUT
        while (now := await _lease(made, sent)).token == before.token:
            # The new one must not keep the old one's job looking alive.
            assert now.until == before.until
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert (await made.caller.result(sent)).body["ok"]
        job = await made.caller.call("get_job", request.address, {"job_id": sent.message_id})
        found = checks.Findings()
        await suite.look(made, request, None, found)
        await suite.end(made, None, found)
    assert before.until is not None
    assert now.seen > before.until
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    assert not found.all, str(found)


class _Lease(NamedTuple):
    """A job's lease, and when it was seen so, by the database's clock."""

    token: int
    until: datetime.datetime | None
    seen: datetime.datetime


async def _lease(made: world.World, sent: amqp.Sent) -> _Lease:
    [row] = await made.site.rows(
        "SELECT lease_token, lease_until, now() FROM jobs WHERE id = $1", sent.message_id
    )
    return _Lease(*row)
