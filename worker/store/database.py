"""Running statements: the pool, JSON, and what to do while PostgreSQL is away."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import asyncpg
import pydantic
import structlog
import tenacity

import sql
from messages import errors

log = structlog.get_logger(__name__)

PATIENCE: Final = 25.0
"""Seconds for which a statement is tried again while the database is away, unless said."""
STATEMENT_TIMEOUT: Final = 30.0
"""Seconds for one statement."""

Row = Mapping[str, Any]
"""A row by the names of its columns."""

_AWAY: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # its server had just ended the connection
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.TooManyConnectionsError,
)


_IN_TROUBLE: Final = ("40", "53", "55", "57", "58")
"""SQLSTATE classes that say nothing against the statement: conflicts of transactions, resources
that ran out, an object or a server that is not ready, system errors (PostgreSQL, appendix A)."""


class LeaseLost(Exception):
    """The job's lease ran out, and another worker may have it: whatever this one does is void."""


class Database:
    """A pool of connections that runs the named statements of ``sql/queries``.

    Nothing is left on a pooled connection (no session locks, no LISTEN, no SET), so that a
    transaction pooler may sit in between; ``statement_cache_size=0`` works for the same reason.
    """

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]", *, patience: float = PATIENCE) -> None:
        self._pool = pool
        self._patience = patience
        self.statements = 0
        """How many statements were sent: each is one round trip."""

    async def fetch(self, query: str, *args: Any) -> Sequence[Row]:
        """Runs a statement by its name; returns its rows.

        Raises:
            Unreachable: the database stayed away for as long as patience lasts.
        """
        text = sql.queries()[query]
        async for attempt in _while_away(query, self._patience):
            with attempt:
                return await self._fetch_once(text, args)
        raise AssertionError("tenacity ends by a result or an error")

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

    async def _fetch_once(self, text: str, args: Sequence[Any]) -> Sequence[Row]:
        try:
            async with self._pool.acquire(timeout=STATEMENT_TIMEOUT) as connection:
                self.statements += 1
                return cast("Sequence[Row]", await connection.fetch(text, *args))
        except _AWAY as error:
            await self._pool.expire_connections()
            raise errors.Unreachable(f"the database does not answer: {error}") from error
        except asyncpg.PostgresError as error:
            if str(error.sqlstate)[:2] in _IN_TROUBLE:
                raise errors.Unreachable(f"the database is in trouble: {error}") from error
            raise

    async def close(self) -> None:
        """Closes the pool, in bounded time."""
        try:
            await asyncio.wait_for(self._pool.close(), 5)
        except TimeoutError:
            self._pool.terminate()


@asynccontextmanager
async def connect(
    url: pydantic.SecretStr,
    *,
    size: int = 8,
    statement_cache_size: int = 100,
    patience: float = PATIENCE,
) -> AsyncIterator[Database]:
    """Opens a pool; ``patience`` is in seconds.

    Raises:
        Unreachable: the database cannot be reached, or refuses; the text says why.
    """
    try:
        pool = await asyncpg.create_pool(
            url.get_secret_value(),
            min_size=1,
            max_size=size,
            init=_set_codecs,
            reset=_keep,
            command_timeout=STATEMENT_TIMEOUT,
            timeout=10,
            statement_cache_size=statement_cache_size,
            server_settings={"application_name": "volume-worker", "jit": "off"},
        )
    except (*_AWAY, asyncpg.PostgresError, ValueError) as error:
        raise errors.Unreachable(
            f"the database cannot be reached: {error or type(error).__name__}; "
            "look at database_url and whether PostgreSQL runs there"
        ) from error
    database = Database(pool, patience=patience)
    try:
        yield database
    finally:
        await database.close()


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


def _while_away(query: str, patience: float) -> tenacity.AsyncRetrying:
    def note(state: tenacity.RetryCallState) -> None:
        log.warning("database.away", query=query, tries=state.attempt_number)

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(errors.Unreachable),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=3),
        stop=tenacity.stop_after_delay(patience),
        before_sleep=note,
        reraise=True,
    )
