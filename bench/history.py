"""What the store takes beside many finished jobs."""

import contextlib
import dataclasses
import hashlib
import json
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import asyncpg
import pydantic

from bench import hosts
from messages import resources
from worker.store import acceptance, database, jobs

HERE = "bench@fake"
ROUNDS = 50
LEASE = 60.0
DAY = 86400.0
ROOM = {jobs.Slot.CONTROL: 32, jobs.Slot.DATA: 2}
NO_ROOM = dict.fromkeys(ROOM, 0)

T = TypeVar("T")

# As finished create_volume jobs are, one in a thousand of them failed.
_FILL = """
INSERT INTO jobs (
    id, method, address, body, properties, fingerprint, volume_ids, slot, state, attempt,
    correlation_id, reply_to, result, created_at, started_at, finished_at)
SELECT
    id, 'create_volume', 'bench@fake', convert_to(
        '{"method": "create_volume", "version": "1.0", "args": {"volume": {"name": "' || id
        || '", "size_bytes": 1073741824}}}', 'UTF8'),
    '{"headers": {}, "content_type": "application/json", "delivery_mode": 2}',
    sha256(id::text::bytea), ARRAY[gen_random_uuid()],
    CASE WHEN i % 10 = 0 THEN 'data' ELSE 'control' END,
    CASE WHEN i % 1000 = 0 THEN 'failed' ELSE 'succeeded' END, 1, id::text, 'reply-' || i,
    jsonb_build_object('id', id, 'name', id, 'status', 'available', 'size_bytes', 1073741824),
    now(), now(), now()
FROM (SELECT gen_random_uuid() AS id, i FROM generate_series(1, $1::bigint) i) made
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Milliseconds by what was done, each the median of many."""

    jobs: int
    by_name: dict[str, float]


async def measure(site: hosts.Site, counts: Sequence[int]) -> list[Taken]:
    """What the store takes with so many finished jobs, for rising counts."""
    measured = []
    there = 0
    async with database.connect(pydantic.SecretStr(site.database_url)) as store:
        for count in counts:
            async with _connection(site) as connection:
                await connection.execute(_FILL, count - there, timeout=1800)
                await connection.execute("VACUUM ANALYZE jobs", timeout=600)
            there = count
            measured.append(Taken(count, await _all(store)))
    return measured


@contextlib.asynccontextmanager
async def _connection(site: hosts.Site) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(site.database_url)
    try:
        yield connection
    finally:
        await connection.close()


class _Watch:
    """Times what is awaited, by name."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    async def time(self, name: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        done = await work
        self._taken.setdefault(name, []).append((time.perf_counter() - began) * 1000)
        return done

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self._taken.items()}


async def _all(store: database.Database) -> dict[str, float]:
    watch = _Watch()
    owner = uuid.uuid4()
    for _ in range(ROUNDS):
        new = _job()
        accepting = acceptance.accept(store, [new], owner=owner, lease=LEASE, free=NO_ROOM)
        await watch.time("accept a job", accepting)
        [claimed] = await watch.time("claim a job", _claim(store, owner))
        assert claimed.id == new.id
        await watch.time("claim, nothing waits", _claim(store, owner))
        await watch.time("renew a lease", jobs.renew(store, [claimed], lease=LEASE))
        await watch.time("get_job", jobs.get(store, new.id))
        for state in ("running", "failed", "succeeded"):
            await watch.time(f"list_jobs, 100 {state}", _list(store, state=state))
        await watch.time("list_jobs, 100 of the address", _list(store, address=HERE))
        ending = jobs.Ending(claimed, resources.JobState.SUCCEEDED, result={})
        await watch.time("finish a job", jobs.finish(store, ending))
        await watch.time("prune, nothing is old", jobs.prune(store, retention=DAY, limit=1000))
    return watch.medians()


def _claim(store: database.Database, owner: uuid.UUID) -> Awaitable[list[jobs.Job]]:
    return jobs.claim(store, owner=owner, lease=LEASE, free=ROOM, addresses=[HERE])


def _list(
    store: database.Database, *, address: str | None = None, state: str | None = None
) -> Awaitable[list[jobs.Job]]:
    return jobs.list_(store, address=address, state=state, volume_id=None, after=None, limit=100)


def _job() -> acceptance.NewJob:
    identity = uuid.uuid4()
    arguments = {"volume": {"name": str(identity), "size_bytes": 1 << 30}}
    body = json.dumps({"method": "create_volume", "version": "1.0", "args": arguments}).encode()
    return acceptance.NewJob(
        id=identity,
        method="create_volume",
        address=HERE,
        slot=jobs.Slot.CONTROL,
        body=body,
        properties={"headers": {}},
        fingerprint=hashlib.sha256(body).digest(),
        deadline=None,
        reply_to=None,
        correlation_id=str(identity),
        status_updates=False,
        parent_job=None,
        needs=[acceptance.Need(identity, acceptance.LockMode.EXCLUSIVE, known=False)],
    )
