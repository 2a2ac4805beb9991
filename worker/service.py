"""The service: put together, started in order, stopped in order.

Database first, then each backend's set-up (tried once, whatever comes of it), then the broker: a
request is taken only when there is somebody to carry it out. If one of the parts dies, the service
stops taking work and ends with an error; it never goes on half-alive.
"""

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Final

import structlog

from messages import client, errors, topology
from worker import backend, broker, inbox, outbox, process, reads, runner, settings, supervisor
from worker.connectors import base as connectors
from worker.connectors import registry
from worker.store import database, installation, jobs
from worker.telemetry import health

log = structlog.get_logger(__name__)

DATABASE_CHECK_INTERVAL: Final = 2.0
FLUSH_TIMEOUT: Final = 5.0
PRUNE_INTERVAL: Final = 60.0
PRUNE_BATCH: Final = 1000


class Service:
    """One worker process."""

    def __init__(self, configured: settings.Settings, backends: list[settings.Backend]) -> None:
        self._settings = configured
        self._owner = uuid.uuid4()
        self._execute = process.Executor(configured.root_command())
        self._backends = self._make_backends(backends)
        self._database_up = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

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
        """Works until SIGTERM or SIGINT, then drains.

        Raises:
            VolumeWorkerError: what keeps the service from working, or ended it.
        """
        self._listen_for_signals()
        configured = self._settings
        async with contextlib.AsyncExitStack() as stack:
            store = await stack.enter_async_context(
                database.connect(
                    configured.database_url,
                    size=configured.database_pool_size,
                    statement_cache_size=configured.database_statement_cache_size,
                    # Shorter than a lease: who cannot write must not think that it still may.
                    patience=configured.lease * 0.8,
                )
            )
            await installation.check(store, configured.namespace)
            self._database_up = True
            await stack.enter_async_context(self._closing_backends())
            await self._work(store)
        log.info("service.stopped")

    async def _work(self, store: database.Database) -> None:
        configured = self._settings
        names = topology.Topology(configured.namespace)
        remote = client.Client(
            configured.broker_url,
            namespace=configured.namespace,
            name=f"volume-worker {configured.host} (calls)",
        )
        link = broker.Broker(
            configured.broker_url,
            names,
            list(self._backends),
            name=configured.host,
            serves=lambda address: not self._backends[address].is_standby,
        )
        told = outbox.Outbox(store, link, owner=self._owner, addresses=list(self._backends))
        running = self._runner(store, told, remote)
        taken = inbox.Inbox(
            store,
            link,
            runner=running,
            outbox=told,
            reader=reads.Reader(store, self._backends),
            owner=self._owner,
            max_request_bytes=configured.max_request_bytes,
        )
        supervisors = [
            supervisor.Supervisor(
                store,
                one,
                outbox=told,
                accept=running.accept,
                on_standby=link.look_again,
                stats_interval=configured.stats_interval,
            )
            for one in self._backends.values()
        ]
        server = health.Server(lambda: self._checks(link))
        async with server.serve(configured.http_listen), remote, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.run()) for one in supervisors]
            tasks.append(group.create_task(self._watch_database(store)))
            tasks.append(group.create_task(self._prune(store)))
            await supervisor.all_tried(supervisors)
            tasks += [group.create_task(part.run()) for part in (told, running, taken)]
            tasks.append(group.create_task(link.run(taken.receive)))
            log.info("service.started", host=configured.host, backends=list(self._backends))
            try:
                await self._stop.wait()
                await self._drain(link, running, told)
            finally:
                # Also where a part has died: jobs give back what they hold while there is a way.
                await running.drain(0)
            for task in tasks:
                task.cancel()

    def _runner(
        self, store: database.Database, told: outbox.Outbox, remote: client.Client
    ) -> runner.Runner:
        configured = self._settings
        return runner.Runner(
            store,
            outbox=told,
            remote=remote,
            connectors=registry.Registry(
                connectors.Context(
                    configured.host, self._execute, configured.state_dir / "connectors"
                )
            ),
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

    async def _drain(
        self, link: broker.Broker, running: runner.Runner, told: outbox.Outbox
    ) -> None:
        log.info("service.draining", timeout=self._settings.drain_timeout)
        await link.stop_consuming()
        draining = asyncio.create_task(running.drain(self._settings.drain_timeout))
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            await running.drain(0)
        if not await told.flush(FLUSH_TIMEOUT):
            # It stands in the outbox table, and the next worker of this host tells it.
            log.warning("service.outbox_left")

    def _checks(self, link: broker.Broker) -> Mapping[str, bool]:
        return {
            "broker": link.is_up,
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
            for one in self._backends.values():
                await one.close()

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        """The first signal drains, the second hurries."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()
