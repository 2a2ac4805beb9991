"""create_export, ensure_export, remove_export."""

import asyncio
import contextlib
import pathlib
from collections.abc import Mapping
from typing import Final

from messages import errors, requests
from worker import backend as backends
from worker.operations import base
from worker.store import acceptance, connections, database, jobs, volumes


def path_of(backend: backends.Backend, volume: volumes.Volume) -> pathlib.Path:
    """Where the target finds the volume; nowhere, for a target that needs no path."""
    if not backend.target.needs_local_path:
        return pathlib.Path("/nonexistent")
    return backend.driver.local_path(base.reference(volume))


async def make(
    context: base.Context,
    backend: backends.Backend,
    volume: volumes.Volume,
    export: volumes.Export,
) -> None:
    """Exports a volume, recorded first; undone if it fails."""
    try:
        await volumes.set_export(context.store, context.job, volume.id, export)
        location = await backend.target.create_export(
            base.reference(volume), path_of(backend, volume)
        )
        await volumes.set_export(context.store, context.job, volume.id, export, location)
    except BaseException:
        # Without the lease it is the next attempt's to undo.
        with contextlib.suppress(database.LeaseLost):
            await _unmake(context, backend, volume)
        raise


async def _unmake(context: base.Context, backend: backends.Backend, before: volumes.Volume) -> None:
    if before.export is volumes.Export.NONE:
        await remove(context, backend, before)
    else:
        await volumes.set_export(context.store, context.job, before.id, before.export)


async def remove(context: base.Context, backend: backends.Backend, volume: volumes.Volume) -> None:
    """Ends a volume's export; the record goes last.

    Raises:
        LeaseLost: the job is no longer this worker's; the target was told nothing.
    """
    # Nobody asks for it any more: where the target fails now, the sweep ends it later.
    await volumes.set_export(context.store, context.job, volume.id, volumes.Export.IMPLICIT)
    await backend.target.remove_export(base.reference(volume))
    await volumes.set_export(context.store, context.job, volume.id, volumes.Export.NONE)


async def end(context: base.Context, backend: backends.Backend, volume: volumes.Volume) -> None:
    """Ends a volume's export, as somebody asked for; made again where that is cancelled."""
    async with backend.serving.together():
        try:
            await remove(context, backend, volume)
        except asyncio.CancelledError:
            with contextlib.suppress(database.LeaseLost):
                await make(context, backend, volume, volume.export)
            raise


async def take_back_end(context: base.Context, volume: volumes.Volume) -> None:
    """Makes an export again whose end an earlier attempt has begun."""
    is_half_ended = volume.export is volumes.Export.IMPLICIT and not volume.connections
    if context.job.resumed and is_half_ended:
        backend = context.backend
        async with backend.serving.together():
            await make(context, backend, volume, volumes.Export.EXPLICIT)


async def _create(context: base.Context) -> base.Outcome:
    args: requests.VolumeOnly = context.args
    volume = await context.volume(args.volume_id)
    async with context.backend.serving.together():
        await make(context, context.backend, volume, volumes.Export.EXPLICIT)
    return base.Outcome(change=jobs.VolumeChange(volume.id))


async def _undo(context: base.Context) -> None:
    args: requests.VolumeOnly = context.args
    volume = await context.volume(args.volume_id)
    # One that was there before stays, and so does one that somebody uses by now.
    if volume.export_job == context.job.id and not volume.connections:
        async with context.backend.serving.together():
            await remove(context, context.backend, volume)


async def _ensure(context: base.Context) -> base.Outcome:
    args: requests.VolumeOnly = context.args
    volume = await context.volume(args.volume_id)
    # What a connection asked for stays tied to it; what nobody asked for is asked for now.
    asked = volumes.Export.EXPLICIT
    export = asked if volume.export is volumes.Export.NONE else volume.export
    async with context.backend.serving.together():
        await make(context, context.backend, volume, export)
    return base.Outcome(change=jobs.VolumeChange(volume.id))


async def _remove(context: base.Context) -> base.Outcome:
    args: requests.VolumeOnly = context.args
    volume = await context.volume(args.volume_id)
    if await connections.of_volume(context.store, volume.id):
        raise errors.VolumeIsBusy(
            f"volume {volume.id} has connections; end them first", volume_id=str(volume.id)
        )
    if volume.export is volumes.Export.NONE:
        return base.Outcome(result={})
    await end(context, context.backend, volume)
    return base.Outcome(change=jobs.VolumeChange(volume.id))


async def _take_back_remove(context: base.Context) -> None:
    args: requests.VolumeOnly = context.args
    await take_back_end(context, await context.volume(args.volume_id))


def _needs(_job_id: object, args: requests.VolumeOnly) -> list[acceptance.Need]:
    return [acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL, statuses=base.USABLE)]


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "create_export": base.Operation(_create, _needs, undo=_undo, take_back=_undo),
    "ensure_export": base.Operation(_ensure, _needs, undo=_undo, take_back=_undo),
    "remove_export": base.Operation(
        _remove,
        lambda _, args: [acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL)],
        take_back=_take_back_remove,
    ),
}
