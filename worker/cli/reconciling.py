"""Reconciling a backend without a worker, in this process."""

import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from messages import errors
from messages.findings import Finding
from worker import backend as backends
from worker import process, settings
from worker.cli import reach
from worker.connectors import base as connectors
from worker.connectors import registry
from worker.reconciliation import host, reconciler
from worker.store import acceptance, database, jobs
from worker.targets import base as targets


async def here(
    configured: settings.Settings, backend: settings.Backend, *, repair: bool
) -> list[Finding]:
    """What is wrong with a backend of this host that no worker serves now."""
    execute = process.Executor(configured.root_command())
    attached = configured.state_dir / "connectors"
    try:
        attached.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = backends.Backend(
            backend, host=configured.host, execute=execute, state_dir=configured.state_dir
        )
    except OSError as error:
        raise settings.ConfigurationError(
            f"state_dir {configured.state_dir} cannot be used: {error.strerror}"
        ) from None
    async with reach.records(configured) as store:
        around = host.Host(
            store,
            host=configured.host,
            connectors=registry.Registry(connectors.Context(configured.host, execute, attached)),
            state_dir=configured.state_dir,
            backends=configured.backends.keys(),
        )
        try:
            await _set_up(opened)
            mending = reconciler.Reconciler(
                store,
                opened,
                around,
                accept=functools.partial(_store_queued, store),
                say_volume=_say_nothing,
            )
            return await mending.run(repair=reconciler.ALL if repair else ())
        finally:
            await opened.close()


async def _set_up(opened: backends.Backend) -> None:
    try:
        await opened.set_up()
    except targets.ServedElsewhere as error:
        opened.error = targets.ServedElsewhere(
            f"{error.message}, and takes no requests: see its log, or end it"
        )
    except errors.VolumeWorkerError as error:
        opened.error = error
    else:
        opened.mark_ready()


def _say_nothing(_event: Mapping[str, Any]) -> None:
    """Nobody here publishes events; the next change of the volume tells what it is like."""


async def _store_queued(store: database.Database, new: Sequence[acceptance.NewJob]) -> object:
    """Stores jobs for the worker that is started next."""
    none_free = dict.fromkeys(jobs.Slot, 0)
    return await acceptance.accept(store, new, owner=uuid.uuid4(), lease=1.0, free=none_free)
