"""``volume-worker jobs cancel|watch``, as an operator uses them."""

import asyncio
import uuid
from typing import Any, Final

from tests.acceptance.conftest import Hosts
from tests.services import amqp, cancels, command, volumes
from tests.services.volumes import MIB

SIZE: Final = 4 * MIB


async def _pair(hosts: Hosts) -> tuple[volumes.Volume, volumes.Volume]:
    source = await hosts.volumes.create(hosts.a.at("fast"), SIZE)
    await hosts.volumes.write(source, {0: b"d" * SIZE})
    return source, await hosts.volumes.create(hosts.a.at("fast"), SIZE)


async def _copy(hosts: Hosts, *pair: volumes.Volume, bytes_per_second: int) -> amqp.Sent:
    """A copy that runs."""
    args = {**volumes.Volumes.pair(*pair), "bytes_per_second": bytes_per_second}
    sent = await hosts.caller.send("copy_volume_data", hosts.a.at("fast"), args)
    await cancels.wait_for(hosts.caller, hosts.a.at("fast"), sent, state="running")
    return sent


async def _jobs(hosts: Hosts, *arguments: str, **options: Any) -> command.Ended:
    return await command.run("jobs", *arguments, "--config", hosts.b.config, **options)


async def test_a_job_is_cancelled_and_its_end_is_told(hosts: Hosts) -> None:
    source, destination = await _pair(hosts)
    sent = await _copy(hosts, source, destination, bytes_per_second=MIB // 4)
    ended = await _jobs(hosts, "cancel", str(sent.message_id))
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == f"{sent.message_id} is cancelled\n"
    assert (await hosts.caller.result(sent)).body["error"]["code"] == "Cancelled"
    assert await hosts.volumes.status(destination) == "available"
    assert hosts.a.leftovers() == []


async def test_a_finished_job_is_printed_unchanged_as_json(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    sent = await hosts.caller.send("create_export", volume.address, volume.at)
    await hosts.caller.result(sent)
    ended = await _jobs(hosts, "cancel", str(sent.message_id), "--json")
    assert ended.code == 0
    assert ended.data == await cancels.state(hosts.caller, volume.address, sent)
    assert ended.data["state"] == "succeeded"


async def test_an_unknown_job_can_be_neither_cancelled_nor_watched(hosts: Hosts) -> None:
    for what in ("cancel", "watch"):
        ended = await _jobs(hosts, what, str(uuid.uuid4()))
        assert (ended.code, ended.stdout) == (1, "")
        assert "JobNotFound" in ended.stderr or "there is no job" in ended.stderr
        assert (await _jobs(hosts, what, "x")).code == 2


async def test_a_cancel_that_takes_too_long_goes_on_without_the_command(hosts: Hosts) -> None:
    source, destination = await _pair(hosts)
    sent = await _copy(hosts, source, destination, bytes_per_second=MIB // 4)
    ended = await _jobs(hosts, "cancel", str(sent.message_id), "--timeout", "0.1")
    assert ended.code == (0 if "is cancelled" in ended.stdout else 1)
    await cancels.wait_for(hosts.caller, hosts.a.at("fast"), sent, state="cancelled")


async def test_a_job_is_watched_to_its_good_end(hosts: Hosts) -> None:
    source, destination = await _pair(hosts)
    sent = await _copy(hosts, source, destination, bytes_per_second=2 * MIB)
    ended = await _jobs(hosts, "watch", str(sent.message_id))
    assert ended.code == 0
    assert ended.stdout.splitlines()[-1].startswith(f"{sent.message_id} is succeeded")
    assert (await hosts.caller.result(sent)).body["ok"]


async def test_a_watched_job_that_is_cancelled_fails_the_command(hosts: Hosts) -> None:
    source, destination = await _pair(hosts)
    sent = await _copy(hosts, source, destination, bytes_per_second=MIB // 4)
    watching = asyncio.create_task(_jobs(hosts, "watch", str(sent.message_id), "--json"))
    await asyncio.sleep(1)
    assert not watching.done()
    await cancels.cancel(hosts.caller, hosts.c.at("fast"), sent)
    ended = await watching
    assert ended.code == 1
    assert ended.data["state"] == "cancelled"
    assert ended.data["error"]["code"] == "Cancelled"


async def test_a_job_that_has_ended_is_watched_for_no_time_at_all(hosts: Hosts) -> None:
    sent = await hosts.caller.send(
        "delete_volume", hosts.a.at("fast"), {"volume_id": str(uuid.uuid4())}
    )
    await hosts.caller.result(sent)
    ended = await _jobs(hosts, "watch", str(sent.message_id))
    assert ended.code == 1
    assert "is failed: VolumeNotFound" in ended.stdout
