"""One look at a backend: what is wrong there now, seen between two looks at the records.

Jobs go on meanwhile. Of a volume that an unfinished job needs, or that a job has touched between
the two looks at the records, nothing is said: what was seen of it may be right by the other.
"""

import dataclasses
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Final

from messages import errors, findings
from messages.findings import Finding, FindingKind
from messages.resources import VolumeStatus
from worker import backend as backends
from worker.drivers import base as drivers
from worker.reconciliation import serving
from worker.store import connections, database
from worker.store import reconciliation as records
from worker.targets import base as targets

ABANDONED_AFTER: Final = 60.0
"""Seconds after the end of its lease that a running job counts as abandoned: one is taken over
within seconds where a worker has a free slot."""

_KNOWN: Final = frozenset(map(str, VolumeStatus))
_STORED: Final = frozenset(
    {
        VolumeStatus.AVAILABLE,
        VolumeStatus.IN_USE,
        VolumeStatus.ATTACHING,
        VolumeStatus.DETACHING,
        VolumeStatus.EXTENDING,
        VolumeStatus.ERROR_EXTENDING,
        VolumeStatus.MAINTENANCE,
    }
)
"""Statuses in which a volume must be on the storage."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Marks:
    """The records at one moment."""

    volumes: Mapping[uuid.UUID, records.Volume]
    needed: set[uuid.UUID]

    def quiet(self, volume_id: uuid.UUID) -> str | None:
        """What a volume is like while no job works on it; None while one does."""
        volume = self.volumes.get(volume_id)
        if volume_id in self.needed or (volume is not None and volume.is_held):
            return None
        return "" if volume is None else volume.mark


async def take(store: database.Database, backend: backends.Backend) -> list[Finding]:
    """What is wrong at a backend; nothing is changed."""
    before = await _marks(store, backend)
    found = [finding async for finding in _all(store, backend, before)]
    after = await _marks(store, backend)
    return [one for one in found if one.volume_id is None or _is_sure(one.volume_id, before, after)]


async def take_target(store: database.Database, backend: backends.Backend) -> list[Finding]:
    """The part of :func:`take` that is about what the target serves."""
    before = await _marks(store, backend)
    found = [finding async for finding in _served(store, backend, before)]
    after = await _marks(store, backend)
    return [one for one in found if one.volume_id is None or _is_sure(one.volume_id, before, after)]


async def _marks(store: database.Database, backend: backends.Backend) -> _Marks:
    return _Marks(
        await records.volumes(store, backend.address),
        await records.needed(store, backend.address),
    )


def _is_sure(volume_id: uuid.UUID, before: _Marks, after: _Marks) -> bool:
    mark = before.quiet(volume_id)
    return mark is not None and mark == after.quiet(volume_id)


async def _all(
    store: database.Database, backend: backends.Backend, before: _Marks
) -> AsyncIterator[Finding]:
    for finding in _unreadable(backend.address, before.volumes.values()):
        yield finding
    async for finding in _contradictions(store, backend.address):
        yield finding
    if backend.error is not None:
        yield down(backend.address, "backend", backend.error)
        return
    async for finding in _served(store, backend, before):
        yield finding
    async for finding in _stored(store, backend, before):
        yield finding


def new(
    kind: FindingKind, address: str, subject: object, what: str, volume_id: uuid.UUID | None = None
) -> Finding:
    """A finding with the action for its kind."""
    return Finding(
        kind=kind,
        address=address,
        subject=str(subject),
        volume_id=volume_id,
        what=what,
        action=findings.action_for(kind),
    )


def down(address: str, part: str, error: errors.VolumeWorkerError) -> Finding:
    """The finding that a part of a backend cannot be asked."""
    return new(FindingKind.BACKEND_DOWN, address, part, f"the {part} is down: {error.message}")


def _unreadable(address: str, volumes: Iterable[records.Volume]) -> Iterator[Finding]:
    for volume in volumes:
        if volume.status not in _KNOWN:
            what = f"the volume's status {volume.status!r} is none that this version knows"
            yield new(FindingKind.UNREADABLE_RECORD, address, volume.id, what, volume.id)


async def _contradictions(store: database.Database, address: str) -> AsyncIterator[Finding]:
    """Where the records say by themselves that something is wrong."""
    for volume in await records.misplaced(store, address):
        kind = FindingKind.STUCK_STATUS if volume.is_stuck else FindingKind.WRONG_STATUS
        reason = "no job works on it" if volume.is_stuck else "its attachments say otherwise"
        what = f"the volume is {volume.status}, and {reason}: it belongs to {volume.belongs}"
        yield new(kind, address, volume.id, what, volume.id)
    for left in await connections.leftovers(store, address):
        what = f"no job ends the export of volume {left.volume_id}, which nobody needs"
        if left.connection_id is not None:
            what = (
                f"no job ends connection {left.connection_id} of volume {left.volume_id}, or its"
                " export"
            )
        yield new(FindingKind.LEFT_CONNECTION, address, left.subject, what, left.volume_id)
    for job in await records.abandoned(store, address, seconds=ABANDONED_AFTER):
        what = (
            f"the lease of this {job.method} ran out at {job.lease_until}, and no worker takes it"
            " up: is one running for its address?"
        )
        yield new(FindingKind.ABANDONED_JOB, address, job.id, what)


async def _served(
    store: database.Database, backend: backends.Backend, before: _Marks
) -> AsyncIterator[Finding]:
    exports = await serving.recorded(store, backend)
    try:
        differences = await backend.target.compare(exports, before.volumes.keys())
    except errors.VolumeWorkerError as error:
        yield down(backend.address, "target", error)
        return
    for one in differences:
        match one.fault:
            case targets.Fault.MISSING:
                kind = FindingKind.MISSING_EXPORT
            case targets.Fault.UNOWNED:
                kind = FindingKind.UNOWNED_EXPORT
        yield new(kind, backend.address, one.name, one.what, one.volume_id)


async def _stored(
    store: database.Database, backend: backends.Backend, before: _Marks
) -> AsyncIterator[Finding]:
    try:
        sizes = await backend.driver.list_volumes()
        listed = sizes if sizes is not None else await _ask_each(backend.driver, before)
    except errors.NotSupported:
        return
    except errors.VolumeWorkerError as error:
        yield down(backend.address, "driver", error)
        return
    for volume in before.volumes.values():
        size = listed.get(volume.id, 0)
        if volume.status in _STORED and size < volume.size_bytes:
            there = f"only {size} bytes" if size else "nothing"
            what = f"the volume should have {volume.size_bytes} bytes, and its storage has {there}"
            yield new(FindingKind.MISSING_STORAGE, backend.address, volume.id, what, volume.id)
    strangers = listed.keys() - before.volumes.keys()
    # Two backends may share a storage.
    for volume_id in strangers - await records.recorded(store, strangers):
        what = (
            f"the storage has {listed[volume_id]} bytes under the name of volume {volume_id},"
            " which is not recorded: look what it is, and remove it by hand"
        )
        yield new(FindingKind.UNOWNED_STORAGE, backend.address, volume_id, what, volume_id)


async def _ask_each(driver: drivers.Driver, before: _Marks) -> dict[uuid.UUID, int]:
    found = {}
    for volume in before.volumes.values():
        size = await driver.find_volume(
            drivers.Volume(
                volume.id,
                volume.name,
                volume.size_bytes,
                volume.metadata,
                volume.provider_location,
            )
        )
        found[volume.id] = size or 0
    return {volume_id: size for volume_id, size in found.items() if size}
