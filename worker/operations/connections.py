"""initialize_connection, terminate_connection; and the same for what a job attaches itself."""

import contextlib
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from messages import errors, requests
from worker import backend as backends
from worker.operations import base, exports
from worker.store import acceptance, connections, database, jobs, volumes
from worker.targets import base as targets

log = structlog.get_logger(__name__)


async def connect(
    context: base.Context,
    backend: backends.Backend,
    volume: volumes.Volume,
    connector: requests.Connector,
) -> connections.Connection:
    """Gives a connector its right to a volume; what a failure leaves half-made is undone."""
    is_local = connector.do_local_attach and connector.host == context.host
    if not is_local:
        backend.target.validate_connector(connector.properties())
    await _require_there(backend, volume)
    connection = await connections.begin(
        context.store,
        context.job,
        volume.id,
        connector,
        is_local=is_local,
        credentials={} if is_local else backend.target.new_credentials(),
    )
    try:
        if is_local:
            info = _local_info(backend, volume, connection)
        else:
            info = await _serve(context, backend, volume, connection)
    except BaseException:
        if connection.state is connections.State.MAKING:
            # Without the lease it is the next attempt's to undo.
            with contextlib.suppress(database.LeaseLost):
                await disconnect(context, backend, volume, [connection.id], force=True)
        raise
    return await connections.live(
        context.store,
        context.job,
        connection,
        driver_volume_type=info.driver_volume_type,
        data=info.data,
        secrets=info.secrets,
    )


async def disconnect(
    context: base.Context,
    backend: backends.Backend,
    volume: volumes.Volume,
    ids: Sequence[uuid.UUID] | None,
    *,
    force: bool,
) -> None:
    """Ends connections of a volume (all, without ``ids``), and an export made for them alone.

    The export also where there is no connection to end: an earlier attempt may have come so far.
    """
    reference = base.reference(volume)
    for connection in await connections.ending(context.store, context.job, volume.id, ids):
        if not connection.is_local:
            await backend.target.terminate_connection(
                reference, as_target_sees(connection), force=force
            )
        await connections.ended(context.store, context.job, connection)
    left = await connections.of_volume(context.store, volume.id)
    if any(not connection.is_local for connection in left):
        return
    now = await volumes.get(context.store, volume.id)
    if now.export is volumes.Export.IMPLICIT:
        await exports.remove(context, backend, now)


async def end(
    context: base.Context,
    backend: backends.Backend,
    volume: volumes.Volume,
    connector: requests.Connector,
) -> None:
    """Ends the connection of a connector, if there is one."""
    found = await connections.find_for(context.store, volume.id, connector)
    async with backend.serving.together():
        await disconnect(context, backend, volume, [] if found is None else [found.id], force=True)


def as_target_sees(connection: connections.Connection) -> targets.Connection:
    """A stored connection as its target knows it."""
    return targets.Connection(
        id=connection.id,
        connector=connection.connector,
        access_mode=targets.AccessMode(connection.access_mode),
        credentials=(connection.credentials or {}).get("made", {}),
    )


async def _require_there(backend: backends.Backend, volume: volumes.Volume) -> None:
    """Looks whether the storage has what the record says, before anybody is let in to it.

    Raises:
        DeviceUnavailable: it has not, or something else in its place.
    """
    size = await backend.driver.find_volume(base.reference(volume))
    if size is None or size < volume.size_bytes:
        raise errors.DeviceUnavailable(
            f"volume {volume.id} should have {volume.size_bytes} bytes, and its storage has "
            f"{'none of it' if size is None else size}: look what became of it there",
            volume_id=str(volume.id),
        )


async def _serve(
    context: base.Context,
    backend: backends.Backend,
    volume: volumes.Volume,
    connection: connections.Connection,
) -> targets.Info:
    if volume.export is volumes.Export.NONE:
        await exports.make(context, backend, volume, volumes.Export.IMPLICIT)
    return await backend.target.initialize_connection(
        base.reference(volume), exports.path_of(backend, volume), as_target_sees(connection)
    )


def _local_info(
    backend: backends.Backend, volume: volumes.Volume, connection: connections.Connection
) -> targets.Info:
    path = backend.driver.local_path(base.reference(volume))
    data = {
        "device_path": str(pathlib.Path(path).absolute()),
        "access_mode": str(connection.access_mode),
        "volume_id": str(volume.id),
        "encrypted": False,
    }
    return targets.Info("local", data)


async def _initialize(context: base.Context) -> base.Outcome:
    args: requests.InitializeConnection = context.args
    volume = await context.volume(args.volume_id)
    async with context.backend.serving.together():
        connection = await connect(context, context.backend, volume, args.connector)
    result = {
        "connection_id": str(connection.id),
        "driver_volume_type": connection.driver_volume_type,
        "data": connections.masked(connection),
    }
    return base.Outcome(
        result=result, change=jobs.VolumeChange(volume.id), connection_id=connection.id
    )


async def _undo(context: base.Context) -> None:
    args: requests.InitializeConnection = context.args
    volume = await context.volume(args.volume_id)
    found = await connections.find_for(context.store, volume.id, args.connector)
    # One that was there before is not this job's to end.
    if found is not None and found.made_by == context.job.id:
        async with context.backend.serving.together():
            await disconnect(context, context.backend, volume, [found.id], force=True)


async def _terminate(context: base.Context) -> base.Outcome:
    args: requests.TerminateConnection = context.args
    backend = context.backend
    volume = await context.volume(args.volume_id)
    ids = await _which(context, volume, args)
    async with backend.serving.together():
        await disconnect(context, backend, volume, ids, force=args.force)
    return base.Outcome(result={}, change=jobs.VolumeChange(volume.id))


async def _which(
    context: base.Context, volume: volumes.Volume, args: requests.TerminateConnection
) -> Sequence[uuid.UUID] | None:
    """The connections that a request names; None for all, [] for one that has ended."""
    if args.connection_id is not None:
        connection = await connections.find(context.store, args.connection_id)
        if connection is None or connection.volume_id != volume.id:
            raise errors.ConnectionNotFound(
                f"volume {volume.id} has no connection {args.connection_id}",
                connection_id=str(args.connection_id),
            )
        return [connection.id]
    if args.connector is None:
        return None
    found = await connections.find_for(context.store, volume.id, args.connector)
    return [] if found is None else [found.id]


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "initialize_connection": base.Operation(
        _initialize,
        lambda _, args: [
            acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL, statuses=base.USABLE)
        ],
        takes_parent=True,
        undo=_undo,
        take_back=_undo,
    ),
    "terminate_connection": base.Operation(
        _terminate,
        lambda _, args: [acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL)],
        takes_parent=True,
    ),
}
