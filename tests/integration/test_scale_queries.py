"""No statement looks at more jobs than it has to do with, however many have ended.

The plans that PostgreSQL carries out are caught as they run, those inside functions too, and the
rows of ``jobs`` that they touch are counted. That holds on a slow machine, and a plan that walks an
index from its end to find little is caught like one that reads the whole table.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import asyncpg
import pytest

import sql
from tests.integration import store_bench
from tests.integration.store_bench import HERE, NONE, need, slots
from tests.services import environment
from worker.store import connections, database, jobs, outbox

FINISHED = 20_000
AT_WORK = 20
PAGE = 50
ENOUGH = 500
"""Rows that no statement here needs to touch, and every one that reads the history does."""


class Plans:
    """The plans that were carried out since :meth:`forget`."""

    def __init__(self) -> None:
        self._told: list[dict[str, Any]] = []

    def take(self, message: Any) -> None:
        """Takes what auto_explain says."""
        _, _, plan = str(message.message).partition("plan:\n")
        if plan:
            self._told.append(json.loads(plan))

    def forget(self) -> None:
        """Starts anew."""
        self._told.clear()

    def touched(self) -> int:
        """How many rows of ``jobs`` were read, those that did not fit included."""
        return sum(_read(node) for told in self._told for node in _nodes(told["Plan"]))

    def __str__(self) -> str:
        return json.dumps(self._told, indent=1)


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


def _read(node: Mapping[str, Any]) -> int:
    is_of_jobs = node.get("Relation Name") == "jobs" or node.get("Index Name", "").startswith(
        "jobs"
    )
    if not is_of_jobs or "Actual Rows" not in node:
        return 0
    left_out = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return int((node["Actual Rows"] + left_out) * node["Actual Loops"])


class Explained(database.Database):
    """A store on one connection that tells the plans of what it does."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._connection = connection
        self.plans = Plans()
        connection.add_log_listener(lambda _, message: self.plans.take(message))

    async def fetch(self, query: str, *args: Any) -> Sequence[database.Row]:
        """Runs a statement by its name."""
        rows: Sequence[database.Row] = await self._connection.fetch(sql.queries()[query], *args)
        return rows


class History(store_bench.Bench):
    """The store's short words, on a store with a long history."""

    store: Explained


@pytest.fixture
async def history(
    request: pytest.FixtureRequest, installation: environment.Installation
) -> AsyncIterator[History]:
    """The parameter is the session's settings: they say which of two plans PostgreSQL takes."""
    async with store_bench.opened(installation) as bench:
        await _fill(bench)
    connection = await asyncpg.connect(installation.database_url)
    try:
        await database._set_codecs(connection)
        for setting in (
            "LOAD 'auto_explain'",
            "SET auto_explain.log_min_duration = 0",
            "SET auto_explain.log_nested_statements = on",
            "SET auto_explain.log_analyze = on",
            "SET auto_explain.log_timing = off",
            "SET auto_explain.log_format = 'json'",
            "SET auto_explain.log_level = 'notice'",
            "SET jit = off",
            *(f"SET {name} = {value}" for name, value in request.param.items()),
        ):
            await connection.execute(setting)
        yield History(installation, Explained(connection))
    finally:
        await connection.close()


async def _fill(bench: store_bench.Bench) -> None:
    """Many jobs that have ended, few that have not."""
    await bench.rows(
        "INSERT INTO jobs (id, method, address, body, properties, fingerprint, volume_ids, slot,"
        " state, correlation_id, finished_at)"
        " SELECT gen_random_uuid(), 'm', 'host-a@fast', '{}', '{}', '', ARRAY[gen_random_uuid()],"
        " CASE WHEN i % 5 = 0 THEN 'data' ELSE 'control' END,"
        " CASE WHEN i % 1000 = 0 THEN 'failed' ELSE 'succeeded' END, 'c',"
        " now() - CASE WHEN i <= 200 THEN interval '9 days' ELSE interval '1 hour' END"
        " FROM generate_series(1, $1::integer) i",
        FINISHED,
    )
    for _ in range(AT_WORK):
        await bench.started(need(uuid.uuid4()))
        await bench.queued(need(uuid.uuid4()))
        await bench.queued(need(uuid.uuid4()), address="host-b@fast")
    await bench.rows("VACUUM ANALYZE")


Work = Callable[[History], Awaitable[Any]]


async def _accept(history: History) -> None:
    await history.accept(*(store_bench.job(need(uuid.uuid4())) for _ in range(5)))


