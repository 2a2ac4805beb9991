"""The service: put together, started in order, stopped in order.

Database first, then each backend's set-up (tried once, whatever comes of it), then the broker: a
request is taken only when there is somebody to carry it out. If one of the parts dies, the service
stops taking work and ends with an error; it never goes on half-alive.

Told to end, it takes no more work, and gives its jobs ``drain_timeout`` seconds; what is still at
work then is cancelled, undone and put back. Each step after that has a time of its own, and the
whole has one: a job that could not be put back in time is left to its lease.
"""

import asyncio
import contextlib
import dataclasses
import enum
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import structlog

from messages import client, errors, topology
from worker import (
    backend,
    broker,
    inbox,
    outbox,
    process,
    reads,
    runner,
    settings,
    shutdown,
    supervisor,
)
from worker.connectors import base as connectors
from worker.connectors import registry
from worker.reconciliation import host, reconciler
from worker.store import database, installation, jobs
from worker.telemetry import health, notify

log = structlog.get_logger(__name__)

DATABASE_CHECK_INTERVAL: Final = 2.0
PUT_BACK_TIMEOUT: Final = 10.0
"""Seconds that cancelled jobs have to undo what they did and to be put back."""
PUT_BACK_REST: Final = 3.0
"""Seconds more for a job whose undoing was cut short then, until it is left to its lease."""
FLUSH_TIMEOUT: Final = 5.0
BACKEND_CLOSE_TIMEOUT: Final = 5.0
CLOSE_TIMEOUT: Final = 20.0
"""Seconds for all that comes after the jobs, until the process ends whatever is not done."""
EXIT_TIMEOUT: Final = 2.0
"""Seconds for threads and tasks that are left when the service has ended."""
PRUNE_INTERVAL: Final = 60.0
PRUNE_BATCH: Final = 1000


class _Phase(enum.Enum):
    STARTING = "starting"
    WORKING = "working"
    DRAINING = "draining: running jobs may end"
    PUTTING_BACK = "ending: jobs are put back"
    CLOSING = "ending"


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """What works, once it is put together."""

    link: broker.Broker
    told: outbox.Outbox
    running: runner.Runner
    taken: inbox.Inbox
    supervisors: Sequence[supervisor.Supervisor]
    calls: contextlib.AsyncExitStack
    """Closes the client that calls other hosts."""


