"""``volume-worker backend``: addresses with their state; one that is not used can be removed."""

import pathlib
from typing import Any

import aio_pika
import aio_pika.exceptions

from tests.services import amqp, command, environment, workers
from tests.services import volumes as volumes_service
from tests.services.volumes import MIB


async def _list(config: pathlib.Path) -> dict[str, dict[str, Any]]:
    ended = await command.run("backend", "list", "--json", "--config", config)
    assert ended.code == 0, ended
    return {one["address"]: one for one in ended.data["backends"]}


async def _remove(config: pathlib.Path, address: str) -> command.Ended:
    return await command.run("backend", "remove", address, "--config", config)


async def _has_queue(site: environment.Installation, address: str) -> bool:
    async with await aio_pika.connect(site.broker_url) as connection:
        channel = await connection.channel()
        try:
            await channel.declare_queue(f"{site.namespace}.{address}", passive=True)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
        return True


async def test_addresses_are_listed_with_what_they_have(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
) -> None:
    worker = await start_worker(stats_interval=0.5)
    fast, sim = worker.at("fast"), worker.at("sim")
    await volumes.create(fast, MIB)
    other = start_worker.new("host-b", backends={"later": workers.SIM})
    found = await _list(worker.config)
    assert set(found) == {fast, sim}
    one = found[fast]
    assert (one["state"], one["volumes"], one["workers"], one["waiting"]) == ("up", 1, 1, 0)
    assert (one["queued"], one["running"], one["configured"]) == (0, 0, True)
    assert one["free_capacity_bytes"] > 0
    assert found[sim]["free_capacity_bytes"] == "infinite"
    # Seen by another host: what is recorded, and what it is to have itself.
    found = await _list(other.config)
    assert found[fast]["configured"] is False
    later = found[other.at("later")]
    assert (later["state"], later["waiting"], later["configured"]) == ("down", None, True)
    await worker.terminate()
    await installation.rows("UPDATE backends SET updated_at = now() - interval '2 seconds'")
    await installation.rows(
        "UPDATE backends SET updated_at = now() - interval '1 hour' WHERE address = $1", sim
    )
    found = await _list(other.config)
    # However new its stats are: nobody takes requests there.
    assert (found[fast]["state"], found[sim]["state"]) == ("down", "down")
    ended = await command.run("backend", "list", "--config", other.config)
    assert fast in ended.stdout
    await worker.start()


async def test_an_address_is_removed_once_nothing_uses_it(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    installation: environment.Installation,
) -> None:
    worker = await start_worker(backends={"sim": workers.SIM})
    address = worker.at("sim")
    made = await caller.call("create_volume", address, {"volume": {"name": "v", "size_bytes": 1}})
    ended = await _remove(worker.config, address)
    assert ended.code == 1
    assert "1 volume(s)" in ended.stderr
    assert "1 worker(s)" in ended.stderr
    await caller.call("delete_volume", address, {"volume_id": made["id"]})
    await worker.terminate()
    sent = await caller.send("get_volume_stats", address)
    ended = await _remove(worker.config, address)
    assert ended.code == 1
    assert "1 request(s) wait" in ended.stderr
    # It was not cut off from its requests by the look.
    await worker.start()
    assert (await caller.result(sent)).body["ok"]
    await worker.terminate()
    await installation.rows(
        "UPDATE jobs SET state = 'queued', finished_at = NULL WHERE method = 'delete_volume'"
    )
    ended = await _remove(worker.config, address)
    assert ended.code == 1
    assert "1 unfinished job(s)" in ended.stderr
    await installation.rows("UPDATE jobs SET state = 'succeeded', finished_at = now()")
    ended = await _remove(worker.config, address)
    assert (ended.code, ended.stdout) == (0, f"removed {address}\n")
    assert not await _has_queue(installation, address)
    assert await installation.rows("SELECT FROM backends") == []
    ended = await _remove(worker.config, address)
    assert ended.code == 1
    assert "there is no address" in ended.stderr
    await worker.start()
    assert await _has_queue(installation, address)
    assert (await caller.call("get_volume_stats", address))["backend_state"] == "up"


async def test_a_queue_without_a_record_is_removed_too(
    start_worker: workers.Starter, installation: environment.Installation
) -> None:
    worker = await start_worker(backends={"sim": workers.SIM})
    await worker.terminate()
    await installation.rows("DELETE FROM backends")
    assert (await _remove(worker.config, worker.at("sim"))).code == 0
    assert not await _has_queue(installation, worker.at("sim"))


async def test_an_address_that_is_none_is_wrong_usage(start_worker: workers.Starter) -> None:
    worker = start_worker.new(backends={"sim": workers.SIM})
    assert (await _remove(worker.config, "fast")).code == 2
    assert (await _remove(worker.config, "host-a@never")).code == 1
