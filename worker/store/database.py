"""Running statements: the pool, JSON, and what to do while PostgreSQL is away."""

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import asyncpg
import pydantic
import structlog
import tenacity
from asyncpg.connect_utils import SessionAttribute as _Session

import sql
from messages import errors
from worker.store import batch, pool

log = structlog.get_logger(__name__)

PATIENCE: Final = 25.0
"""Seconds for which a statement is tried again while the database is away, unless said."""
STATEMENT_TIMEOUT: Final = 30.0
"""Seconds for one try of a statement, unless said; then its connection is taken for dead."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Row = Mapping[str, Any]
"""A row by the names of its columns."""

_IN_TROUBLE: Final = ("40", "53", "55", "57", "58")
"""SQLSTATE classes that say nothing against the statement: conflicts of transactions, resources
that ran out, an object or a server that is not ready, system errors (PostgreSQL, appendix A)."""

_OTHERS_STATEMENTS: Final = (
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)
"""A prepared statement that is on another connection: what a transaction pooler does to a cache."""

_POOLER_HINT: Final = "behind a transaction pooler, set database_statement_cache_size = 0"


class LeaseLost(Exception):
    """The job's lease ran out, and another worker may have it: whatever this one does is void."""


class Database:
    """A pool of connections that runs the named statements of ``sql/queries``.

    Nothing is left on a pooled connection (no session locks, no LISTEN, no SET), so that a
    transaction pooler may sit in between; ``statement_cache_size=0`` works for the same reason.
    """

    def __init__(
        self,
        connections: pool.Pool,
        *,
        patience: float = PATIENCE,
        statement_timeout: float = STATEMENT_TIMEOUT,
    ) -> None:
        self._pool = connections
        self._patience = patience
        self._statement_timeout = statement_timeout
        self._trouble = ""
        self._answered_at = 0.0
        self._batches: dict[object, batch.Batch[Any, Any]] = {}
        self.statements = 0
        """How many statements were sent: each is one round trip."""

    async def fetch(self, query: str, *args: Any) -> Sequence[Row]:
        """Runs a statement by its name; returns its rows.

        Raises:
            Unreachable: the database stayed away for as long as patience lasts.
        """
        text = sql.queries()[query]
        began = time.monotonic()
        try:
            # Nearly always enough, and what tries again costs more than a short statement.
            rows = await self._fetch_once(text, args, min(self._statement_timeout, self._patience))
        except errors.Unreachable as error:
            left = began + self._patience - time.monotonic()
            if left <= 0:
                raise self._given_up(error.message, began) from None
            return await self._fetch_in_trouble(text, args, began, left)
        self._note_answer()
        return rows

    async def _fetch_in_trouble(
        self, text: str, args: Sequence[Any], began: float, patience: float
    ) -> Sequence[Row]:
        try:
            async with asyncio.timeout(patience):
                async for attempt in _while_away(patience):
                    with attempt:
                        rows = await self._fetch_once(text, args, self._statement_timeout)
                        self._note_answer()
                        return rows
        except TimeoutError:
            why = self._trouble or "the database does not answer"
            raise self._given_up(why, began) from None
        raise AssertionError("tenacity ends by a result or an error")

    def _given_up(self, why: str, began: float) -> errors.Unreachable:
        return self._unreachable(f"{why} (for {self._patience:g} s)", began)

    async def row(self, query: str, *args: Any) -> Row | None:
        """The first row of a statement, or None."""
        rows = await self.fetch(query, *args)
        return rows[0] if rows else None

    async def own(self, query: str, *args: Any) -> Row:
        """The row of a write that needs a job's lease.

        Raises:
            LeaseLost: there is none.
        """
        row = await self.row(query, *args)
        if row is None:
            raise LeaseLost(query)
        return row

    async def together(
        self,
        run: Callable[["Database", Sequence[Item]], Awaitable[Sequence[Result]]],
        item: Item,
        *,
        keys: Callable[[Item], Collection[object]] = lambda _: (),
    ) -> Result:
        """Has ``run`` carry an item out, in one statement with others that come meanwhile.

        No two items of one statement have any of their ``keys`` in common: see
        :class:`batch.Batch`.
        """
        found = self._batches.get(run)
        if found is None:
            found = self._batches[run] = batch.Batch(functools.partial(run, self), keys=keys)
        result: Result = await found.add(item)
        return result

    async def _fetch_once(self, text: str, args: Sequence[Any], timeout: float) -> Sequence[Row]:
        began = time.monotonic()
        connection = await self._acquire(began, timeout)
        is_at_rest = False
        try:
            self.statements += 1
            rows = cast("Sequence[Row]", await connection.fetch(text, *args, timeout=timeout))
            is_at_rest = True
        except pool.AWAY as error:
            pool.end(connection)
            await self._pool.expire()
            why = f"the database does not answer: {describe(error)}"
            raise self._unreachable(why, began) from error
        except _OTHERS_STATEMENTS as error:
            raise self._unreachable(f"{error}: {_POOLER_HINT}", began) from error
        except asyncpg.PostgresError as error:
            if str(error.sqlstate)[:2] in _IN_TROUBLE:
                raise errors.Unreachable(f"the database is in trouble: {error}") from error
            raise
        else:
            return rows
        finally:
            await self._pool.release(connection, is_at_rest=is_at_rest)

    async def _acquire(self, began: float, timeout: float) -> Any:
        """A connection of the pool, or a new one.

        Those that work are kept whatever comes of it: a server that lets nobody in any more
        (``max_connections`` are others') still serves who is inside.
        """
        try:
            return await self._pool.acquire(timeout)
        except TimeoutError:
            why = "no connection to the database became free"
            raise self._unreachable(why, began) from None
        except (*pool.AWAY, asyncpg.PostgresError) as error:
            why = f"the database cannot be reached: {describe(error)}"
            raise self._unreachable(why, began) from error

    def _unreachable(self, why: str, began: float) -> errors.Unreachable:
        self._note_trouble(why, began)
        return errors.Unreachable(why)

    # Told once when it has gone and once when it is back, however often it was tried.

    def _note_trouble(self, why: str, began: float) -> None:
        if began < self._answered_at:
            # Another has had an answer since: this one failed at what was before.
            return
        if not self._trouble:
            log.warning("database.away", error=why)
        self._trouble = why

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()
        if self._trouble:
            log.info("database.back")
        self._trouble = ""

    async def close(self) -> None:
        """Closes the pool, in bounded time."""
        try:
            await asyncio.wait_for(self._pool.close(), 5)
        except TimeoutError:
            self._pool.terminate()


