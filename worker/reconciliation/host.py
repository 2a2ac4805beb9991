"""What belongs to this host and to none of its backends: attached devices, and processes.

Devices are attached for jobs, and known by their keys. Processes are the copiers of this worker,
which jobs record, and the servers that backends leave running, which their folders record.
"""

import asyncio
import contextlib
import os
import pathlib
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

import structlog

from messages import errors, topology
from messages.findings import Finding, FindingKind, Identity
from worker import children, process
from worker.connectors import registry
from worker.operations import attaching
from worker.reconciliation import journal, look
from worker.storage_daemon import daemon, record
from worker.store import database
from worker.store import reconciliation as records

log = structlog.get_logger(__name__)

_COPIER: Final = b"worker.transfer.copier"


class Host:
    """Looks at this host, and mends it.

    Args:
        state_dir: the worker's.
        backends: the names of those that are configured.
    """

    def __init__(
        self,
        store: database.Database,
        *,
        host: str,
        connectors: registry.Registry,
        state_dir: pathlib.Path,
        backends: Collection[str],
    ) -> None:
        self._store = store
        self._connectors = connectors
        self._state_dir = state_dir
        self._backends = backends
        self.name = host
        self.journal = journal.Journal()
        self._mending = asyncio.Lock()

    async def look(self) -> list[Finding]:
        """What is attached or runs here and is accounted for by nothing; nothing is changed."""
        begun = await records.begun(self._store, self.name)
        found = [finding async for finding in self._devices(begun.keys())]
        pids = {child["pid"] for recorded in begun.values() for child in recorded}
        found += [
            _copier(self.name, pid) for pid in await asyncio.to_thread(_copiers) if pid not in pids
        ]
        found += [finding async for finding in self._servers()]
        return found

    async def mend(self, wrong: Collection[Identity]) -> dict[Identity, str]:
        """Takes down what is still found and among ``wrong``; returns what failed, in words."""
        failures = {}
        # Every backend of the host asks for this, and one at a time is enough.
        async with self._mending:
            for one in await self.look():
                if one.identity in wrong:
                    try:
                        await self._mend(one)
                        log.warning("reconciliation.repaired", **journal.described(one))
                    except errors.VolumeWorkerError as error:
                        failures[one.identity] = error.message
        return failures

    async def _mend(self, found: Finding) -> None:
        if found.kind is FindingKind.UNOWNED_DEVICE:
            connector, _, name = found.subject.partition("/")
            await self._connectors.get(connector).discard(name)
            return
        name, _, pid = found.subject.rpartition(" ")
        if name == "copier":
            if (started := process.start_time(int(pid))) is not None:
                await process.end_recorded(int(pid), started)
            return
        folder = self._state_dir / "backends" / name
        await daemon.StorageDaemon(self._connectors.execute, folder).stop()

    async def _devices(self, begun: Collection[uuid.UUID]) -> AsyncIterator[Finding]:
        keys = [
            attaching.device_key(job_id, read_only=read_only)
            for job_id in begun
            for read_only in (True, False)
        ]
        for kind, connector in self._connectors.all().items():
            for name in await connector.unowned(keys):
                what = f"a volume is attached by {kind} ({name}), or was, for no job that there is"
                yield look.new(FindingKind.UNOWNED_DEVICE, self.name, f"{kind}/{name}", what)

    async def _servers(self) -> AsyncIterator[Finding]:
        """Servers of backends that are configured no more, and that have no volume."""
        for folder, pid in await asyncio.to_thread(self._running_servers):
            address = topology.address(self.name, folder.parent.name)
            if not await records.volumes(self._store, address):
                subject = f"{folder.relative_to(self._state_dir / 'backends')} {pid}"
                what = f"{daemon.PROGRAM} {pid} serves {address}, which is no backend of this host"
                yield look.new(FindingKind.UNOWNED_PROCESS, self.name, subject, what)

    def _running_servers(self) -> Sequence[tuple[pathlib.Path, int]]:
        found = []
        for path in self._state_dir.glob(f"backends/*/*/{record.FILE}"):
            if path.parent.parent.name in self._backends:
                continue
            recorded = record.read(path.parent)
            if recorded is None or recorded.pid is None:
                continue
            if process.start_time(recorded.pid) == recorded.started:
                found.append((path.parent, recorded.pid))
        return found


def _copier(host: str, pid: int) -> Finding:
    what = f"a copier runs as process {pid} for no job that there is"
    return look.new(FindingKind.UNOWNED_PROCESS, host, f"copier {pid}", what)


def _copiers() -> list[int]:
    """The copiers that this process has started."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _COPIER in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if children.parent(pid) == os.getpid()]
