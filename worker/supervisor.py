"""Keeping backends at work: set up, set up again after a failure, looked after, and reported."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from messages import errors
from worker import backend, leftovers, outbox, retry
from worker.reconciliation import reconciler, serving
from worker.store import database, installation

log = structlog.get_logger(__name__)

HEALTH_INTERVAL: Final = 5.0
STATS_SPACING: Final = 1.0
"""Seconds between two stats at least, however much changes; less where they are to come sooner."""
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
        on_standby: Callable[[], Awaitable[None]],
        reconciler: reconciler.Reconciler,
        reconcile_interval: float,
        stats_interval: float,
    ) -> None:
        self._store = store
        self._backend = looked_after
        self._outbox = outbox
        self._sweeper = leftovers.Sweeper(store, looked_after.address, accept)
        self._on_standby = on_standby
        self._reconciler = reconciler
        self._reconcile_interval = reconcile_interval
        self._stats_interval = stats_interval
        self._first_try = asyncio.Event()
        self._not_served: Mapping[uuid.UUID, str] = {}
        """Why a volume could not be served when that was last tried."""

    async def first_try(self) -> None:
        """Waits until the set-up was tried once, whatever came of it."""
        await self._first_try.wait()

    async def run(self) -> None:
        """Sets the backend up, until that succeeds, and looks after it until cancelled."""
        await self._set_up_in_the_end()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after())
            group.create_task(self._report())

    async def _set_up_in_the_end(self) -> None:
        tries = 0
        while True:
            stood_by = self._backend.is_standby
            is_done = await self._set_up()
            self._first_try.set()
            if self._backend.is_standby != stood_by:
                await self._on_standby()
            if is_done:
                return
            tries += 1
            # Who stands by takes over soon after the other process has gone.
            cap = SETUP_BASE if self._backend.is_standby else SETUP_CAP
            await asyncio.sleep(retry.backoff(tries, base=SETUP_BASE, cap=cap))

    async def _set_up(self) -> bool:
        address = self._backend.address
        try:
            await self._backend.set_up()
            await self._restore()
        except errors.VolumeWorkerError as error:
            stood_by = self._backend.is_standby
            self._backend.error = error
            if not (stood_by and self._backend.is_standby):
                log.warning("backend.setup_failed", address=address, error=error.message)
        except Exception as error:
            self._backend.error = errors.Internal(f"{type(error).__name__}: {error}")
            log.exception("backend.setup_failed", address=address)
        else:
            self._backend.mark_ready()
            log.info("backend.ready", address=address)
            return True
        if not self._backend.is_standby:
            await self._publish_stats()
        return False

    async def _restore(self) -> None:
        """Lets the target serve again what is recorded as exported."""
        async with self._backend.serving.alone():
            failed = await serving.restore(self._store, self._backend)
        before, self._not_served = self._not_served, {one: e.message for one, e in failed.items()}
        # It is tried again in every round; each reason is logged once.
        for volume_id, why in self._not_served.items():
            if before.get(volume_id) != why:
                log.error("backend.restore_failed", volume_id=str(volume_id), error=why)

    async def _look_after(self) -> None:
        clock = asyncio.get_running_loop().time
        reconciled = clock()
        while True:
            await asyncio.sleep(min(HEALTH_INTERVAL, self._reconcile_interval))
            await self._guarded("backend.check_failed", self._check_target)
            # While the target is away, a job that needs it would only fail.
            if self._backend.up:
                await self._guarded("leftovers.sweep_failed", self._sweeper.sweep)
            if self._backend.up and clock() - reconciled >= self._reconcile_interval:
                reconciled = clock()
                await self._guarded("reconciliation.failed", self._reconciler.round)

    async def _guarded(self, event: str, step: Callable[[], Awaitable[None]]) -> None:
        """One step of the rounds: whatever it raises, the next round comes."""
        address = self._backend.address
        try:
            await step()
        except errors.VolumeWorkerError as error:
            log.warning(event, address=address, error=error.message)
        except Exception:
            log.exception(event, address=address)

    async def _check_target(self) -> None:
        address = self._backend.address
        was_away = self._backend.target_error is not None
        try:
            if not await self._backend.target.check_health():
                if not self._not_served:
                    log.warning("backend.restoring", address=address)
                await self._restore()
        except errors.Unreachable:
            raise  # the database, of which the target knows nothing
        except errors.VolumeWorkerError as error:
            if not was_away:
                log.warning("backend.target_away", address=address, error=error.message)
            self._backend.note_target(error)
        except Exception as error:
            self._backend.note_target(errors.Internal(f"{type(error).__name__}: {error}"))
            raise
        else:
            if was_away:
                log.info("backend.target_back", address=address)
            self._backend.note_target(None)

    async def _report(self) -> None:
        while True:
            self._backend.changed.clear()
            await self._publish_stats()
            spacing = min(STATS_SPACING, self._stats_interval)
            await asyncio.sleep(spacing)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stats_interval - spacing):
                    await self._backend.changed.wait()

    async def _publish_stats(self) -> None:
        """Publishes the stats; a database or a storage in trouble never ends the rhythm."""
        stats: Mapping[str, Any] = {"address": self._backend.address, "backend_state": "down"}
        try:
            if self._backend.ready:
                stats = await self._backend.stats(refresh=True)
            error = self._backend.error or self._backend.target_error
            seq = await installation.set_backend(
                self._store,
                self._backend.address,
                up=self._backend.up,
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
