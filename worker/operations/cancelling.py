"""cancel_job."""

from collections.abc import Mapping
from typing import Final

from messages import errors, requests
from worker.operations import base
from worker.store import jobs


async def _cancel(context: base.Context) -> base.Outcome:
    args: requests.JobOnly = context.args
    if args.job_id == context.job.id:
        raise errors.InvalidRequest("a job cannot cancel itself", member="args.job_id")
    ended = await context.cancel(args.job_id)
    return base.Outcome(result=ended.to_wire())


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "cancel_job": base.Operation(_cancel, lambda _job_id, _args: [], slot=jobs.Slot.WAITING),
}
