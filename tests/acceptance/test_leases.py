"""Leases that are renewed while jobs come and go."""

import asyncio
import time

from tests.services import amqp, workers
from tests.services import volumes as volumes_service
from tests.services.volumes import MIB


async def test_no_answer_is_lost_to_a_renewal_that_comes_while_a_job_ends(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    worker = await start_worker("host-a", lease=3)
    made = [await volumes.create(worker.at("sim"), MIB) for _ in range(16)]
    end = time.monotonic() + 10
    connector = {"host": "c", "initiator": volumes_service.INITIATOR, "connection_key": "k"}

    async def connect_and_terminate(volume: volumes_service.Volume) -> None:
        args = {**volume.at, "connector": connector}
        while time.monotonic() < end:
            await caller.call("initialize_connection", volume.address, args)
            await caller.call("terminate_connection", volume.address, args)

    await asyncio.gather(*map(connect_and_terminate, made))
    assert [line for line in worker.log_lines() if line["event"] == "job.lease_lost"] == []
