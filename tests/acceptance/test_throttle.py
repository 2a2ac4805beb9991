"""throttle_job and copy_bytes_per_second: how fast copies may go, while they go."""

import asyncio
import time
import uuid
from typing import Any, Final

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, cancels, command, environment, holding, volumes, workers
from tests.services.volumes import MIB

SIZE: Final = 8 * MIB
CRAWL: Final = 256 * 1024
"""Bytes a second at which a copy takes half a minute."""


async def _started(hosts: Hosts, **args: Any) -> tuple[amqp.Sent, volumes.Volume]:
    at = hosts.a.at("fast")
    source, destination = await cancels.filled_pair(hosts.volumes, at, at, SIZE)
    pair = volumes.Volumes.pair(source, destination)
    return await cancels.start_copy(hosts.caller, at, **pair, **args), destination


async def _throttle(hosts: Hosts, job: amqp.Sent, rate: int | None) -> dict[str, Any]:
    said = {"job_id": job.message_id, "bytes_per_second": rate}
    return await hosts.caller.call("throttle_job", hosts.b.at("sim"), said)


async def test_a_slow_copy_is_let_go_from_any_address(hosts: Hosts) -> None:
    copy, destination = await _started(hosts, bytes_per_second=CRAWL)
    began = time.monotonic()
    job = await _throttle(hosts, copy, None)
    assert (job["id"], job["state"]) == (copy.message_id, "running")
    assert (await hosts.caller.result(copy)).body["ok"]
    assert time.monotonic() - began < SIZE / CRAWL / 2
    assert await hosts.volumes.content(destination) == b"d" * SIZE


async def test_a_fast_copy_is_slowed_down(hosts: Hosts) -> None:
    copy, _ = await _started(hosts, bytes_per_second=2 * MIB)
    await _throttle(hosts, copy, CRAWL)
    await asyncio.sleep(1)  # it is looked for twice a second
    at = hosts.a.at("fast")
    first = await cancels.state(hosts.caller, at, copy)
    await asyncio.sleep(2)
    second = await cancels.state(hosts.caller, at, copy)
    moved = second["progress"]["done_bytes"] - first["progress"]["done_bytes"]
    assert moved <= 4 * CRAWL
    await cancels.cancel(hosts.caller, at, copy)


async def test_a_job_that_waits_heeds_what_was_said_before_it_began(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    worker = start_worker.new("host-a", data_slots=1)
    holder = holding.Holder(worker)
    await worker.start()
    at = worker.at("fast")
    source, destination = await cancels.filled_pair(volumes, at, at, SIZE)
    other = await volumes.create(at, SIZE)
    async with holder.at("holding"):
        first = await caller.send("copy_volume_data", at, volumes.pair(source, other))
        await holder.held()
        slow = {**volumes.pair(source, destination), "bytes_per_second": CRAWL}
        waiting = await caller.send("copy_volume_data", at, slow)
        await cancels.wait_for(caller, at, waiting, state="queued")
        said = {"job_id": waiting.message_id, "bytes_per_second": None}
        assert (await caller.call("throttle_job", at, said))["state"] == "queued"
    began = time.monotonic()
    for copy in (first, waiting):
        assert (await caller.result(copy)).body["ok"]
    assert time.monotonic() - began < SIZE / CRAWL / 2
    assert await installation.rows("SELECT FROM jobs WHERE throttle IS NOT NULL") != []


async def test_what_was_said_outlives_the_worker(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    worker = await start_worker("host-a", lease=3)
    at = worker.at("fast")
    source, destination = await cancels.filled_pair(volumes, at, at, SIZE)
    copy = await cancels.start_copy(
        caller, at, **volumes.pair(source, destination), bytes_per_second=CRAWL
    )
    await worker.kill()
    said = {"job_id": copy.message_id, "bytes_per_second": None}
    throttling = await caller.send("throttle_job", at, said)
    await worker.start()
    assert (await caller.result(throttling)).body["ok"]
    assert (await caller.result(copy)).body["ok"]
    assert await volumes.content(destination) == b"d" * SIZE


async def test_the_copies_of_a_backend_share_what_it_may_move(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    limit = 2 * MIB
    backends = {"fast": {**workers.FAST, "copy_bytes_per_second": limit}}
    worker = await start_worker("host-a", backends=backends, data_slots=2)
    at = worker.at("fast")
    pairs = [await cancels.filled_pair(volumes, at, at, SIZE) for _ in range(2)]
    began = time.monotonic()
    copies = [await caller.send("copy_volume_data", at, volumes.pair(*pair)) for pair in pairs]
    for copy in copies:
        assert (await caller.result(copy)).body["ok"]
    # Both together, and not each: what may be caught up is left away.
    assert time.monotonic() - began > 2 * SIZE / limit * 0.8


@pytest.mark.parametrize("rate", [0, -1, "fast", True])
async def test_a_rate_that_is_none_is_refused(hosts: Hosts, rate: object) -> None:
    said = {"job_id": str(uuid.uuid4()), "bytes_per_second": rate}
    error = await hosts.caller.fails("throttle_job", hosts.a.at("fast"), said)
    assert error.code == "InvalidRequest"
    assert error.details["member"] == "args.bytes_per_second"


async def test_what_is_no_copy_is_not_throttled(hosts: Hosts) -> None:
    own = str(uuid.uuid4())
    said = {"job_id": own, "bytes_per_second": 1}
    error = await hosts.caller.fails("throttle_job", hosts.a.at("fast"), said, message_id=own)
    assert error.code == "InvalidRequest"
    said = {"job_id": str(uuid.uuid4()), "bytes_per_second": 1}
    error = await hosts.caller.fails("throttle_job", hosts.a.at("fast"), said)
    assert error.code == "JobNotFound"


async def test_a_copy_that_has_ended_comes_back_as_it_is(hosts: Hosts) -> None:
    copy, _ = await _started(hosts, bytes_per_second=4 * MIB)
    assert (await hosts.caller.result(copy)).body["ok"]
    before = await cancels.state(hosts.caller, hosts.a.at("fast"), copy)
    assert await _throttle(hosts, copy, 1) == before


async def test_an_operator_throttles_by_the_command_line(hosts: Hosts) -> None:
    copy, _ = await _started(hosts, bytes_per_second=CRAWL)
    job_id, config = str(copy.message_id), ("--config", hosts.a.config)
    wrong = await command.run("jobs", "throttle", job_id, "quick", *config)
    assert wrong.code == 2
    assert "512MiB" in wrong.stderr
    slower = await command.run("jobs", "throttle", job_id, "100KiB", *config)
    assert "is running" in slower.stdout
    free = await command.run("jobs", "throttle", job_id, "none", "--json", *config)
    assert free.data["id"] == job_id
    assert (await hosts.caller.result(copy)).body["ok"]