async def _accept_again(history: History) -> None:
    [(ended,)] = await history.rows("SELECT id FROM jobs WHERE finished_at IS NOT NULL LIMIT 1")
    again = store_bench.job(need(uuid.uuid4()), id=ended)
    await history.accept(again, free=NONE)


async def _claim(history: History) -> None:
    assert len(await history.claim(free=slots(5, 2))) == 5


async def _renew(history: History) -> None:
    claimed = await history.claim(free=slots(5, 2))
    assert await jobs.renew(history.store, claimed, lease=30)


async def _finish(history: History) -> None:
    await history.finish(await history.started(need(uuid.uuid4())))


async def _requeue(history: History) -> None:
    one = await history.started(need(uuid.uuid4()))
    await jobs.requeue(history.store, one, delay=0, error=None)


async def _pending(history: History) -> None:
    await history.finish(await history.started(need(uuid.uuid4())))
    found = await outbox.adopt(history.store, addresses=[HERE], older_than=0, limit=PAGE)
    await outbox.delete(history.store, [one.id for one in found])


async def _prune(history: History) -> None:
    assert await jobs.prune(history.store, retention=7 * 86400, limit=10) == 10


async def _leftovers(history: History) -> None:
    await connections.leftovers(history.store, HERE)


async def _get(history: History) -> None:
    one = await history.started(need(uuid.uuid4()))
    await jobs.get(history.store, one.id)


def _listed(count: int, *, limit: int = PAGE, **filters: Any) -> Work:
    async def list_jobs(history: History) -> None:
        wanted = {"address": None, "state": None, "volume_id": None, "after": None, **filters}
        assert len(await jobs.list_(history.store, **wanted, limit=limit)) == count

    return list_jobs


CUSTOM = {"plan_cache_mode": "force_custom_plan"}
GENERIC = {"plan_cache_mode": "force_generic_plan"}
AUTO = {"plan_cache_mode": "auto"}

WORK: Mapping[str, Work] = {
    "get_job": _get,
    "accepting": _accept,
    "accepting what had ended": _accept_again,
    "claiming": _claim,
    "renewing leases": _renew,
    "finishing": _finish,
    "putting back": _requeue,
    "sweeping the outbox": _pending,
    "looking for leftovers": _leftovers,
}
LISTS: Mapping[str, Work] = {
    "all": _listed(PAGE),
    "of an address": _listed(PAGE, address=HERE),
    "of an address with few": _listed(AT_WORK, address="host-b@fast"),
    "of a volume": _listed(0, volume_id=uuid.uuid4()),
    "the first of a volume": _listed(0, limit=2, volume_id=uuid.uuid4()),
    "succeeded": _listed(PAGE, state="succeeded"),
    "running": _listed(AT_WORK, state="running"),
    "queued": _listed(2 * AT_WORK, state="queued"),
    "queued at an address": _listed(AT_WORK, address=HERE, state="queued"),
    "failed": _listed(20, state="failed"),
    "cancelled at an address": _listed(0, address=HERE, state="cancelled"),
    "dead": _listed(0, state="dead"),
    "dead at an address": _listed(0, address=HERE, state="dead"),
    "queued nowhere": _listed(0, address="host-c@fast", state="queued"),
    "of a volume, in a state": _listed(0, volume_id=uuid.uuid4(), state="succeeded"),
}
PRUNING: Mapping[str, Work] = {"pruning": _prune}


async def read_too_much(history: History, work: Mapping[str, Work]) -> dict[str, int]:
    """What reads more than it needs, and how many rows."""
    read = {}
    for name, carry_out in work.items():
        history.store.plans.forget()
        await carry_out(history)
        await asyncio.sleep(0)  # asyncpg hands on what it was told with the loop's next turn
        assert "jobs" in str(history.store.plans), f"no plan was told of {name}"
        read[name] = history.store.plans.touched()
    return {name: rows for name, rows in read.items() if rows > ENOUGH}


@pytest.mark.parametrize("history", [CUSTOM, GENERIC], ids=["custom", "generic"], indirect=True)
async def test_no_work_reads_what_has_ended(history: History) -> None:
    assert await read_too_much(history, WORK) == {}


@pytest.mark.parametrize(
    "history", [AUTO, database._PLANNED_ONCE], ids=["auto", "as workers have it"], indirect=True
)
@pytest.mark.parametrize("work", [LISTS, PRUNING], ids=["lists", "pruning"])
async def test_what_has_ended_is_read_only_as_far_as_needed(
    history: History, work: Mapping[str, Work]
) -> None:
    for _ in range(7):  # From the sixth time on, PostgreSQL may keep one plan for all arguments.
        assert await read_too_much(history, work) == {}
