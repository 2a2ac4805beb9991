"""Two worker processes of one host, with one configuration and one state_dir."""

import asyncio
import http

from tests.services import amqp, workers
from tests.services.volumes import MIB

NEW = {"volume": {"name": "v", "size_bytes": MIB}}


async def test_of_two_processes_one_serves_nbd_and_the_other_takes_over_when_it_is_gone(
    start_worker: workers.Starter, caller: amqp.Caller
) -> None:
    first = await start_worker("host-a", lease=3, leaves_something=True)
    second = start_worker.new("host-a", lease=3, leaves_something=True)
    # Its own is the HTTP port alone.
    text = second.config.read_text()
    second.config.write_text(text.replace(str(second.nbd_port), str(first.nbd_port)))
    second.spawn()
    while second.readyz()[0] != http.HTTPStatus.SERVICE_UNAVAILABLE:
        await asyncio.sleep(0.1)
    for _ in range(10):
        await caller.call("create_volume", first.at("fast"), NEW)
    await first.kill()
    async with asyncio.timeout(20):
        while not await second.is_ready():
            await asyncio.sleep(0.1)
    for _ in range(10):
        await caller.call("create_volume", first.at("fast"), NEW)
    made = (await caller.call("list_volumes", first.at("fast")))["volumes"]
    assert [volume["status"] for volume in made] == ["available"] * 20
    # Before the first one is cleared away, whose processes are known by the folder that both have.
    await second.terminate()
