"""What the state machines share: one database and one event loop for all the examples of a test."""

import asyncio
import contextlib
import itertools
import json
import os
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import asyncpg
import hypothesis

from tests.integration import store_bench
from tests.services import environment

T = TypeVar("T")

LONGER: Final = os.environ.get("MACHINE_EXAMPLES")
"""How many examples to run of each machine, other ones each time; unset: few, always the same."""
TIMEOUT: Final = 0 if LONGER else 900
"""Seconds for a test: one that fails looks for a shorter way to fail before it tells."""


def settings(*, examples: int, steps: int) -> hypothesis.settings:
    """How much a machine is tried."""
    return hypothesis.settings(
        max_examples=int(LONGER or examples),
        stateful_step_count=steps,
        derandomize=LONGER is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def ids() -> Iterator[uuid.UUID]:
    """Ids, the same each time: a machine must do the same whenever it is told the same."""
    return (uuid.UUID(int=number) for number in itertools.count(1))


def pick(items: Sequence[T], number: int) -> T:
    """One of some things, by any number."""
    return items[number % len(items)]


_SETTINGS: Final = {
    # No machine looks at what a crash of the server would leave.
    "synchronous_commit": "off",
    # Rows that no ORDER BY puts in order come in the same order each time.
    "plan_cache_mode": "force_custom_plan",
}


class Ground:
    """A store for machines, which are no coroutines."""

    def __init__(
        self,
        runner: asyncio.Runner,
        bench: store_bench.Bench,
        connection: "asyncpg.Connection[asyncpg.Record]",
    ) -> None:
        self._runner = runner
        self._connection = connection
        self.bench = bench
        self.store = bench.store

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end."""
        return self._runner.run(work)

    def execute(self, statement: str, *args: Any) -> None:
        """Runs a statement beside the store."""
        self.run(self._connection.execute(statement, *args))

    def document(self, statement: str) -> Any:
        """The JSON document that a statement makes."""
        return json.loads(self.run(self._connection.fetchval(statement)))

    def clear(self) -> None:
        """Forgets all jobs and volumes."""
        self.execute("TRUNCATE jobs, job_locks, outbox, volumes, attachments, connections")


@contextlib.contextmanager
def opened(site: environment.Installation) -> Iterator[Ground]:
    """Ground on an installation for the time of the block."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            yield runner.run(_open(runner, site, stack))
        finally:
            runner.run(stack.aclose())


async def _open(
    runner: asyncio.Runner, site: environment.Installation, stack: contextlib.AsyncExitStack
) -> Ground:
    connection = await asyncpg.connect(site.database_url)
    stack.push_async_callback(connection.close)
    name = await connection.fetchval("SELECT quote_ident(current_database())")
    for setting, value in _SETTINGS.items():
        await connection.execute(f"ALTER DATABASE {name} SET {setting} = {value}")
    for table in ("jobs", "job_locks", "outbox", "volumes", "attachments", "connections"):
        await connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    bench = await stack.enter_async_context(store_bench.opened(site))
    return Ground(runner, bench, connection)
