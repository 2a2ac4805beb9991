"""Exports: what is recorded, and that a worker that has lost the job tells the target nothing."""

import asyncio
import pathlib
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from messages import errors
from tests.integration import store_bench
from tests.integration.store_bench import C, need
from tests.services import environment
from worker.operations import base, connections, exports
from worker.store import jobs, volumes
from worker.store.volumes import Export


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


class Target:
    """Notes what it is told, and fails as it is told to."""

    needs_local_path = False

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails: set[str] = set()
        self.hangs = False

    async def create_export(self, volume: object, path: pathlib.Path) -> str:
        await self._do("create")
        return "somewhere"

    async def remove_export(self, volume: object) -> None:
        await self._do("remove")

    async def _do(self, what: str) -> None:
        self.told.append(what)
        if self.hangs:
            await asyncio.Event().wait()
        if what in self.fails:
            raise errors.TargetError(f"cannot {what}")


class Backend:
    """As much of a backend as exports touch."""

    def __init__(self) -> None:
        self.target = Target()


class Site:
    """A volume, a job that exports it, and its target."""

    def __init__(self, bench: store_bench.Bench, volume: volumes.Volume, one: jobs.Job) -> None:
        self.bench, self.volume, self.job = bench, volume, one
        self.target = Target()
        unused = cast("Any", None)
        self.context = base.Context(
            job=one,
            args=None,
            host="host-a",
            backends={},
            store=bench.store,
            remote=unused,
            connectors=unused,
            lease=30.0,
            say_volume=unused,
            progress=unused,
            cancel=unused,
            keep_checkpoint=unused,
            on_child=unused,
            throttle=unused,
        )

    async def make(self, export: Export) -> None:
        now = await volumes.get(self.bench.store, self.volume.id)
        await exports.make(self.context, self._backend(), now, export)

    async def remove(self) -> None:
        now = await volumes.get(self.bench.store, self.volume.id)
        await exports.remove(self.context, self._backend(), now)

    async def recorded(self) -> str:
        return (await volumes.get(self.bench.store, self.volume.id)).export

    def _backend(self) -> Any:
        backend = Backend()
        backend.target = self.target
        return backend


@pytest.fixture
async def site(bench: store_bench.Bench) -> Site:
    volume = await bench.volume()
    return Site(bench, volume, await bench.started(need(volume.id, C, known=True)))


async def test_an_export_that_cannot_be_made_is_undone(site: Site) -> None:
    site.target.fails = {"create"}
    with pytest.raises(errors.TargetError, match="cannot create"):
        await site.make(Export.EXPLICIT)
    assert site.target.told == ["create", "remove"]
    assert await site.recorded() == "none"


async def test_a_failed_create_leaves_recorded_who_asked_before(site: Site) -> None:
    await site.make(Export.IMPLICIT)
    site.target.fails = {"create"}
    with pytest.raises(errors.TargetError):
        await site.make(Export.EXPLICIT)
    assert site.target.told == ["create", "create"]
    assert await site.recorded() == "implicit"


async def test_an_export_that_can_neither_be_made_nor_undone_is_left_to_the_sweep(
    site: Site,
) -> None:
    site.target.fails = {"create", "remove"}
    with pytest.raises(errors.TargetError):
        await site.make(Export.EXPLICIT)
    assert await site.recorded() == "implicit"


async def test_a_job_that_is_lost_meanwhile_undoes_nothing(site: Site) -> None:
    site.target.hangs = True
    making = asyncio.create_task(site.make(Export.EXPLICIT))
    while not site.target.told:
        await asyncio.sleep(0.005)
    await site.bench.expire(site.job)
    (again,) = await site.bench.other().claim()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert site.target.told == ["create"]
    assert await site.recorded() == "explicit"
    # The next attempt finds what was recorded.
    later = Site(site.bench, site.volume, again)
    await later.remove()
    assert later.target.told == ["remove"]
    assert await later.recorded() == "none"


async def test_a_lost_job_does_not_end_an_export_with_its_connections(site: Site) -> None:
    await site.make(Export.IMPLICIT)
    await site.bench.expire(site.job)
    await site.bench.other().claim()
    with pytest.raises(Exception, match="set_export"):
        await connections.disconnect(
            site.context, site._backend(), site.volume, [uuid.uuid4()], force=True
        )
    assert site.target.told == ["create"]
    assert await site.recorded() == "implicit"


async def test_a_backend_that_is_not_configured_any_more_is_told(site: Site) -> None:
    with pytest.raises(errors.DriverNotInitialized) as refused:
        site.context.backend_at("host-a@gone")
    assert refused.value.details["address"] == "host-a@gone"
