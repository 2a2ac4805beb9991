"""The statements themselves: each is used, each can be run, and none grows slow with history."""

import ast
import asyncio
import contextlib
import pathlib
import re
import statistics
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pydantic
import pytest

import sql
from messages import errors
from tests.integration import store_bench
from tests.integration.store_bench import C, X, need, slots
from tests.services import environment, tcp_proxy
from worker.store import database, jobs

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNNERS = ("fetch", "row", "own")


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


def used_queries() -> set[str]:
    """The names that the code runs queries by."""
    found = set()
    for path in (ROOT / "worker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                # store.fetch("NAME", …)
                case ast.Call(
                    func=ast.Attribute(attr=attr), args=[ast.Constant(value=str(name)), *_]
                ) if attr in RUNNERS:
                    found.add(name)
                # sql.queries()["NAME"]
                case ast.Subscript(
                    value=ast.Call(func=ast.Attribute(attr="queries")),
                    slice=ast.Constant(value=str(name)),
                ):
                    found.add(name)
    return found


def test_every_query_is_used_and_every_query_that_is_used_exists() -> None:
    assert used_queries() == set(sql.queries())


PREPARABLE = sorted(name for name, text in sql.queries().items() if "{name}" not in text)


def _parameters(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\$(\d+)", _without_comments(text))}


@pytest.mark.parametrize("name", PREPARABLE)
async def test_a_query_can_be_prepared(bench: store_bench.Bench, name: str) -> None:
    connection = await asyncpg.connect(bench.site.database_url)
    try:
        prepared = await connection.prepare(sql.queries()[name])
        assert len(prepared.get_parameters()) == len(_parameters(sql.queries()[name]))
    finally:
        await connection.close()


@pytest.mark.parametrize("name", sorted(sql.queries()))
def test_a_query_says_what_its_parameters_are(name: str) -> None:
    text = sql.queries()[name]
    parameters = _parameters(text)
    assert parameters == set(range(1, len(parameters) + 1))
    if name in ("accept_jobs", "revive_job"):  # those of the function
        return
    told = {int(number) for number in re.findall(r"\$(\d+)", _comments(text))}
    assert parameters <= told or len(parameters) <= 3


def _comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.lstrip().startswith("--"))


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))


@contextlib.asynccontextmanager
async def _lent(store: database.Database) -> AsyncIterator[Any]:
    """A connection of a store, as one of its statements has it."""
    connection = await store._pool.acquire(5)
    try:
        yield connection
    finally:
        await store._pool.release(connection, is_at_rest=True)


async def test_the_store_works_without_prepared_statements(
    installation: environment.Installation,
) -> None:
    """As behind a pooler that gives each transaction another connection."""
    async with store_bench.opened(installation, statement_cache_size=0) as bench:
        volume = await bench.volume()
        one = await bench.started(need(volume.id, C, known=True))
        await jobs.requeue(bench.store, one, delay=0, error=errors.TargetError("x"))
        (again,) = await bench.claim()
        await bench.finish(again)
        async with _lent(bench.store) as connection:
            names = await connection.fetch("SELECT name FROM pg_prepared_statements")
        assert [row["name"] for row in names if row["name"]] == []


async def test_nothing_is_left_on_a_pooled_connection(
    installation: environment.Installation,
) -> None:
    async with store_bench.opened(installation, size=1) as bench:
        volume = await bench.volume()
        await bench.queued(need(volume.id, C, known=True))
        await bench.claim()
        async with _lent(bench.store) as connection:
            assert await connection.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
            assert (
                await connection.fetchval(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
                )
                == 0
            )
            assert not connection.is_in_transaction()


async def test_each_statement_is_counted(bench: store_bench.Bench) -> None:
    before = bench.store.statements
    await bench.started(need(uuid.uuid4()))
    assert bench.store.statements == before + 1


async def test_a_statement_is_tried_again_when_its_connection_was_cut(
    bench: store_bench.Bench,
) -> None:
    one = await bench.started(need(uuid.uuid4()))
    await bench.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'volume-worker' AND datname = current_database()"
    )
    assert (await jobs.get(bench.store, one.id)).id == one.id


