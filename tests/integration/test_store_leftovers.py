"""What is left of jobs that have ended is found, and ended without harm to what came since."""

import itertools
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from messages import envelope, requests
from tests.integration import store_bench
from tests.integration.store_bench import HERE, C, need
from tests.services import environment
from worker import leftovers
from worker.store import acceptance, connections, jobs, volumes


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


async def connection(
    bench: store_bench.Bench, one: jobs.Job, volume: volumes.Volume, key: str
) -> connections.Connection:
    return await connections.begin(
        bench.store,
        one,
        volume.id,
        requests.Connector.model_validate({"host": "b", "connection_key": key}),
        is_local=key == "local",
        credentials={},
    )


async def left_export(bench: store_bench.Bench) -> tuple[volumes.Volume, connections.Connection]:
    """A volume whose implicit export has outlived its last connection, with a local one."""
    volume = await bench.volume()
    one = await bench.started(need(volume.id, C, known=True))
    made = await connection(bench, one, volume, "remote")
    await volumes.set_export(bench.store, one, volume.id, volumes.Export.IMPLICIT)
    await connections.ending(bench.store, one, volume.id, [made.id])
    await connections.ended(bench.store, one, made)
    local = await connection(bench, one, volume, "local")
    await connections.live(bench.store, one, local, driver_volume_type="local", data={}, secrets={})
    await bench.finish(one)
    return volume, made


class Clock:
    """Time as a test has it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_an_export_that_nobody_needs_is_ended_by_its_ended_connection_alone(
    bench: store_bench.Bench,
) -> None:
    volume, made = await left_export(bench)
    found = await connections.leftovers(bench.store, HERE)
    assert found == [connections.Leftover(volume.id, made.id)]
    accepted: list[acceptance.NewJob] = []

    async def accept(new: Sequence[acceptance.NewJob]) -> None:
        accepted.extend(new)

    await leftovers.Sweeper(bench.store, HERE, accept).sweep()
    (job,) = accepted
    args = envelope.read_body(job.body, len(job.body), HERE).args
    # Naming one connection, it can end no other, whatever was made meanwhile.
    assert isinstance(args, requests.TerminateConnection)
    assert (args.volume_id, args.connection_id) == (volume.id, made.id)
    one = await bench.started(need(volume.id, C, known=True))
    assert await connections.ending(bench.store, one, volume.id, [made.id]) == []
    assert await connections.leftovers(bench.store, HERE) == []  # a job is at work on the volume


async def test_a_leftover_that_stays_gets_jobs_at_longer_and_longer_intervals(
    bench: store_bench.Bench,
) -> None:
    await left_export(bench)
    accepted: list[float] = []
    clock = Clock()

    async def accept(new: Sequence[acceptance.NewJob]) -> None:
        accepted.extend(clock.now for _ in new)

    sweeper = leftovers.Sweeper(bench.store, HERE, accept, clock=clock)
    for _ in range(1000):
        await sweeper.sweep()
        clock.now += 5
    pauses = [later - earlier for earlier, later in itertools.pairwise(accepted)]
    assert pauses[:5] == [30, 60, 120, 240, 480]
    assert set(pauses[5:]) == {600}


async def test_a_leftover_that_was_forgotten_is_swept_at_once_again(
    bench: store_bench.Bench,
) -> None:
    volume, _ = await left_export(bench)
    accepted: list[uuid.UUID] = []
    clock = Clock()

    async def accept(new: Sequence[acceptance.NewJob]) -> None:
        accepted.extend(one.id for one in new)

    sweeper = leftovers.Sweeper(bench.store, HERE, accept, clock=clock)
    await sweeper.sweep()
    one = await bench.started(need(volume.id, C, known=True))
    await sweeper.sweep()
    clock.now += 5
    await bench.finish(one)
    await sweeper.sweep()
    assert len(accepted) == 1
    clock.now += leftovers.FIRST_PAUSE + leftovers.LONGEST_PAUSE
    await sweeper.sweep()
    assert len(accepted) == 2
