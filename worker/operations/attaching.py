"""Attaching a volume to this host for the time of a job, wherever it lives."""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Self

import structlog

from messages import errors, requests, resources
from worker.connectors import base as connectors
from worker.operations import base, connections
from worker.store import database, jobs, volumes

log = structlog.get_logger(__name__)

REMOTE_TIMEOUT: Final = 60.0
"""Seconds that another host's worker has to answer."""


@contextlib.asynccontextmanager
async def attached(
    context: base.Context, volume: volumes.Volume, *, remote: bool, read_only: bool
) -> AsyncIterator[connectors.Device]:
    """The volume as a device of this host, for as long as the block runs.

    Every step is undone exactly once: the host lets go first, then access is withdrawn, with force
    where the block failed. An error of the undoing is raised only where there is no earlier one.
    """
    connector = await _connector(context, volume, remote=remote, read_only=read_only)
    async with _Undo() as undo:
        # Registered before it is tried: a call that timed out may have succeeded all the same.
        undo.push(lambda force: _withdraw(context, volume, connector, remote=remote, force=force))
        info = await _give_access(context, volume, connector, remote=remote)
        kind = context.connectors.get(info["driver_volume_type"])
        key = device_key(context.job.id, read_only=read_only)
        undo.push(lambda force: kind.disconnect_volume(info["data"], key=key, force=force))
        device: connectors.Device = await kind.connect_volume(
            info["data"], key=key, access=connectors.Access.STREAM, read_only=read_only
        )
        if not await kind.check_valid_device(device):
            raise errors.DeviceUnavailable(
                f"volume {volume.id} is attached but cannot be read", volume_id=str(volume.id)
            )
        yield device


def device_key(job_id: uuid.UUID, *, read_only: bool) -> str:
    """What a connector knows a job's source (read-only) or destination by."""
    return f"{job_id}-{'src' if read_only else 'dst'}"


async def withdraw(
    context: base.Context, volume: volumes.Volume, *, remote: bool, read_only: bool
) -> None:
    """Undoes what an earlier attempt may have left: first on this host, then the access."""
    connector = await _connector(context, volume, remote=remote, read_only=read_only)
    key = device_key(context.job.id, read_only=read_only)
    async with _Undo() as undo:
        undo.push(lambda _: _withdraw(context, volume, connector, remote=remote, force=True))
        for kind in context.connectors.all().values():
            undo.push(functools.partial(_let_go, kind, key))


async def _let_go(kind: connectors.Connector, key: str, _force: object) -> None:
    # How it was attached is not known any more, and need not be.
    await kind.disconnect_volume({}, key=key, force=True)


async def _connector(
    context: base.Context, volume: volumes.Volume, *, remote: bool, read_only: bool
) -> requests.Connector:
    mode = resources.AccessMode.READ_ONLY if read_only else resources.AccessMode.READ_WRITE
    properties: Mapping[str, Any] = await context.connectors.properties() if remote else {}
    return requests.Connector.model_validate(
        {
            **properties,
            "host": context.host,
            "mode": mode,
            "connection_key": str(context.job.id),
            "do_local_attach": not remote,
        }
    )


async def _give_access(
    context: base.Context,
    volume: volumes.Volume,
    connector: requests.Connector,
    *,
    remote: bool,
) -> Mapping[str, Any]:
    if remote:
        try:
            return await context.remote.call(
                "initialize_connection",
                volume.address,
                {"volume_id": str(volume.id), "connector": connector.properties()},
                parent_job=context.job.id,
                timeout=REMOTE_TIMEOUT,
            )
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            # The deadline of that call is this worker's patience, and not what the caller set.
            raise errors.DeviceUnavailable(
                f"the worker at {volume.address} did not give access: {error.message}",
                volume_id=str(volume.id),
            ) from error
    backend = context.backend_at(volume.address)
    async with backend.serving.together():
        connection = await connections.connect(context, backend, volume, connector)
    return {"driver_volume_type": connection.driver_volume_type, "data": connection.data}


async def _withdraw(
    context: base.Context,
    volume: volumes.Volume,
    connector: requests.Connector,
    *,
    remote: bool,
    force: bool,
) -> None:
    if not remote:
        await connections.end(context, context.backend_at(volume.address), volume, connector)
        return
    if not await jobs.renew(context.store, [context.job], lease=context.lease):
        # Whoever has the job now may have been given this access again.
        raise database.LeaseLost("terminate_connection")
    try:
        await context.remote.call(
            "terminate_connection",
            volume.address,
            {
                "volume_id": str(volume.id),
                "connector": connector.properties(),
                "force": force,
            },
            parent_job=context.job.id,
            timeout=REMOTE_TIMEOUT,
        )
    except errors.ReplyTimeout:
        # The broker has it, and it is carried out whenever that worker comes to it.
        log.warning("attaching.terminate_unanswered", volume_id=str(volume.id))


class _Undo:
    """Steps to be undone in reverse, each even if another fails."""

    def __init__(self) -> None:
        self._steps: list[Callable[[bool], Awaitable[None]]] = []

    def push(self, step: Callable[[bool], Awaitable[None]]) -> None:
        """Notes a step; it is called with whether the block failed."""
        self._steps.append(step)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        undoing = asyncio.create_task(self._undo_all(force=error is not None))
        try:
            first = await asyncio.shield(undoing)
        except asyncio.CancelledError:
            # Cancelled while undoing: what is left behind now would be left for good.
            await asyncio.wait({undoing})
            raise
        if error is None and first is not None:
            raise first

    async def _undo_all(self, *, force: bool) -> Exception | None:
        first: Exception | None = None
        while self._steps:
            step = self._steps.pop()
            try:
                await step(force)
            except Exception as failure:
                log.warning("attaching.undo_failed", error=str(failure))
                first = first or failure
        return first
