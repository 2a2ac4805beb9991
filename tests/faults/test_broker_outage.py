"""A broker that goes away and comes back, and one that takes nothing: real ones, of the tests' own.

The broker holds requests and answers; what was accepted is in the database, and goes on there.
"""

import asyncio
import collections
import signal
from collections.abc import Callable

import aio_pika
import pytest

from tests.services import amqp, private_broker, volumes
from tests.services.private import Site, ready
from tests.services.volumes import MIB

PACE = 2 * MIB
"""Bytes a second of a copy that is to outlast what happens meanwhile."""


def new_volume(size: int = MIB) -> tuple[str, dict[str, object]]:
    """A request for a volume."""
    return "create_volume", {"volume": {"name": "v", "size_bytes": size}}


async def two_volumes(site: Site, address: str, size: int) -> tuple[str, str]:
    """A volume with data all over, and an empty one."""
    async with amqp.Caller.open(
        site.installation.broker_url, site.installation.namespace
    ) as caller:
        made = volumes.Volumes(caller)
        source, destination = await made.create(address, size), await made.create(address, size)
        await made.write(source, {0: b"d" * size})
    return source.id, destination.id


async def consumers(site: Site, address: str) -> int:
    """How many consumers a request queue has, by the broker's word."""
    connection = await aio_pika.connect(site.installation.broker_url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(
            f"{site.installation.namespace}.{address}", passive=True
        )
        return queue.declaration_result.consumer_count or 0


async def in_state(site: Site, job: object, state: str, *, timeout: float = 60) -> None:
    """Waits until the record of a job says so."""
    async with asyncio.timeout(timeout):
        while await site.job_state(job) != state:
            await asyncio.sleep(0.1)


async def is_moving(site: Site, job: object, *, timeout: float = 60) -> None:
    """Waits until a copy moves bytes: what stands still then finds it at nothing else."""
    async with asyncio.timeout(timeout):
        while not await site.installation.rows(
            "SELECT FROM jobs WHERE id = $1 AND state = 'running' AND progress IS NOT NULL", job
        ):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "end", [pytest.param("stop", marks=pytest.mark.faults(sampled=False)), "kill"]
)
async def test_what_is_asked_around_the_end_of_the_broker_is_answered_once(
    node: private_broker.PrivateBroker, on_node: Site, end: str
) -> None:
    worker = await on_node.start_worker("host-a")
    at = worker.at("sim")
    ending: Callable[[], None] = getattr(node, end)
    await asyncio.to_thread(node.settle)
    async with on_node.client() as caller:
        before = await caller.call(*_call(at))
        asked = [asyncio.create_task(caller.call(*_call(at), timeout=90)) for _ in range(20)]
        posted = asyncio.create_task(on_node.box.send(at, *[new_volume()] * 20))
        await posted
        await asyncio.to_thread(ending)
        await ready(worker, on=False)
        asked += [asyncio.create_task(caller.call(*_call(at), timeout=90)) for _ in range(20)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(node.start)
        results = [before, *await asyncio.gather(*asked)]
    assert len({result["id"] for result in results}) == len(results)
    for reply in await on_node.box.only_results(posted.result()):
        assert reply.body["ok"]
    await ready(worker, on=True)
    assert await consumers(on_node, at) == 1
    rows = await on_node.installation.rows("SELECT attempt FROM jobs")
    assert [row["attempt"] for row in rows] == [1] * (len(results) + 20)


def _call(at: str) -> tuple[str, str, dict[str, object]]:
    method, args = new_volume()
    return method, at, args


async def test_while_the_broker_is_away_jobs_go_on_and_their_ends_are_told_after(
    node: private_broker.PrivateBroker, on_node: Site
) -> None:
    worker = await on_node.start_worker("host-a", data_slots=1)
    at, box = worker.at("fast"), on_node.box
    pairs = [await two_volumes(on_node, at, size) for size in (8 * MIB, MIB, MIB, MIB)]
    await box.open("#")
    await asyncio.to_thread(node.settle)
    [slow] = await box.send(at, copy_of(pairs[0], bytes_per_second=PACE))
    # They wait for the slot, and begin with the broker away.
    casts = await box.send(at, *map(copy_of, pairs[1:]), answered=False)
    for job in (slow, *casts):
        await known(on_node, job)
    await asyncio.to_thread(node.kill)
    waiting = [job for job in casts if await on_node.job_state(job) == "queued"]
    assert waiting
    await ready(worker, on=False)
    for job in (slow, *casts):
        await in_state(on_node, job, "succeeded")
    await asyncio.to_thread(node.start)
    [reply] = await box.only_results([slow])
    assert reply.body["ok"]
    for job, (_, destination) in zip((slow, *casts), pairs, strict=True):
        await event(on_node, f"job.{job}.succeeded")
        await event(on_node, f"volume.{destination}.available")
    await ready(worker, on=True)
    told = collections.Counter(one.key for one in box.events)
    assert [told[f"job.{job}.succeeded"] for job in (slow, *casts)] == [1] * 4
    # What was said meanwhile and is no longer true was not kept for the broker's return.
    assert [told[f"job.{job}.running"] for job in waiting] == [0] * len(waiting)
    rows = await on_node.installation.rows("SELECT attempt FROM jobs WHERE slot = 'data'")
    assert [row["attempt"] for row in rows] == [1] * 4


def copy_of(pair: tuple[str, str], **more: object) -> tuple[str, dict[str, object]]:
    """A request to copy a volume."""
    args = {"source_volume_id": pair[0], "destination_volume_id": pair[1], "remote": None}
    return "copy_volume_data", {**args, **more}


async def known(site: Site, job: object) -> None:
    """Waits until a job is stored."""
    async with asyncio.timeout(amqp.TIMEOUT):
        while await site.job_state(job) == "none":
            await asyncio.sleep(0.05)


async def event(site: Site, key: str) -> None:
    """Waits until an event has come into the letter box."""
    async with asyncio.timeout(amqp.TIMEOUT):
        while not [one for one in site.box.events if one.key == key]:
            await site.box.look()
            await asyncio.sleep(0.05)


# A broker under an alarm takes no message: its disk, or its memory, is full.


async def test_under_an_alarm_jobs_go_on_and_the_answers_come_when_it_is_over(
    node: private_broker.PrivateBroker, on_node: Site
) -> None:
    worker = await on_node.start_worker("host-a")
    at = worker.at("fast")
    source, destination = await two_volumes(on_node, at, 8 * MIB)
    copy = {"source_volume_id": source, "destination_volume_id": destination, "remote": None}
    [copying] = await on_node.box.send(at, ("copy_volume_data", {**copy, "bytes_per_second": PACE}))
    await asyncio.to_thread(node.set_alarm)
    await ready(worker, on=False)
    await in_state(on_node, copying, "succeeded")
    await on_node.box.look()
    assert not on_node.box.results(copying)
    await asyncio.to_thread(node.end_alarm)
    [reply] = await on_node.box.only_results([copying])
    assert reply.body["ok"]
    await ready(worker, on=True)
    # It was not sent over and over meanwhile, for the broker to read all of it now.
    assert len([one for one in on_node.box.replies if one.kind == "result"]) <= 2


async def test_a_worker_that_is_told_to_end_under_an_alarm_ends_in_time_and_loses_nothing(
    node: private_broker.PrivateBroker, on_node: Site
) -> None:
    worker = await on_node.start_worker("host-a", drain_timeout=1)
    at = worker.at("fast")
    source, destination = await two_volumes(on_node, at, 4 * MIB)
    copy = {"source_volume_id": source, "destination_volume_id": destination, "remote": None}
    [copying] = await on_node.box.send(at, ("copy_volume_data", {**copy, "bytes_per_second": PACE}))
    await asyncio.to_thread(node.set_alarm)
    await ready(worker, on=False)
    await in_state(on_node, copying, "succeeded")
    worker.signal(signal.SIGTERM)
    assert await worker.ended(25) == 0
    await asyncio.to_thread(node.end_alarm)
    await worker.start()
    [reply] = await on_node.box.only_results([copying])
    assert reply.body["ok"]
