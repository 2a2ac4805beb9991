"""create_volume, delete_volume, extend_volume."""

import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from messages import errors, requests
from messages.resources import VolumeStatus
from worker import backend as backends
from worker.operations import base, exports
from worker.store import acceptance, connections, jobs, volumes

_DELETABLE: Final = (
    VolumeStatus.AVAILABLE,
    VolumeStatus.ERROR,
    VolumeStatus.ERROR_DELETING,
    VolumeStatus.ERROR_EXTENDING,
)
_NOTHING_MADE: Final = (
    errors.InsufficientSpace,
    errors.NotSupported,
    errors.InvalidRequest,
    errors.VolumeExists,
)
"""Errors by which a driver refuses a create before it has made anything."""


def _new_id(job_id: uuid.UUID, args: requests.CreateVolume) -> uuid.UUID:
    return args.volume.id or _id_made_of(job_id)


@functools.lru_cache(maxsize=1024)
def _id_made_of(job_id: uuid.UUID) -> uuid.UUID:
    # So that every attempt means the same volume.
    return uuid.uuid5(job_id, "volume")


def _new(job_id: uuid.UUID, args: requests.CreateVolume) -> acceptance.NewVolume:
    volume = args.volume
    return acceptance.NewVolume(
        _new_id(job_id, args), volume.name, volume.size_bytes, volume.metadata
    )


async def _create(context: base.Context) -> base.Outcome:
    backend = context.backend
    new = _new(context.job.id, context.args)
    volume = await volumes.begin(context.store, context.job, new, begun=context.begun)
    context.say_volume(volume.event())
    context.is_storage_touched = True
    try:
        update = await backend.driver.create_volume(base.reference(volume))
    except _NOTHING_MADE:
        context.on_failure = jobs.VolumeChange(volume.id, drop=True)
        raise
    backend.changed.set()
    columns = {"status": VolumeStatus.AVAILABLE, **base.updated(update)}
    return base.Outcome(change=jobs.VolumeChange(volume.id, columns))


async def _undo_create(context: base.Context) -> None:
    """Asks the storage whether anything was made: else there is nothing to keep a record of."""
    volume = await volumes.find(context.store, _new_id(context.job.id, context.args))
    if volume is None or volume.status_job != context.job.id:
        return
    driver = context.backend.driver
    if await driver.find_volume(base.reference(volume)) is None:
        # What was only begun is no volume, and is in the way.
        await driver.delete_volume(base.reference(volume))
        context.on_failure = jobs.VolumeChange(volume.id, drop=True)


async def _take_back_create(context: base.Context) -> None:
    args: requests.CreateVolume = context.args
    volume_id = _new_id(context.job.id, args)
    volume = await volumes.find(context.store, volume_id)
    if volume is None or volume.status_job != context.job.id:
        return
    if context.job.resumed or context.is_storage_touched:
        # Else what may be there of that id is somebody else's.
        await context.backend.driver.delete_volume(base.reference(volume))
        context.backend.changed.set()
    context.on_failure = jobs.VolumeChange(volume.id, drop=True)


async def _delete(context: base.Context) -> base.Outcome:
    backend = context.backend
    args: requests.DeleteVolume = context.args
    await _require_idle(context, args.volume_id)
    volume = await context.take(args.volume_id, VolumeStatus.DELETING, allowed=_DELETABLE)
    is_exported = volume.export is not volumes.Export.NONE
    if is_exported or not context.job.resumed:
        context.on_cancel = base.back(volume)
    if is_exported:
        await exports.end(context, backend, volume)
    # From here on nobody can tell what is left of its data.
    context.on_cancel = None
    await backend.driver.delete_volume(base.reference(volume))
    backend.changed.set()
    return base.Outcome(result={}, change=jobs.VolumeChange(volume.id, drop=True))


