"""Cancelling, as tests do it over and over; and what a cancelled job is to look like."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.services import amqp, volumes


async def send(caller: amqp.Caller, at: str, job: amqp.Sent) -> amqp.Sent:
    """Asks for a job to be cancelled, at any address."""
    return await caller.send("cancel_job", at, {"job_id": job.message_id})


async def check(caller: amqp.Caller, cancelling: amqp.Sent, job: amqp.Sent) -> dict[str, Any]:
    """Waits for both answers: the job has ended as cancelled. Returns the Job."""
    reply = await caller.result(cancelling)
    assert reply.body["ok"], reply.body
    record: dict[str, Any] = reply.body["result"]
    assert record["id"] == job.message_id
    assert record["state"] == "cancelled", record
    assert record["finished_at"] is not None
    own = (await caller.result(job)).body
    assert own["ok"] is False
    for error in (own["error"], record["error"]):
        assert error["code"] == "Cancelled"
        assert error["retryable"] is False
    return record


async def cancel(caller: amqp.Caller, at: str, job: amqp.Sent) -> dict[str, Any]:
    """Cancels a job that has not ended; returns the Job, which is cancelled."""
    return await check(caller, await send(caller, at, job), job)


async def state(caller: amqp.Caller, at: str, job: amqp.Sent) -> Mapping[str, Any]:
    """The Job as get_job gives it."""
    return await caller.call("get_job", at, {"job_id": job.message_id})


async def wait_for(
    caller: amqp.Caller, at: str, job: amqp.Sent, **wanted: Any
) -> Mapping[str, Any]:
    """Waits until members of the Job have these values."""
    return await wait_until(
        caller,
        at,
        job,
        lambda record: all(record[name] == value for name, value in wanted.items()),
    )


async def wait_until(
    caller: amqp.Caller, at: str, job: amqp.Sent, is_so: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any]:
    """Waits until something is so of the Job."""
    deadline = time.monotonic() + amqp.TIMEOUT
    found: Mapping[str, Any] = {}
    while time.monotonic() < deadline:
        # It may not have been stored yet.
        with contextlib.suppress(amqp.Failed):
            found = await state(caller, at, job)
            if is_so(found):
                return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def filled_pair(
    made: volumes.Volumes, source_at: str, destination_at: str, size: int
) -> tuple[volumes.Volume, volumes.Volume]:
    """Two volumes, of which the first is full of data."""
    source = await made.create(source_at, size)
    await made.write(source, {0: b"d" * size})
    return source, await made.create(destination_at, size)


async def start_copy(caller: amqp.Caller, at: str, **args: Any) -> amqp.Sent:
    """A copy that moves bytes; returns when it does."""
    sent = await caller.send("copy_volume_data", at, args, headers={"status-updates": True})
    await amqp.eventually(
        lambda: any(status.body["progress"] for status in caller.statuses(sent)), what="progress"
    )
    return sent


async def assert_free(made: volumes.Volumes, *those: volumes.Volume) -> None:
    """Nobody has anything of these volumes, or does anything with them."""
    for volume in those:
        record = await made.record(volume)
        assert record["status"] == "available"
        assert record["attach_status"] == "detached"
        assert record["connections"] == record["attachments"] == []
        assert record["exported"] is False
