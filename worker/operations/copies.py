"""copy_volume_data: attach both volumes, copy, and undo exactly what was done.

The worker that gets the request does the copying. A volume of its own host it reaches directly;
one of another host it attaches through that host's worker, whose ``initialize_connection`` runs for
this job and passes its locks. The destination is attached first, then the source, read-only; what
was done is undone in reverse, each step even if the one before failed, and the first error is the
one that is told.
"""

import contextlib
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Final

import structlog

from messages import errors, requests, topology
from messages.resources import AccessMode, Progress, VolumeStatus
from worker.connectors import base as connectors
from worker.operations import attaching, base
from worker.store import acceptance, connections, jobs, volumes
from worker.transfer import budget, copying

log = structlog.get_logger(__name__)


async def _copy(context: base.Context) -> base.Outcome:
    args: requests.CopyVolumeData = context.args
    source = await volumes.get(context.store, args.source_volume_id)
    destination = await volumes.get(context.store, args.destination_volume_id)
    remote = _where(context.host, source, destination, args)
    await _check(context, source, destination)
    taken = await context.take(
        destination.id, VolumeStatus.MAINTENANCE, allowed=[VolumeStatus.AVAILABLE]
    )
    async with (
        attaching.attached(
            context, destination, remote=remote in ("dest", "both"), read_only=False
        ) as target,
        attaching.attached(
            context, source, remote=remote in ("src", "both"), read_only=True
        ) as origin,
    ):
        with _share(context) as share:
            copied = await _move(context, source, origin, target, share.rate)
    result = {
        "total_bytes": copied.total_bytes,
        "copied_bytes": copied.copied_bytes,
        "zeroed_bytes": copied.zeroed_bytes,
        "resumed_from_bytes": copied.resumed_from_bytes,
        "seconds": copied.seconds,
        "digest": copied.digest,
    }
    return base.Outcome(result=result, change=base.back(taken))


@contextlib.contextmanager
def _share(context: base.Context) -> Iterator[budget.Share]:
    """What the copy may move of what the backend's copies may: less, where it is told so."""
    asked, throttle = context.args.bytes_per_second, context.throttle
    with (
        context.backend.copies.share(throttle.limit(asked)) as share,
        throttle.heeded_by(lambda: share.ask_for(throttle.limit(asked))),
    ):
        yield share


async def _move(
    context: base.Context,
    source: volumes.Volume,
    origin: connectors.Device,
    target: connectors.Device,
    rate: copying.Rate,
) -> copying.Copied:
    """Copies, knowing whether the source may change meanwhile.

    A source that holds still is compared with directly, the kernel may copy it, and a copy goes on
    from where an earlier attempt safely came. Somebody may come and write to it all the same: then
    a mismatch means nothing, and it is copied once more as one that changes.
    """
    args: requests.CopyVolumeData = context.args
    # Before the connections are looked at: any that comes or goes later has raised it.
    seq = (await volumes.get(context.store, source.id)).seq
    source_is = await _as_it_is(context, source)

    async def keep(mark: int) -> None:
        await context.keep_checkpoint({"done_bytes": mark, "source": source_is})

    def copy(*, source_changes: bool, resume_from: int = 0) -> Awaitable[copying.Copied]:
        return copying.copy(
            context.connectors.execute,
            origin,
            target,
            size_bytes=source.size_bytes,
            verify=_verify(context, args),
            source_changes=source_changes,
            bytes_per_second=rate,
            on_progress=lambda progress: context.progress(_progress(progress)),
            resume_from=resume_from,
            on_mark=keep,
            on_child=context.on_child,
            # It is fed three times a lease, the last time perhaps long after the last renewal.
            lease_seconds=context.lease * 2 / 3,
        )

    if await _is_written(context, source.id):
        return await copy(source_changes=True)
    mark = _mark(context.job, source_is)
    try:
        return await copy(source_changes=False, resume_from=mark)
    except errors.DeviceUnavailable as error:
        if error.details.get("reason") != "verify_mismatch":
            raise
        has_changed = (await volumes.get(context.store, source.id)).seq != seq
        if not has_changed and not mark:
            raise
        log.info("copy.from_the_start", source_has_changed=has_changed, resumed_from=mark)
        return await copy(source_changes=has_changed)


async def _as_it_is(context: base.Context, source: volumes.Volume) -> dict[str, Any]:
    """What a checkpoint is good for: a source that nobody could write to since.

    The two volumes are those of the job, and the destination is the job's until its end.
    """
    return {
        "size_bytes": source.size_bytes,
        "writers": await connections.count_writers(context.store, source.id),
    }


