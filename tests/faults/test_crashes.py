"""kill -9 at each crash point of each method: nothing lost, nothing twice, nothing left."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from tests.faults import cases, checks, points, suite, table, world
from tests.services import environment, tgtd, workers

COMBINATIONS = [suite.Combination(case, at) for case in cases.CASES for at in case.dying]
SCENES = sorted({case.scene for case in cases.CASES}, key=str)


def _tgtd(scene: cases.Scene, request: pytest.FixtureRequest) -> tgtd.Tgtd | None:
    if not scene.needs_tgtd:
        return None
    daemon: tgtd.Tgtd = request.getfixturevalue("tgtd")
    return daemon


@pytest.mark.faults
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
async def test_a_worker_that_dies_anywhere_leaves_no_trace_of_it(
    combination: suite.Combination,
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    daemon = _tgtd(combination.case.scene, request)
    async with world.opened(installation, start_worker, tmp_path, daemon) as made:
        outcome = await suite.run(made, combination)
    record_property(table.PROPERTY, dataclasses.asdict(table.Row.of(combination, outcome)))
    assert not outcome.found.all, str(outcome.found)


@pytest.mark.parametrize("scene", SCENES, ids=str)
async def test_every_crash_point_is_reached_where_the_table_says(
    scene: cases.Scene,
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
) -> None:
    daemon = _tgtd(scene, request)
    missed: dict[str, list[str]] = {}
    found = checks.Findings()
    async with world.opened(installation, start_worker, tmp_path, daemon) as made:
        await suite.start(made, scene, None)
        for case in (case for case in cases.CASES if case.scene == scene):
            reached = await suite.trace(made, case, found)
            if late := [str(at) for at in case.dying if reached.count(at.point) < at.time]:
                missed[case.name] = late
        await made.stop()
        await checks.nothing(made, found)
    assert missed == {}
    assert not found.all, str(found)


def test_every_crash_point_belongs_to_a_case() -> None:
    tried = {at.point for case in cases.CASES for at in case.dying}
    assert tried == set(points.Point) == set(points.PLACES)