async def test_a_statement_gives_up_when_patience_ends(
    installation: environment.Installation,
) -> None:
    async with (
        tcp_proxy.before(installation.database_url) as (proxy, url),
        database.connect(pydantic.SecretStr(url), patience=1) as store,
    ):
        await proxy.stop()
        await proxy.cut()
        began = time.monotonic()
        with pytest.raises(errors.Unreachable):
            await store.fetch("is_writable")
        assert 0.5 < time.monotonic() - began < 10
        await proxy.start()
        assert await store.fetch("is_writable")


# The claim, with much history


async def finished_jobs(bench: store_bench.Bench, count: int) -> None:
    """Fills the table with jobs that ended long ago."""
    await bench.rows(
        "INSERT INTO jobs (id, method, address, body, properties, fingerprint, volume_ids, slot,"
        " state, correlation_id, finished_at)"
        " SELECT gen_random_uuid(), 'm', 'host-a@fast', '{}', '{}', '', ARRAY[gen_random_uuid()],"
        " CASE WHEN i % 5 = 0 THEN 'data' ELSE 'control' END, 'succeeded', 'c', now()"
        " FROM generate_series(1, $1::integer) i",
        count,
    )
    await bench.rows("ANALYZE jobs")


async def seconds_of_a_claim(bench: store_bench.Bench) -> float:
    """The median of many claims that find one job each."""
    taken = []
    for _ in range(30):
        one = await bench.queued(need(uuid.uuid4()))
        began = time.perf_counter()
        (claimed,) = await bench.claim(free=slots(32, 2))
        taken.append(time.perf_counter() - began)
        assert claimed.id == one.id
        await bench.finish(claimed)
    return statistics.median(taken)


async def plans_of_a_claim(bench: store_bench.Bench) -> str:
    """How PostgreSQL carries out each statement inside the claim."""
    connection = await asyncpg.connect(bench.site.database_url)
    told: list[str] = []
    connection.add_log_listener(lambda _, message: told.append(str(message.message)))
    try:
        for setting in (
            "LOAD 'auto_explain'",
            "SET auto_explain.log_min_duration = 0",
            "SET auto_explain.log_nested_statements = on",
            "SET auto_explain.log_level = 'notice'",
            "SET jit = off",
        ):
            await connection.execute(setting)
        await connection.fetch(
            sql.queries()["claim_jobs"], uuid.uuid4(), 30.0, 32, 2, ["host-a@fast"]
        )
        await asyncio.sleep(0)
    finally:
        await connection.close()
    return "\n".join(told)


async def test_a_claim_does_not_grow_slow_with_what_has_ended(bench: store_bench.Bench) -> None:
    await finished_jobs(bench, 1_000)
    few = await seconds_of_a_claim(bench)
    await finished_jobs(bench, 99_000)
    many = await seconds_of_a_claim(bench)
    assert many < 2 * few + 0.002
    plans = await plans_of_a_claim(bench)
    assert "jobs_waiting" in plans
    assert "jobs_running" in plans
    assert "Seq Scan on jobs" not in plans


async def test_a_claim_does_not_grow_slow_with_what_waits_for_one_volume(
    bench: store_bench.Bench,
) -> None:
    async def claim_beside(waiting: int) -> float:
        volume_id = uuid.uuid4()
        holder = await bench.started(need(volume_id, X))
        batch = [store_bench.job(need(volume_id, X)) for _ in range(waiting)]
        await bench.accept(*batch)
        taken = []
        for _ in range(9):
            began = time.perf_counter()
            assert await bench.claim() == []
            taken.append(time.perf_counter() - began)
        await bench.rows("DELETE FROM jobs WHERE id <> $1", holder.id)
        await bench.finish(holder)
        # What else the machine does only ever adds to it.
        return min(taken)

    few, many = await claim_beside(30), await claim_beside(600)
    # Twenty times as many may take twenty times as long, and not their square.
    assert many < 40 * few + 0.02