async def _take_back_delete(context: base.Context) -> None:
    args: requests.DeleteVolume = context.args
    volume = await volumes.find(context.store, args.volume_id)
    if volume is None or volume.status_job != context.job.id:
        return
    if volume.export is not volumes.Export.NONE:
        # Its export goes first, so its data was not touched.
        context.on_failure = base.back(volume)
        await exports.take_back_end(context, volume)


async def _extend(context: base.Context) -> base.Outcome:
    backend = context.backend
    args: requests.ExtendVolume = context.args
    before = await context.volume(args.volume_id)
    # An earlier attempt may have left the volume in its passing status.
    ours = before.status_job == context.job.id
    if before.status not in base.USABLE and not ours:
        raise volumes.invalid_status(before.id, before.status)
    if args.new_size_bytes < before.size_bytes:
        raise errors.InvalidRequest(
            f"volume {before.id} has {before.size_bytes} bytes; a volume never shrinks",
            member="args.new_size_bytes",
        )
    if args.new_size_bytes == before.size_bytes and not ours:
        return base.Outcome(result=await volumes.record(context.store, before.id))
    live = await connections.of_volume(context.store, before.id)
    if (live or before.attachments) and not backend.target.extends_online:
        raise errors.NotSupported(
            f"volume {before.id} is in use, and its target cannot extend it then; "
            "end its connections and attachments first"
        )
    volume = await context.take(before.id, VolumeStatus.EXTENDING, allowed=base.USABLE)
    try:
        await backend.driver.extend_volume(base.reference(volume), args.new_size_bytes)
    except _NOTHING_MADE:
        context.on_failure = base.back(volume)
        raise
    backend.changed.set()
    await _show_size(backend, volume, live)
    return base.Outcome(change=base.back(volume, size_bytes=args.new_size_bytes))


async def _show_size(
    backend: backends.Backend, volume: volumes.Volume, live: Sequence[connections.Connection]
) -> None:
    """Lets those who are connected know that the volume has grown."""
    if any(not connection.is_local for connection in live):
        path = exports.path_of(backend, volume)
        await backend.target.extend_volume(base.reference(volume), path)


async def _take_back_extend(context: base.Context) -> None:
    """Nothing shrinks a volume: the storage is asked how large it is now."""
    args: requests.ExtendVolume = context.args
    volume = await volumes.find(context.store, args.volume_id)
    if volume is None or volume.status_job != context.job.id:
        return
    backend = context.backend
    size = await backend.driver.find_volume(base.reference(volume))
    if size is None or size < volume.size_bytes:
        return
    is_done = size >= args.new_size_bytes
    context.on_failure = base.back(
        volume, size_bytes=args.new_size_bytes if is_done else volume.size_bytes
    )
    if is_done:
        backend.changed.set()
        await _show_size(backend, volume, await connections.of_volume(context.store, volume.id))


async def _require_idle(context: base.Context, volume_id: uuid.UUID) -> None:
    volume = await context.volume(volume_id)
    live = await connections.of_volume(context.store, volume_id)
    if live or volume.attachments:
        raise errors.VolumeIsBusy(
            f"volume {volume_id} has connections or attachments; end them first",
            volume_id=str(volume_id),
        )


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "create_volume": base.Operation(
        _create,
        lambda job_id, args: [
            acceptance.Need(_new_id(job_id, args), acceptance.LockMode.EXCLUSIVE, known=False)
        ],
        creates=_new,
        undo=_undo_create,
        take_back=_take_back_create,
    ),
    "delete_volume": base.Operation(
        _delete,
        lambda _, args: [
            acceptance.Need(
                args.volume_id, acceptance.LockMode.EXCLUSIVE, idle=True, statuses=_DELETABLE
            )
        ],
        take_back=_take_back_delete,
    ),
    "extend_volume": base.Operation(
        _extend,
        lambda _, args: [
            acceptance.Need(args.volume_id, acceptance.LockMode.EXCLUSIVE, statuses=base.USABLE)
        ],
        take_back=_take_back_extend,
    ),
}
