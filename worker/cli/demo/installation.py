"""An installation for the demo alone: a database beside the configured one, and a namespace.

Both go when the demo ends.
"""

import contextlib
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

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
    async with _undone(lambda: installation.drop_database(url, called)):
        try:
            await installation.create_database(url, called)
        except errors.Unreachable as error:
            raise errors.Unreachable(f"{error.message}{_ADVICE}") from None
        await installation.migrate(own, called)
        yield own


def _beside(url: pydantic.SecretStr, database: str) -> pydantic.SecretStr:
    parts = urllib.parse.urlsplit(url.get_secret_value())
    return pydantic.SecretStr(parts._replace(path=f"/{database}").geturl())


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