def _mark(job: jobs.Job, source_is: Mapping[str, Any]) -> int:
    """The byte from which on a copy is still to be done, by its checkpoint."""
    checkpoint = job.checkpoint
    if checkpoint is None or checkpoint["source"] != source_is:
        return 0
    mark: int = checkpoint["done_bytes"]
    return mark


async def _is_written(context: base.Context, volume_id: uuid.UUID) -> bool:
    """Whether somebody else may write to a volume now; a connection does not show in its status."""
    now = await volumes.get(context.store, volume_id)
    others = _of_others(context, await connections.of_volume(context.store, volume_id))
    return (
        now.status is VolumeStatus.IN_USE
        or bool(now.attachments)
        or any(other.access_mode is AccessMode.READ_WRITE for other in others)
    )


def _of_others(
    context: base.Context, live: Sequence[connections.Connection]
) -> list[connections.Connection]:
    # An earlier attempt of this job may have left its own connection, which this one takes over.
    return [one for one in live if one.connector.get("connection_key") != str(context.job.id)]


async def _undo(context: base.Context) -> None:
    args: requests.CopyVolumeData = context.args
    first: errors.VolumeWorkerError | None = None
    for volume_id, read_only in (
        (args.source_volume_id, True),
        (args.destination_volume_id, False),
    ):
        volume = await volumes.find(context.store, volume_id)
        if volume is None:
            continue
        try:
            await attaching.withdraw(
                context,
                volume,
                remote=topology.host_of(volume.address) != context.host,
                read_only=read_only,
            )
        except errors.VolumeWorkerError as error:
            first = first or error
    if first is not None:
        raise first


def _where(
    host: str,
    source: volumes.Volume,
    destination: volumes.Volume,
    args: requests.CopyVolumeData,
) -> str | None:
    """Which of the two lives elsewhere, by the records; ``remote`` may not contradict them."""
    if source.id == destination.id:
        raise errors.InvalidRequest(
            "source and destination are the same volume", member="args.destination_volume_id"
        )
    away = (
        topology.host_of(source.address) != host,
        topology.host_of(destination.address) != host,
    )
    by_records = {
        (False, False): None,
        (True, False): "src",
        (False, True): "dest",
        (True, True): "both",
    }[away]
    if args.remote is not None and args.remote != by_records:
        raise errors.InvalidRequest(
            f"remote is {args.remote!r}, but seen from {host} it is {by_records!r}: the source "
            f"lives at {source.address}, the destination at {destination.address}",
            member="args.remote",
        )
    return by_records


async def _check(
    context: base.Context, source: volumes.Volume, destination: volumes.Volume
) -> None:
    if destination.size_bytes < source.size_bytes:
        raise errors.InvalidRequest(
            f"the destination has {destination.size_bytes} bytes, the source "
            f"{source.size_bytes}: nothing was copied",
            member="args.destination_volume_id",
        )
    if source.status not in base.USABLE:
        raise volumes.invalid_status(source.id, source.status)
    live = await connections.of_volume(context.store, destination.id)
    if _of_others(context, live) or destination.attachments:
        raise errors.VolumeIsBusy(
            f"volume {destination.id} has connections or attachments; end them first",
            volume_id=str(destination.id),
        )


def _verify(context: base.Context, args: requests.CopyVolumeData) -> bool:
    if args.verify is not None:
        return args.verify
    return bool(context.backend.options.copy_verify)


def _progress(progress: copying.Progress) -> Progress:
    return Progress(
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        bytes_per_second=progress.bytes_per_second,
    )


def _needs(_job_id: object, args: requests.CopyVolumeData) -> list[acceptance.Need]:
    source = acceptance.Need(
        args.source_volume_id, acceptance.LockMode.READ, at_home=False, statuses=base.USABLE
    )
    destination = acceptance.Need(
        args.destination_volume_id,
        acceptance.LockMode.EXCLUSIVE,
        at_home=False,
        idle=True,
        statuses=[VolumeStatus.AVAILABLE],
    )
    # The destination last: by that the records tell which of a job's volumes a copy has changed.
    # One volume twice is refused when it runs; it is to be locked once.
    return [destination] if source.volume_id == destination.volume_id else [source, destination]


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "copy_volume_data": base.Operation(_copy, _needs, slot=jobs.Slot.DATA, undo=_undo),
}
