"""Volumes and attachments: made, extended, attached, detached, deleted."""

import asyncio
import uuid

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, workers
from tests.services.volumes import MIB

NOWHERE = "00000000-0000-4000-8000-00000000dead"
BACKENDS = pytest.mark.parametrize("backend", ["fast", "sim", "iser"])


@BACKENDS
async def test_a_given_id_is_used_and_used_once(hosts: Hosts, backend: str) -> None:
    volume_id = str(uuid.uuid4())
    args = {"volume": {"id": volume_id, "name": "v", "size_bytes": MIB}}
    record = await hosts.caller.call("create_volume", hosts.a.at(backend), args)
    volume = hosts.volumes.adopt(record)
    assert volume.id == volume_id
    for address in (hosts.a.at(backend), hosts.b.at("fast")):
        error = await hosts.caller.fails("create_volume", address, args)
        assert error.code == "VolumeExists"
    assert (await hosts.volumes.record(volume)) == record


@BACKENDS
async def test_a_volume_is_deleted_once(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    sent = await hosts.caller.send("delete_volume", volume.address, volume.at)
    assert (await hosts.caller.result(sent)).body["result"] == {}
    error = await hosts.caller.fails("delete_volume", volume.address, volume.at)
    assert error.code == "VolumeNotFound"
    error = await hosts.caller.fails("get_volume", volume.address, volume.at)
    assert error.code == "VolumeNotFound"
    again = await hosts.caller.send(
        "delete_volume", volume.address, volume.at, message_id=sent.message_id
    )
    assert (await hosts.caller.result(again)).body["result"] == {}


async def test_names_need_not_be_unique(hosts: Hosts) -> None:
    one = await hosts.volumes.create(hosts.a.at("fast"), name="same")
    two = await hosts.volumes.create(hosts.a.at("fast"), name="same")
    assert one.id != two.id


async def test_a_new_volume_is_empty_and_of_its_size(hosts: Hosts) -> None:
    for size in (1, 511, MIB + 3):
        volume = await hosts.volumes.create(hosts.a.at("fast"), size)
        content = await hosts.volumes.content(volume)
        # A device may be a little larger, where it comes in sectors.
        assert size <= len(content) < size + 4096
        assert not content.strip(b"\0")


async def test_a_deleted_volume_is_gone_from_the_disk(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    async with hosts.volumes.local(volume) as path:
        assert path.exists()
    await hosts.volumes.delete(volume)
    assert not path.exists()


# Extending


async def test_an_extended_volume_keeps_its_data_and_never_shrinks(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"), MIB)
    await hosts.volumes.write(volume, {0: b"kept"})
    record = await hosts.caller.call(
        "extend_volume", volume.address, {**volume.at, "new_size_bytes": 3 * MIB + 512}
    )
    assert record["size_bytes"] == 3 * MIB + 512
    assert record["status"] == "available"
    content = await hosts.volumes.content(volume)
    assert len(content) == 3 * MIB + 512
    assert content[:4] == b"kept"
    assert content[MIB:] == bytes(2 * MIB + 512)
    error = await hosts.caller.fails(
        "extend_volume", volume.address, {**volume.at, "new_size_bytes": MIB}
    )
    assert error.code == "InvalidRequest"
    same = await hosts.caller.call(
        "extend_volume", volume.address, {**volume.at, "new_size_bytes": 3 * MIB + 512}
    )
    assert same["size_bytes"] == 3 * MIB + 512
    error = await hosts.caller.fails(
        "extend_volume", volume.address, {**volume.at, "new_size_bytes": 2**60}
    )
    assert error.code == "InsufficientSpace"
    record = await hosts.volumes.record(volume)
    assert (record["status"], record["size_bytes"]) == ("available", 3 * MIB + 512)


async def test_a_connected_volume_is_extended_where_its_target_can(hosts: Hosts) -> None:
    nbd = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.volumes.connect(nbd)
    error = await hosts.caller.fails(
        "extend_volume", nbd.address, {**nbd.at, "new_size_bytes": 2 * MIB}
    )
    assert error.code == "NotSupported"
    same = await hosts.caller.call("extend_volume", nbd.address, {**nbd.at, "new_size_bytes": MIB})
    assert same["size_bytes"] == MIB
    sim = await hosts.volumes.create(hosts.a.at("sim"))
    await hosts.volumes.attach(sim)
    await hosts.volumes.connect(sim)
    record = await hosts.caller.call(
        "extend_volume", sim.address, {**sim.at, "new_size_bytes": 2 * MIB}
    )
    assert record["size_bytes"] == 2 * MIB
    assert record["status"] == "in-use"


# Attaching


@BACKENDS
async def test_attaching_and_detaching_change_the_status_and_nothing_else(
    hosts: Hosts, backend: str
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    instance = str(uuid.uuid4())
    attachment = await hosts.volumes.attach(volume, instance_uuid=instance, host_name="h")
    assert attachment["volume_id"] == volume.id
    assert attachment["instance_uuid"] == instance
    assert attachment["host_name"] == "h"
    assert attachment["mountpoint"] == "/dev/vdb"
    assert attachment["mode"] == "rw"
    assert attachment["status"] == "attached"
    record = await hosts.volumes.record(volume)
    assert (record["status"], record["attach_status"]) == ("in-use", "attached")
    assert record["attachments"] == [attachment]
    assert record["connections"] == []
    error = await hosts.caller.fails("delete_volume", volume.address, volume.at)
    assert error.code == "VolumeIsBusy"
    assert await hosts.caller.call("detach_volume", volume.address, volume.at) == {}
    record = await hosts.volumes.record(volume)
    assert (record["status"], record["attach_status"]) == ("available", "detached")
    assert record["attachments"] == []


async def test_the_same_attachment_again_is_the_same_and_another_is_refused(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    first = await hosts.volumes.attach(volume)
    assert await hosts.volumes.attach(volume) == first
    for other in (
        {"instance_uuid": str(uuid.uuid4())},
        {"mountpoint": "/dev/vdc"},
        {"host_name": "other"},
        {"mode": "ro"},
    ):
        args = {
            **volume.at,
            "instance_uuid": first["instance_uuid"],
            "mountpoint": first["mountpoint"],
            **other,
        }
        error = await hosts.caller.fails("attach_volume", volume.address, args)
        assert error.code == "InvalidVolumeStatus", other
    assert (await hosts.volumes.record(volume))["attachments"] == [first]


async def test_detaching_by_id_and_without(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    assert await hosts.caller.call("detach_volume", volume.address, volume.at) == {}
    attachment = await hosts.volumes.attach(volume)
    error = await hosts.caller.fails(
        "detach_volume", volume.address, {**volume.at, "attachment_id": NOWHERE}
    )
    assert error.code == "AttachmentNotFound"
    assert await hosts.volumes.status(volume) == "in-use"
    by_id = {**volume.at, "attachment_id": attachment["id"]}
    assert await hosts.caller.call("detach_volume", volume.address, by_id) == {}
    error = await hosts.caller.fails("detach_volume", volume.address, by_id)
    assert error.code == "AttachmentNotFound"
    assert await hosts.caller.call("detach_volume", volume.address, volume.at) == {}


async def test_of_many_attaches_at_once_one_is_made(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    sent = [
        await hosts.caller.send(
            "attach_volume",
            volume.address,
            {**volume.at, "instance_uuid": str(uuid.UUID(int=n)), "mountpoint": "/dev/vdb"},
        )
        for n in range(8)
    ]
    bodies = [(await hosts.caller.result(one)).body for one in sent]
    assert [body["ok"] for body in bodies].count(True) == 1
    codes = {body["error"]["code"] for body in bodies if not body["ok"]}
    assert codes == {"InvalidVolumeStatus"}
    assert len((await hosts.volumes.record(volume))["attachments"]) == 1


async def test_of_many_deletes_at_once_one_is_made(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    sent = [await hosts.caller.send("delete_volume", volume.address, volume.at) for _ in range(8)]
    bodies = [(await hosts.caller.result(one)).body for one in sent]
    assert [body["ok"] for body in bodies].count(True) == 1
    codes = {body["error"]["code"] for body in bodies if not body["ok"]}
    assert codes <= {"VolumeNotFound", "InvalidVolumeStatus"}


# A backend that cannot be set up


async def test_a_backend_that_is_not_set_up_says_so_and_recovers(
    start_worker: workers.Starter, caller: amqp.Caller
) -> None:
    broken = {"driver": "file", "target": "nbd", "directory": "{}/mounted/later/volumes"}
    worker = start_worker.new(backends={"fast": workers.FAST, "broken": broken})
    worker.spawn()
    checks = {"broker": True, "database": True, worker.at("fast"): True, worker.at("broken"): False}
    for _ in range(200):
        status, seen = await asyncio.to_thread(worker.readyz)
        if seen == checks:
            break
        await asyncio.sleep(0.1)
    assert seen == checks
    assert status == 503
    new = {"volume": {"name": "v", "size_bytes": MIB}}
    for method, args in (("create_volume", new), ("get_volume_stats", {})):
        error = await caller.fails(method, worker.at("broken"), args)
        assert error.code == "DriverNotInitialized"
        assert error.retryable is True
    cast = await caller.send("create_volume", worker.at("broken"), new, reply_to=None)
    letter = await caller.letter(cast)
    assert letter.headers["reason"] == "DriverNotInitialized"
    record = await caller.call("create_volume", worker.at("fast"), new)
    await caller.call("delete_volume", worker.at("fast"), {"volume_id": record["id"]})
    listed = await caller.call("list_volumes", worker.at("broken"))
    assert listed == {"volumes": []}

    (worker.folder / "mounted" / "later").mkdir(parents=True)
    for _ in range(30):
        sent = await caller.send("create_volume", worker.at("broken"), new)
        body = (await caller.result(sent)).body
        if body["ok"]:
            break
        assert body["error"]["code"] == "DriverNotInitialized"
        await asyncio.sleep(0.5)
    assert body["ok"]
    assert await worker.is_ready()
    # The retryable error is the answer to its own message_id for good.
    await caller.call("delete_volume", worker.at("broken"), {"volume_id": body["result"]["id"]})
