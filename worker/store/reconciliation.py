"""What the records say that must be there, and where they contradict themselves."""

import dataclasses
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final

from messages import errors
from messages.resources import VolumeStatus
from worker.store import database

PASSING: Final = frozenset(
    {
        VolumeStatus.CREATING,
        VolumeStatus.ATTACHING,
        VolumeStatus.DETACHING,
        VolumeStatus.DELETING,
        VolumeStatus.EXTENDING,
        VolumeStatus.MAINTENANCE,
    }
)
"""Statuses that a job holds a volume in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Volume:
    """As much of a volume's record as is compared; ``status`` may be none that is known."""

    id: uuid.UUID
    name: str
    size_bytes: int
    status: str
    metadata: Mapping[str, str]
    provider_location: str | None
    mark: str
    """Changes whenever a job has touched what is served of the volume."""
    is_held: bool
    """Whether an unfinished job needs it."""


async def volumes(store: database.Database, address: str) -> dict[uuid.UUID, Volume]:
    """The volumes of a backend."""
    names = [field.name for field in dataclasses.fields(Volume)]
    rows = await store.fetch("reconciled_volumes", address)
    return {row["id"]: Volume(**{name: row[name] for name in names}) for row in rows}


async def needed(store: database.Database, address: str) -> set[uuid.UUID]:
    """The volumes that unfinished jobs of a backend need, recorded or not."""
    return {row["volume_id"] for row in await store.fetch("needed_volumes", address)}


async def recorded(store: database.Database, volume_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
    """Those of some volumes that are recorded, at whatever address."""
    if not volume_ids:
        return set()
    return {row["id"] for row in await store.fetch("recorded_volumes", list(volume_ids))}


@dataclasses.dataclass(frozen=True, slots=True)
class Misplaced:
    """A volume whose status is not where it belongs, and no job will move it."""

    id: uuid.UUID
    status: str
    seq: int
    is_stuck: bool
    """Its status is a passing one; else it contradicts the attachments."""
    belongs: str


async def misplaced(store: database.Database, address: str) -> list[Misplaced]:
    """The volumes of a backend whose status nobody will settle."""
    names = [field.name for field in dataclasses.fields(Misplaced)]
    rows = await store.fetch("misplaced_volumes", address, sorted(PASSING))
    return [Misplaced(**{name: row[name] for name in names}) for row in rows]


async def settle(store: database.Database, volume: Misplaced) -> Mapping[str, Any] | None:
    """Moves a volume where it belongs; returns the event's body.

    None where something has touched it since it was looked at: nothing is changed then.
    """
    lost = errors.WorkerLost(f"the volume was left {volume.status}, and no job was at work on it")
    row = await store.row("settle_volume", volume.id, volume.seq, volume.belongs, lost.to_wire())
    return None if row is None else row["event"]


@dataclasses.dataclass(frozen=True, slots=True)
class AbandonedJob:
    """A running job that nobody runs."""

    id: uuid.UUID
    method: str
    lease_until: str


async def abandoned(
    store: database.Database, address: str, *, seconds: float
) -> list[AbandonedJob]:
    """The running jobs of a backend whose lease ran out ``seconds`` ago."""
    rows = await store.fetch("abandoned_jobs", address, seconds)
    return [AbandonedJob(row["id"], row["method"], row["lease_until"]) for row in rows]


async def begun(store: database.Database, host: str) -> dict[uuid.UUID, list[Mapping[str, int]]]:
    """The unfinished jobs that have begun at a host, with the processes that work for them."""
    return {row["id"]: row["children"] for row in await store.fetch("begun_jobs", host)}


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """An address as recorded."""

    address: str
    is_up: bool
    updated_at: str | None
    """When its last stats came; None where none ever did."""
    stats: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    volumes: int
    queued: int
    running: int


async def backends(store: database.Database, *, patience: float) -> list[Backend]:
    """Every address that is recorded; one whose last stats are ``patience`` seconds old is down."""
    names = [field.name for field in dataclasses.fields(Backend)]
    rows = await store.fetch("backends", patience)
    return [Backend(**{name: row[name] for name in names}) for row in rows]


async def remove_backend(store: database.Database, address: str) -> bool:
    """Forgets an address; False where it is in use, or not recorded."""
    return await store.row("remove_backend", address) is not None
