"""A whole service within the test's own process, so that its parts can be looked at."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aio_pika
import aio_pika.exceptions
import pytest

from tests.services import environment
from worker import service, settings, shutdown
from worker.store import database


class InProcess:
    """A running service; ``store`` is its own."""

    def __init__(self, store: database.Database, task: asyncio.Task[None]) -> None:
        self.store = store
        self.task = task

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return not self.task.done()


@contextlib.asynccontextmanager
async def running(
    site: environment.Installation,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    backends: Mapping[str, Mapping[str, Any]],
    **changed: Any,
) -> AsyncIterator[InProcess]:
    """A service for the time of the block; it is ready, and drained at the end."""
    for name in ("BROKER_URL", "DATABASE_URL"):
        monkeypatch.delenv(f"VOLUME_WORKER_{name}", raising=False)
    configured = settings.Settings(
        host="host-a",
        broker_url=site.broker_url,
        database_url=site.database_url,
        namespace=site.namespace,
        state_dir=folder / "state",
        http_listen="",
        backends={name: dict(table) for name, table in backends.items()},
        **changed,
    )
    site.addresses |= set(configured.addresses())
    stores: list[database.Database] = []
    connect = database.connect

    @contextlib.asynccontextmanager
    async def remember(*args: Any, **options: Any) -> AsyncIterator[database.Database]:
        async with connect(*args, **options) as store:
            stores.append(store)
            yield store

    monkeypatch.setattr(database, "connect", remember)
    signals = shutdown.Signals()
    made = service.Service(configured, settings.backends(configured), signals=signals)
    task = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(30):
            while not (stores and await _is_consuming(site)):
                assert not task.done(), task
                await asyncio.sleep(0.05)
        yield InProcess(stores[0], task)
    finally:
        signals.stop.set()
        if not task.done():
            async with asyncio.timeout(30):
                await asyncio.wait([task])
    await task


async def _is_consuming(site: environment.Installation) -> bool:
    connection = await aio_pika.connect(site.broker_url)
    async with connection:
        channel = await connection.channel()
        try:
            for address in site.addresses:
                queue = await channel.declare_queue(f"{site.namespace}.{address}", passive=True)
                if not queue.declaration_result.consumer_count:
                    return False
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
    return True