class Service:
    """One worker process.

    Args:
        signals: say when it has to end.
        limit: ends the process where its own end takes too long; without it nothing does.
    """

    def __init__(
        self,
        configured: settings.Settings,
        backends: list[settings.Backend],
        *,
        signals: shutdown.Signals,
        limit: shutdown.Limit | None = None,
    ) -> None:
        self._settings = configured
        self._owner = uuid.uuid4()
        self._execute = process.Executor(configured.root_command())
        self._backends = self._make_backends(backends)
        self._connectors = registry.Registry(
            connectors.Context(configured.host, self._execute, configured.state_dir / "connectors")
        )
        self._database_up = False
        self._phase = _Phase.STARTING
        self._signals = signals
        self._notifier = notify.Notifier.from_environment()
        self._limit = limit
        if limit is not None:
            limit.last = self._execute.children.kill_all

    def _make_backends(self, configured: list[settings.Backend]) -> dict[str, backend.Backend]:
        state_dir = self._settings.state_dir
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = [
                backend.Backend(
                    one, host=self._settings.host, execute=self._execute, state_dir=state_dir
                )
                for one in configured
            ]
            (state_dir / "connectors").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise settings.ConfigurationError(
                f"state_dir {state_dir} cannot be used: {error.strerror}"
            ) from None
        return {one.address: one for one in made}

    async def run(self) -> None:
        """Works until it is told to end, then drains.

        Raises:
            VolumeWorkerError: what keeps the service from working, or ended it.
        """
        try:
            await self._run()
        except BaseException:
            self._note_failure()
            raise
        finally:
            # What is left now, in a system call that may never return, would be waited for.
            self._ends_within(EXIT_TIMEOUT)
        log.info("service.stopped")

    async def _run(self) -> None:
        configured = self._settings
        async with (
            database.connect(
                configured.database_url,
                size=configured.database_pool_size,
                statement_cache_size=configured.database_statement_cache_size,
                # Shorter than a lease: who cannot write must not think that it still may.
                patience=configured.lease * 0.8,
                # So that one dead connection leaves time for a renewal over another.
                statement_timeout=configured.lease / 4,
            ) as store,
            self._closing_backends(),
        ):
            await installation.check(store, configured.namespace)
            self._database_up = True
            await self._work(store)

    async def _work(self, store: database.Database) -> None:
        configured = self._settings
        remote = client.Client(
            configured.broker_url,
            namespace=configured.namespace,
            name=f"volume-worker {configured.host} (calls)",
        )
        async with contextlib.AsyncExitStack() as calls:
            parts = self._assemble(store, remote, calls)
            server = health.Server(lambda: self._checks(parts.link))
            await calls.enter_async_context(remote)
            async with (
                server.serve(configured.http_listen),
                self._telling(parts.link),
                asyncio.TaskGroup() as group,
            ):
                tasks = await self._start(store, parts, group)
                try:
                    await self._signals.stop.wait()
                    await self._drain(parts)
                except BaseException:
                    # A part has died, and nobody renews leases: a third of one is left for sure.
                    self._note_failure()
                    draining = asyncio.create_task(parts.running.drain(0))
                    await self._put_back(draining, calls, configured.lease / 3)
                    raise
                self._phase = _Phase.CLOSING
                self._ends_within(CLOSE_TIMEOUT)
                for task in tasks:
                    task.cancel()

    async def _start(
        self, store: database.Database, parts: _Parts, group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Starts every part; the broker's last, when there is somebody to carry a request out."""
        named = zip(self._backends, parts.supervisors, strict=True)
        first = {f"backend {address}": one.run() for address, one in named}
        first["database watch"] = self._watch_database(store)
        first["pruning"] = self._prune(store)
        if os.getpid() == 1:
            first["reaper"] = self._execute.children.reap_orphans()
        tasks = [group.create_task(shutdown.living(name, part)) for name, part in first.items()]
        await supervisor.all_tried(parts.supervisors)
        then = {
            "outbox": parts.told.run(),
            "runner": parts.running.run(),
            "inbox": parts.taken.run(),
            "broker link": parts.link.run(parts.taken.receive),
        }
        tasks += [group.create_task(shutdown.living(name, part)) for name, part in then.items()]
        self._phase = _Phase.WORKING
        log.info("service.started", host=self._settings.host, backends=list(self._backends))
        return tasks

    def _assemble(
        self, store: database.Database, remote: client.Client, calls: contextlib.AsyncExitStack
    ) -> _Parts:
        configured = self._settings
        link = broker.Broker(
            configured.broker_url,
            topology.Topology(configured.namespace),
            list(self._backends),
            name=configured.host,
            serves=lambda address: not self._backends[address].is_standby,
        )
        told = outbox.Outbox(store, link, addresses=list(self._backends))
        running = self._runner(store, told, remote)
        reconcilers = self._reconcilers(store, told, running)
        taken = inbox.Inbox(
            store,
            link,
            runner=running,
            outbox=told,
            reader=reads.Reader(store, self._backends, reconcilers),
            max_request_bytes=configured.max_request_bytes,
        )
        supervisors = [
            supervisor.Supervisor(
                store,
                one,
                outbox=told,
                accept=running.accept,
                on_standby=link.look_again,
                reconciler=reconcilers[address],
                reconcile_interval=configured.reconcile_interval,
                stats_interval=configured.stats_interval,
            )
            for address, one in self._backends.items()
        ]
        return _Parts(link, told, running, taken, supervisors, calls)

    def _reconcilers(
        self, store: database.Database, told: outbox.Outbox, running: runner.Runner
    ) -> dict[str, reconciler.Reconciler]:
        here = host.Host(
            store,
            host=self._settings.host,
            connectors=self._connectors,
            state_dir=self._settings.state_dir,
            backends=self._settings.backends.keys(),
        )
        return {
            address: reconciler.Reconciler(
                store, one, here, accept=running.accept, say_volume=told.say_volume
            )
            for address, one in self._backends.items()
        }

    def _runner(
        self, store: database.Database, told: outbox.Outbox, remote: client.Client
    ) -> runner.Runner:
        configured = self._settings
        return runner.Runner(
            store,
            outbox=told,
            remote=remote,
            connectors=self._connectors,
            backends=self._backends,
            host=configured.host,
            owner=self._owner,
            slots={
                jobs.Slot.CONTROL: configured.control_slots,
                jobs.Slot.DATA: configured.data_slots,
            },
            lease=configured.lease,
            max_attempts=configured.max_attempts,
        )

    async def _drain(self, parts: _Parts) -> None:
        timeout = self._settings.drain_timeout
        log.info("service.draining", timeout=timeout)
        self._phase = _Phase.DRAINING
        self._notifier.stopping(self._phase.value)
        self._ends_within(timeout + PUT_BACK_TIMEOUT + PUT_BACK_REST + CLOSE_TIMEOUT)
        draining = asyncio.create_task(parts.running.drain(timeout))
        refusing = asyncio.create_task(parts.link.stop_consuming())
        hurrying = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait(
            [draining, hurrying], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        hurrying.cancel()
        if not draining.done():
            if self._signals.hurry.is_set():
                draining.cancel()
                draining = asyncio.create_task(parts.running.drain(0))
            await self._put_back(draining, parts.calls, PUT_BACK_TIMEOUT)
        if draining.done() and not draining.cancelled():
            draining.result()
        refusing.cancel()
        if not await parts.told.flush(FLUSH_TIMEOUT if parts.link.is_up else 0):
            # It stands in the outbox table, and the next worker of this host tells it.
            log.warning("service.outbox_left")

    async def _put_back(
        self, draining: asyncio.Task[None], calls: contextlib.AsyncExitStack, timeout: float
    ) -> None:
        """Lets cancelled jobs undo what they did, in bounded time.

        A tool that hangs is killed, and a call to another host given up: its broker has it, or
        nobody will. What hangs in a system call stays: its job is left to its lease.
        """
        self._phase = _Phase.PUTTING_BACK
        timeout = min(timeout, PUT_BACK_TIMEOUT)
        self._ends_within(timeout + PUT_BACK_REST + CLOSE_TIMEOUT)
        self._execute.end_by(timeout)
        await asyncio.wait([draining], timeout=timeout)
        if draining.done():
            return
        hanging_up = asyncio.create_task(calls.aclose())
        await asyncio.wait([draining], timeout=PUT_BACK_REST)
        if not draining.done():
            log.error("service.jobs_left", why="they could not be undone in time")
            draining.cancel()
        await asyncio.wait([hanging_up])

    def _checks(self, link: broker.Broker) -> Mapping[str, bool]:
        return {
            "broker": link.is_up and not self._signals.stop.is_set(),
            "database": self._database_up,
            **{address: one.up for address, one in self._backends.items()},
        }

    async def _watch_database(self, store: database.Database) -> None:
        while True:
            await asyncio.sleep(DATABASE_CHECK_INTERVAL)
            try:
                async with asyncio.timeout(DATABASE_CHECK_INTERVAL * 2):
                    self._database_up = await installation.is_writable(store)
            except (TimeoutError, errors.Unreachable):
                self._database_up = False

    async def _prune(self, store: database.Database) -> None:
        while True:
            pruned = 0
            with contextlib.suppress(errors.Unreachable):
                pruned = await jobs.prune(
                    store, retention=self._settings.job_retention, limit=PRUNE_BATCH
                )
            await asyncio.sleep(0 if pruned == PRUNE_BATCH else PRUNE_INTERVAL)

    @contextlib.asynccontextmanager
    async def _closing_backends(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closing = [asyncio.create_task(one.close()) for one in self._backends.values()]
            _, late = await asyncio.wait(closing, timeout=BACKEND_CLOSE_TIMEOUT)
            if late:
                log.warning("service.backends_left", backends=len(late))

    @contextlib.asynccontextmanager
    async def _telling(self, link: broker.Broker) -> AsyncIterator[None]:
        """Keeps systemd informed for as long as the block runs."""
        telling = asyncio.create_task(self._notifier.run(lambda: self._report(link)))
        try:
            yield
        finally:
            telling.cancel()

    def _report(self, link: broker.Broker) -> notify.Report:
        if self._phase is not _Phase.WORKING:
            return notify.Report(self._phase.value, is_ready=False, is_patience_needed=True)
        if not link.is_up:
            # It has not started until it consumes, however long the broker is away.
            return notify.Report("waiting for the broker", is_ready=False, is_patience_needed=True)
        missing = [name for name, is_up in self._checks(link).items() if not is_up]
        served = ", ".join(self._backends)
        return notify.Report(f"not ready: {', '.join(missing)}" if missing else f"serves {served}")

    def _note_failure(self) -> None:
        if self._limit is not None:
            self._limit.exit_code = 1

    def _ends_within(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit.within(seconds)
