"""throttle_job."""

from collections.abc import Mapping
from typing import Final

from messages import errors, requests, resources
from worker.operations import base, copies
from worker.store import jobs


async def _throttle(context: base.Context) -> base.Outcome:
    args: requests.ThrottleJob = context.args
    methods = list(copies.OPERATIONS)
    job = await jobs.throttle(
        context.store, args.job_id, args.bytes_per_second, methods=methods
    ) or await jobs.get(context.store, args.job_id)
    if job.state not in resources.ENDED and job.method not in methods:
        raise errors.InvalidRequest(
            f"{job.method} moves no data, so that there is nothing to slow down",
            member="args.job_id",
        )
    return base.Outcome(result=job.to_wire())


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "throttle_job": base.Operation(_throttle, lambda _job_id, _args: [], slot=jobs.Slot.WAITING),
}
