"""Volumes and attachments: their records and their statuses."""

import enum
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pydantic

from messages import errors, resources
from messages.resources import VolumeStatus
from worker.store import acceptance, database, jobs


class Export(enum.StrEnum):
    """Who asked for a volume's export."""

    NONE = "none"
    IMPLICIT = "implicit"
    """A connection: it goes with the last one."""
    EXPLICIT = "explicit"
    """``create_export``: it stays until it is removed."""


class AttachmentStatus(enum.StrEnum):
    """How far an attachment has come."""

    ATTACHING = "attaching"
    ATTACHED = "attached"


class Volume(resources.Volume):
    """A volume's record with what only workers use of it."""

    seq: int
    export: Export
    export_job: uuid.UUID | None
    created_by: uuid.UUID
    status_job: uuid.UUID | None
    previous_status: VolumeStatus | None

    _record: Mapping[str, Any] = pydantic.PrivateAttr(default_factory=dict)
    """As the database made it, and as it is sent."""

    def event(self) -> dict[str, Any]:
        """The body of its event."""
        return {"at": self._record["updated_at"], "seq": self.seq, "volume": self._record}


def from_row(row: database.Row) -> Volume:
    """A volume from its row."""
    volume = Volume.model_validate({**row["record"], **{name: row[name] for name in _INTERNAL}})
    volume._record = row["record"]  # noqa: SLF001 - made here alone
    return volume


_INTERNAL = ("seq", "export", "export_job", "created_by", "status_job", "previous_status")


async def find(store: database.Database, volume_id: uuid.UUID) -> Volume | None:
    """One volume, or None."""
    row = await store.row("get_volume", volume_id)
    return None if row is None else from_row(row)


async def get(store: database.Database, volume_id: uuid.UUID) -> Volume:
    """One volume.

    Raises:
        VolumeNotFound: there is none.
    """
    volume = await find(store, volume_id)
    if volume is None:
        raise not_found(volume_id)
    return volume


def not_found(volume_id: object) -> errors.VolumeNotFound:
    """The error that says which volume there is none of."""
    return errors.VolumeNotFound(f"there is no volume {volume_id}", volume_id=str(volume_id))


async def record(store: database.Database, volume_id: uuid.UUID) -> Mapping[str, Any]:
    """One volume's record, as it is sent.

    Raises:
        VolumeNotFound: there is none.
    """
    row = await store.row("get_volume", volume_id)
    if row is None:
        raise not_found(volume_id)
    found: Mapping[str, Any] = row["record"]
    return found


async def records(
    store: database.Database,
    *,
    address: str | None,
    status: str | None,
    after: uuid.UUID | None,
    limit: int,
) -> list[Mapping[str, Any]]:
    """Volumes' records by id, as they are sent."""
    rows = await store.fetch("list_volumes", address, status, after, limit)
    return [row["record"] for row in rows]


async def begin(
    store: database.Database,
    job: jobs.Job,
    new: acceptance.NewVolume,
    *,
    begun: Mapping[str, Any] | None = None,
) -> Volume:
    """Makes the record of a volume that ``job`` is about to create, ``creating``.

    ``begun`` is its row, where it was made when the job was accepted.

    Raises:
        VolumeExists: another job's volume has that id.
        LeaseLost: the job is no longer this worker's.
    """
    if begun is not None:
        return from_row(begun)
    made = await store.together(_begin_all, (job, new), keys=lambda one: [one[1].id])
    if made is None:
        there = await find(store, new.id)
        if there is None or there.created_by == job.id:
            raise database.LeaseLost("begin_volumes")
        raise errors.VolumeExists(f"volume {new.id} exists", volume_id=str(new.id))
    return made


async def _begin_all(
    store: database.Database, new: Sequence[tuple[jobs.Job, acceptance.NewVolume]]
) -> Sequence[Volume | None]:
    rows = await store.fetch(
        "begin_volumes",
        [job.id for job, _ in new],
        [job.lease_token for job, _ in new],
        [one.id for _, one in new],
        [one.name for _, one in new],
        [one.size_bytes for _, one in new],
        [dict(one.metadata) for _, one in new],
        [job.address for job, _ in new],
    )
    found = {row["id"]: from_row(row) for row in rows}
    return [found.get(one.id) for _, one in new]


async def take(
    store: database.Database,
    job: jobs.Job,
    volume_id: uuid.UUID,
    *,
    allowed: Collection[VolumeStatus],
    status: VolumeStatus,
    attach_status: resources.AttachStatus | None = None,
) -> Volume:
    """Moves a volume into a passing status, by compare-and-set; the job holds it until it ends.

    Raises:
        VolumeNotFound: there is no such volume.
        InvalidVolumeStatus: its status is none of ``allowed``.
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.row(
        "take_volume", job.id, job.lease_token, volume_id, list(allowed), status, attach_status
    )
    if row is None:
        now = await get(store, volume_id)
        if now.status in allowed or now.status_job == job.id:
            raise database.LeaseLost("take_volume")
        raise invalid_status(volume_id, now.status)
    return from_row(row)


def invalid_status(volume_id: object, status: str) -> errors.InvalidVolumeStatus:
    """The error that says which status stands in the way."""
    return errors.InvalidVolumeStatus(
        f"volume {volume_id} is {status}", volume_id=str(volume_id), status=str(status)
    )


async def set_export(
    store: database.Database,
    job: jobs.Job,
    volume_id: uuid.UUID,
    export: Export,
    provider_location: str | None = None,
) -> Volume:
    """Records who asked for the export.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.own(
        "set_export", job.id, job.lease_token, volume_id, export, provider_location
    )
    return from_row(row)


async def begin_attachment(
    store: database.Database,
    job: jobs.Job,
    attachment_id: uuid.UUID,
    *,
    volume_id: uuid.UUID,
    instance_uuid: uuid.UUID | None,
    host_name: str | None,
    mountpoint: str,
    mode: str,
) -> resources.Attachment:
    """Records an attachment, ``attaching``; the one that is there already will do.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.own(
        "begin_attachment",
        job.id,
        job.lease_token,
        attachment_id,
        volume_id,
        instance_uuid,
        host_name,
        mountpoint,
        mode,
    )
    return resources.Attachment.model_validate(row["attachment"])


async def set_attachment(
    store: database.Database, job: jobs.Job, attachment_id: uuid.UUID, status: AttachmentStatus
) -> resources.Attachment:
    """Changes an attachment's status.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.own("set_attachment", job.id, job.lease_token, attachment_id, status)
    return resources.Attachment.model_validate(row["attachment"])


async def end_attachments(
    store: database.Database,
    job: jobs.Job,
    volume_id: uuid.UUID,
    attachment_id: uuid.UUID | None,
) -> None:
    """Removes a volume's attachment, or all of them."""
    await store.fetch("end_attachments", job.id, job.lease_token, volume_id, attachment_id)
