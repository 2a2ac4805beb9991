"""Lists of records that are large: cut by their bytes, and never fetched all at once."""

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from messages import resources
from tests.integration import store_bench
from tests.integration.store_bench import job, need
from tests.services import environment
from worker import reads
from worker.store import database

EVERYTHING: dict[str, Any] = {"address": None, "state": None, "volume_id": None, "after": None}
VOLUMES: dict[str, Any] = {"address": None, "status": None, "after": None}


def body(size: int, character: str = "x") -> bytes:
    args = {"text": character * size}
    return json.dumps({"method": "m", "version": "1.0", "args": args}).encode()


async def accept(bench: store_bench.Bench, count: int, size: int) -> list[str]:
    new = [job(need(uuid.uuid4()), body=body(size)) for _ in range(count)]
    await bench.accept(*new)
    return [str(one.id) for one in new]


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each statement gave."""
    counts: list[int] = []
    real = database.Database.fetch

    async def fetch(self: database.Database, query: str, *args: Any) -> Sequence[database.Row]:
        rows = await real(self, query, *args)
        if query.startswith("list_"):
            counts.append(len(rows))
        return rows

    monkeypatch.setattr(database.Database, "fetch", fetch)
    return counts


async def test_a_list_too_large_is_cut_and_goes_on_after_its_last(
    bench: store_bench.Bench, fetched: list[int]
) -> None:
    ids = await accept(bench, 30, 400_000)
    seen: list[str] = []
    after, pages, truncated = None, 0, True
    while truncated:
        page = await reads.list_jobs(bench.store, **{**EVERYTHING, "after": after}, limit=1000)
        wire = page.to_wire("jobs")
        assert len(json.dumps(wire)) < reads.MAX_LIST_BYTES + 10_000
        truncated = wire.get("truncated", False)
        seen += [one["id"] for one in wire["jobs"]]
        after, pages = uuid.UUID(seen[-1]), pages + 1
    assert seen == ids
    assert pages == 3
    assert max(fetched) <= reads.CHUNK


async def test_a_list_that_fits_is_whole_and_not_marked(
    bench: store_bench.Bench, fetched: list[int]
) -> None:
    ids = await accept(bench, 2 * reads.CHUNK + 7, 10)
    page = await reads.list_jobs(bench.store, **EVERYTHING, limit=1000)
    assert [one["id"] for one in page.records] == ids
    assert list(page.to_wire("jobs")) == ["jobs"]
    assert fetched == [reads.CHUNK, reads.CHUNK, 7]
    page = await reads.list_jobs(bench.store, **EVERYTHING, limit=reads.CHUNK + 3)
    assert [one["id"] for one in page.records] == ids[: reads.CHUNK + 3]
    assert not page.truncated


async def test_a_record_larger_than_the_bound_comes_alone(bench: store_bench.Bench) -> None:
    ids = await accept(bench, 1, 10)
    ids += await accept(bench, 2, reads.MAX_LIST_BYTES + 1)
    after, found = None, []
    for _ in ids:
        page = await reads.list_jobs(bench.store, **{**EVERYTHING, "after": after}, limit=10)
        found.append([one["id"] for one in page.records])
        after = uuid.UUID(found[-1][-1])
    assert found == [[one] for one in ids]
    assert not page.truncated


async def test_volumes_are_cut_alike(
    bench: store_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted([str((await bench.volume()).id) for _ in range(reads.CHUNK + 5)])
    whole = await reads.list_volumes(bench.store, **VOLUMES, limit=1000)
    assert [one["id"] for one in whole.records] == ids
    monkeypatch.setattr(reads, "MAX_LIST_BYTES", len(json.dumps(whole.records)) // 2)
    half = await reads.list_volumes(bench.store, **VOLUMES, limit=1000)
    assert half.to_wire("volumes")["truncated"] is True
    rest = await reads.list_volumes(
        bench.store, **{**VOLUMES, "after": uuid.UUID(half.records[-1]["id"])}, limit=1000
    )
    assert [one["id"] for one in [*half.records, *rest.records]][: len(ids) - 1] == ids[:-1]


async def test_secrets_are_masked_in_a_list(bench: store_bench.Bench) -> None:
    raw = b'{"method": "m", "version": "1.0", "args": {"auth_password": "hush"}}'
    await bench.accept(job(body=raw))
    page = await reads.list_jobs(bench.store, **EVERYTHING, limit=10)
    assert page.records[0]["args"] == {"auth_password": "***"}
    assert page.records[0]["state"] in set(resources.JobState)
