"""What jobs that have ended left behind: connections, and exports made for them alone.

Their undoing failed, because the target was away, or their worker was lost for good. Each is ended
by a job like any other, so that it waits its turn, is tried again, and is told of.
"""

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence

import structlog

from messages import envelope, requests
from worker import operations
from worker.store import connections, database, jobs

log = structlog.get_logger(__name__)

METHOD = "terminate_connection"

Accept = Callable[[Sequence[jobs.NewJob]], Awaitable[object]]


async def sweep(store: database.Database, address: str, accept: Accept) -> None:
    """Makes a job for each thing left at an address; not while a job is at work on its volume."""
    found = await connections.leftovers(store, address)
    if found:
        log.warning("leftovers.found", address=address, count=len(found))
        await accept([_job(address, leftover) for leftover in found])


def _job(address: str, leftover: connections.Leftover) -> jobs.NewJob:
    args: dict[str, object] = {"volume_id": str(leftover.volume_id), "force": True}
    if leftover.connection_id is not None:
        args["connection_id"] = str(leftover.connection_id)
    major, minor = requests.VERSION
    request = {"method": METHOD, "version": f"{major}.{minor}", "args": args}
    body = json.dumps(request).encode()
    read = envelope.read_body(body, len(body), address)
    identity = uuid.uuid4()
    operation = operations.OPERATIONS[METHOD]
    return jobs.NewJob(
        id=identity,
        method=METHOD,
        address=address,
        slot=operation.slot,
        body=body,
        properties={"message_id": str(identity)},
        fingerprint=read.fingerprint,
        deadline=None,
        reply_to=None,
        correlation_id=str(identity),
        status_updates=False,
        parent_job=None,
        needs=operation.needs(identity, read.args),
    )
