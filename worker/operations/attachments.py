"""attach_volume, detach_volume."""

import uuid
from collections.abc import Mapping
from typing import Final

from messages import errors, requests, resources
from messages.resources import AttachStatus, VolumeStatus
from worker.operations import base
from worker.store import acceptance, jobs, volumes


async def _attach(context: base.Context) -> base.Outcome:
    backend = context.backend
    args: requests.AttachVolume = context.args
    before = await context.volume(args.volume_id)
    attachment_id = _attachment_id(context.job.id)
    for there in before.attachments:
        if _is_same(there, args) and there.id != attachment_id:
            return base.Outcome(result=there.to_wire())
    volume = await context.take(
        before.id,
        VolumeStatus.ATTACHING,
        allowed=[VolumeStatus.AVAILABLE],
        attach_status=AttachStatus.ATTACHING,
    )
    await volumes.begin_attachment(
        context.store,
        context.job,
        attachment_id,
        volume_id=volume.id,
        instance_uuid=args.instance_uuid,
        host_name=args.host_name,
        mountpoint=args.mountpoint,
        mode=args.mode,
    )
    await backend.driver.attach_volume(
        base.reference(volume), args.instance_uuid, args.host_name, args.mountpoint
    )
    attachment = await volumes.set_attachment(
        context.store, context.job, attachment_id, volumes.AttachmentStatus.ATTACHED
    )
    change = jobs.VolumeChange(
        volume.id, {"status": VolumeStatus.IN_USE, "attach_status": AttachStatus.ATTACHED}
    )
    return base.Outcome(result=attachment.to_wire(), change=change)


async def _undo_attach(context: base.Context) -> None:
    args: requests.AttachVolume = context.args
    volume = await volumes.find(context.store, args.volume_id)
    if volume is not None and volume.status_job == context.job.id:
        await context.backend.driver.detach_volume(base.reference(volume))
        await volumes.end_attachments(
            context.store, context.job, volume.id, _attachment_id(context.job.id)
        )


def _attachment_id(job_id: uuid.UUID) -> uuid.UUID:
    # Made from the job's id, so that every attempt means the same attachment.
    return uuid.uuid5(job_id, "attachment")


async def _detach(context: base.Context) -> base.Outcome:
    backend = context.backend
    args: requests.DetachVolume = context.args
    before = await context.volume(args.volume_id)
    ours = before.status_job == context.job.id
    known = {attachment.id for attachment in before.attachments}
    if args.attachment_id is not None and args.attachment_id not in known and not ours:
        raise errors.AttachmentNotFound(
            f"volume {before.id} has no attachment {args.attachment_id}",
            attachment_id=str(args.attachment_id),
        )
    if not known and not ours:
        return base.Outcome(result={})
    volume = await context.take(
        before.id,
        VolumeStatus.DETACHING,
        allowed=[VolumeStatus.IN_USE],
        attach_status=AttachStatus.DETACHING,
    )
    await backend.driver.detach_volume(base.reference(volume))
    await volumes.end_attachments(context.store, context.job, volume.id, args.attachment_id)
    change = jobs.VolumeChange(
        volume.id, {"status": VolumeStatus.AVAILABLE, "attach_status": AttachStatus.DETACHED}
    )
    return base.Outcome(result={}, change=change)


async def _take_back_detach(context: base.Context) -> None:
    args: requests.DetachVolume = context.args
    volume = await volumes.find(context.store, args.volume_id)
    if volume is not None and volume.status_job == context.job.id:
        for there in volume.attachments:
            await context.backend.driver.attach_volume(
                base.reference(volume), there.instance_uuid, there.host_name, there.mountpoint
            )


def _is_same(there: resources.Attachment, args: requests.AttachVolume) -> bool:
    return (
        there.instance_uuid == args.instance_uuid
        and there.host_name == args.host_name
        and there.mountpoint == args.mountpoint
        and there.mode == args.mode
    )


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "attach_volume": base.Operation(
        _attach,
        lambda _, args: [
            acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL, statuses=base.USABLE)
        ],
        undo=_undo_attach,
        take_back=_undo_attach,
    ),
    "detach_volume": base.Operation(
        _detach,
        lambda _, args: [acceptance.Need(args.volume_id, acceptance.LockMode.CONTROL)],
        take_back=_take_back_detach,
    ),
}
