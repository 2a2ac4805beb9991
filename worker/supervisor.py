"""Keeping backends at work: set up, set up again after a failure, looked after, and reported."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from messages import errors
from worker import backend, leftovers, outbox, retry
from worker.operations import base, connections, exports
from worker.store import connections as connection_store
from worker.store import database, installation
from worker.targets import base as targets

log = structlog.get_logger(__name__)

HEALTH_INTERVAL: Final = 5.0
STATS_SPACING: Final = 1.0
"""Seconds between two stats at least, however much changes."""
SETUP_PATIENCE: Final = 5.0
"""Seconds that the service's start waits for a backend's first set-up; it goes on without it."""
SETUP_BASE: Final = 1.0
SETUP_CAP: Final = 60.0


class Supervisor:
    """Looks after one backend; other backends are not touched by its troubles."""

    def __init__(
        self,
        store: database.Database,
        looked_after: backend.Backend,
        *,
        outbox: outbox.Outbox,
        accept: leftovers.Accept,
        stats_interval: float,
    ) -> None:
        self._store = store
        self._backend = looked_after
        self._outbox = outbox
        self._accept = accept
        self._stats_interval = stats_interval
        self._first_try = asyncio.Event()

    async def first_try(self) -> None:
        """Waits until the set-up was tried once, whatever came of it."""
        await self._first_try.wait()

    async def run(self) -> None:
        """Sets the backend up, until that succeeds, and looks after it until cancelled."""
        tries = 0
        while not await self._set_up():
            self._first_try.set()
            tries += 1
            await asyncio.sleep(retry.backoff(tries, base=SETUP_BASE, cap=SETUP_CAP))
        self._first_try.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after())
            group.create_task(self._report())

    async def _set_up(self) -> bool:
        address = self._backend.address
        try:
            await self._backend.set_up()
            await self._restore()
        except errors.VolumeWorkerError as error:
            self._backend.error = error
            log.warning("backend.setup_failed", address=address, error=error.message)
        except Exception as error:
            self._backend.error = errors.Internal(f"{type(error).__name__}: {error}")
            log.exception("backend.setup_failed", address=address)
        else:
            self._backend.mark_ready()
            log.info("backend.ready", address=address)
            return True
        await self._publish_stats()
        return False

    async def _restore(self) -> None:
        """Lets the target serve again what is recorded as exported."""
        async with self._backend.serving.alone():
            await self._restore_alone()

    async def _restore_alone(self) -> None:
        recorded = await connection_store.served(self._store, self._backend.address)
        failed = await self._backend.target.restore(
            [
                targets.Export(
                    base.reference(volume),
                    exports.path_of(self._backend, volume),
                    [connections.as_target_sees(connection) for connection in live],
                )
                for volume, live in recorded
            ]
        )
        for volume_id, error in failed.items():
            log.error("backend.restore_failed", volume_id=str(volume_id), error=error.message)

    async def _look_after(self) -> None:
        away = False
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            try:
                if not await self._backend.target.check_health():
                    log.warning("backend.restoring", address=self._backend.address)
                    await self._restore()
                await leftovers.sweep(self._store, self._backend.address, self._accept)
                if away:
                    log.info("backend.target_back", address=self._backend.address)
                away = False
            except errors.VolumeWorkerError as error:
                if not away:
                    log.warning(
                        "backend.target_away", address=self._backend.address, error=error.message
                    )
                away = True

    async def _report(self) -> None:
        while True:
            self._backend.changed.clear()
            await self._publish_stats()
            await asyncio.sleep(STATS_SPACING)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._stats_interval - STATS_SPACING, 0)):
                    await self._backend.changed.wait()

    async def _publish_stats(self) -> None:
        """Publishes the stats; a database or a storage in trouble never ends the rhythm."""
        stats: Mapping[str, Any] = {"address": self._backend.address, "backend_state": "down"}
        try:
            if self._backend.ready:
                stats = await self._backend.stats(refresh=True)
            error = self._backend.error
            seq = await installation.set_backend(
                self._store,
                self._backend.address,
                up=self._backend.ready,
                stats=stats,
                error=None if error is None else error.to_wire(),
            )
            self._outbox.say_stats(self._backend.address, seq, stats)
        except Exception as error:
            log.warning("backend.stats_failed", address=self._backend.address, error=str(error))


async def all_tried(supervisors: Sequence[Supervisor]) -> None:
    """Waits until every backend's set-up was tried once; one that hangs holds up no other."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETUP_PATIENCE):
            await asyncio.gather(*(supervisor.first_try() for supervisor in supervisors))