@contextlib.asynccontextmanager
async def connect(
    url: pydantic.SecretStr,
    *,
    size: int = 8,
    statement_cache_size: int = 100,
    patience: float = PATIENCE,
    statement_timeout: float = STATEMENT_TIMEOUT,
    writes: bool = False,
) -> AsyncIterator[Database]:
    """Opens a pool.

    Args:
        patience: seconds for which a statement is tried in all.
        statement_timeout: seconds for each try of it.
        writes: only a server that takes writes will do, now and whenever it connects again.

    Raises:
        Unreachable: the database cannot be reached, or refuses; the text says why.
    """
    try:
        connections = await asyncpg.create_pool(
            url.get_secret_value(),
            min_size=1,
            max_size=size,
            init=_set_codecs,
            reset=_keep,
            command_timeout=statement_timeout,
            timeout=10,
            statement_cache_size=statement_cache_size,
            # A pooler in between knows no more than these two, and refuses what it does not know.
            server_settings={
                "application_name": "volume-worker",
                # A row as JSON has its times in the session's zone: in another one, the first and
                # the last that Python knows would be beyond what it can read.
                "timezone": "UTC",
                **(_PLANNED_ONCE if statement_cache_size else {}),
            },
            target_session_attrs=_Session.read_write if writes else _Session.any,
        )
    except (*pool.AWAY, asyncpg.PostgresError, ValueError) as error:
        raise errors.Unreachable(
            f"the database cannot be reached: {describe(error)}; "
            "look at database_url and whether PostgreSQL runs there"
        ) from None
    database = Database(
        pool.Pool(connections), patience=patience, statement_timeout=statement_timeout
    )
    try:
        yield database
    finally:
        await database.close()


_PLANNED_ONCE: Final = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
}
"""All statements are short ones, of which planning would be the greater part. They are planned
while the tables may be empty, and are to find what they look for when these have grown."""
_JSONB_VERSION: Final = b"\x01"


async def _set_codecs(connection: Any) -> None:
    # Binary, since asyncpg takes apart no composite value that has a text codec within.
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        format="binary",
        encoder=lambda value: _JSONB_VERSION + json.dumps(value).encode(),
        decoder=lambda data: json.loads(data[1:]),
    )


async def _keep(_connection: Any) -> None:
    """Spares the statement that asyncpg resets a connection with: nothing is ever set on one."""


def describe(error: BaseException) -> str:
    """What went wrong, for a person, and nothing of the URL."""
    if isinstance(error, ValueError) and not isinstance(error, asyncpg.InterfaceError):
        # Of what takes the URL apart: its text may have what it took for a port, of the password.
        return "database_url cannot be read; percent-encode the password's special characters"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it takes no writes"
    if "startup parameter" in str(error):
        return f"{error}: {_POOLER_HINT}"
    return str(error) or type(error).__name__


def _while_away(patience: float) -> tenacity.AsyncRetrying:
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(errors.Unreachable),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=3),
        stop=tenacity.stop_after_delay(patience),
        reraise=True,
    )
