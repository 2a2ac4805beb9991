"""An installation for the demo alone: a database beside the configured one, and a namespace.

Both go when the demo ends.
"""

import contextlib
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import asyncpg
import pydantic

from messages import errors, link, topology
from worker import settings
from worker.cli import reach
from worker.store import installation

_ADVICE: Final = (
    "; `make demo` in a checkout starts both services, else set VOLUME_WORKER_BROKER_URL and "
    "VOLUME_WORKER_DATABASE_URL to yours"
)


def name() -> str:
    """A name that nobody else has."""
    return f"volume_worker_demo_{secrets.token_hex(4)}"


@contextlib.asynccontextmanager
async def database(configured: settings.Settings, called: str) -> AsyncIterator[pydantic.SecretStr]:
    """A database of that name, migrated, for the time of a block; gives its URL.

    Raises:
        Unreachable: the configured one is away.
        DemoFailed: its user may make none.
    """
    url = configured.database_url
    own = _beside(url, called)
    # Forced: a worker that was killed a moment ago may still count as connected.
    drop = f'DROP DATABASE IF EXISTS "{called}" WITH (FORCE)'
    async with _undone(lambda: _execute(url, drop)):
        await _execute(url, f'CREATE DATABASE "{called}"')
        await installation.migrate(own, called)
        yield own


def _beside(url: pydantic.SecretStr, database: str) -> pydantic.SecretStr:
    parts = urllib.parse.urlsplit(url.get_secret_value())
    return pydantic.SecretStr(parts._replace(path=f"/{database}").geturl())


async def _execute(url: pydantic.SecretStr, statement: str) -> None:
    connection = await _connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close(timeout=5)


async def _connect(url: pydantic.SecretStr) -> Any:
    try:
        try:
            return await asyncpg.connect(url.get_secret_value(), timeout=10)
        except asyncpg.InvalidCatalogNameError:
            # The configured database was never made; this one is always there.
            return await asyncpg.connect(_beside(url, "postgres").get_secret_value(), timeout=10)
    except (
        OSError,
        TimeoutError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        ValueError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise errors.Unreachable(
            f"the database at {reach.place(url)} cannot be reached: {reason}{_ADVICE}"
        ) from error


@contextlib.asynccontextmanager
async def namespace(
    configured: settings.Settings, called: str, addresses: Sequence[str]
) -> AsyncIterator[None]:
    """A namespace on the broker, all of which is removed after the block.

    Raises:
        Unreachable: the broker is away.
    """
    try:
        async with reach.broker(configured.broker_url):
            pass
    except errors.Unreachable as error:
        raise errors.Unreachable(f"{error.message}{_ADVICE}") from None
    names = topology.Topology(called)
    async with _undone(lambda: _remove(configured, names, addresses)):
        yield


@contextlib.asynccontextmanager
async def _undone(undo: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Undoes after the block; what went wrong within it is told first."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(errors.VolumeWorkerError, asyncpg.PostgresError, *link.AWAY):
            await undo()
        raise
    await undo()


async def _remove(
    configured: settings.Settings, names: topology.Topology, addresses: Sequence[str]
) -> None:
    async with reach.broker(configured.broker_url) as connection:
        channel = await connection.channel()
        for queue in [*(names.queue(address) for address in addresses), names.dead]:
            await channel.queue_delete(queue)
        for exchange in (names.requests, names.events, names.dead):
            await channel.exchange_delete(exchange)
