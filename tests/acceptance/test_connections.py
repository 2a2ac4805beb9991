"""Connections: who gets in, who stays in, and what ends with whom."""

import asyncio
import contextlib
import os
import pathlib
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, clients, workers
from tests.services import tgtd as tgtd_service
from tests.services.volumes import INITIATOR, MIB

NOWHERE = "00000000-0000-4000-8000-00000000dead"
REAL = pytest.mark.parametrize("backend", ["fast", "iscsi"])
ALL = pytest.mark.parametrize("backend", ["fast", "iscsi", "sim", "iser"])


@pytest.fixture(autouse=True)
def _needs_tgtd(request: pytest.FixtureRequest) -> None:
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "iscsi":
        request.getfixturevalue("tgtd")


@contextlib.asynccontextmanager
async def _reading(session: clients.Session, pattern: int) -> AsyncIterator[list[bool]]:
    """Reads again and again while the block runs; the outcomes."""
    outcomes: list[bool] = []
    stop = asyncio.Event()

    async def read() -> None:
        while not stop.is_set():
            outcomes.append(await session.reads(pattern, 0, 65536))
            await asyncio.sleep(0.005)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.2)
    yield outcomes
    await asyncio.sleep(0.2)
    stop.set()
    await reading


@REAL
async def test_ending_one_connection_of_a_host_leaves_the_others_reads_undisturbed(
    hosts: Hosts, backend: str, tmp_path: pathlib.Path
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    await hosts.volumes.write(volume, {0: b"\x07" * MIB})
    first = await hosts.volumes.connect(volume, connection_key="one")
    second = await hosts.volumes.connect(volume, connection_key="two")
    assert first["connection_id"] != second["connection_id"]
    async with clients.session(first, tmp_path) as one, clients.session(second, tmp_path) as two:
        assert await one.reads(7, 0, MIB)
        async with _reading(two, 7) as outcomes:
            await hosts.volumes.disconnect(volume, first["connection_id"])
        assert len(outcomes) > 5
        assert all(outcomes)
        assert not await clients.gets_in(first, tmp_path)
        assert await two.writes(9, 0, 4096)
    record = await hosts.volumes.record(volume)
    assert [one["id"] for one in record["connections"]] == [second["connection_id"]]
    await hosts.volumes.disconnect(volume, second["connection_id"])
    assert not await clients.gets_in(second, tmp_path)


@REAL
async def test_force_for_one_connector_leaves_the_others_alone(
    hosts: Hosts, backend: str, tmp_path: pathlib.Path
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    connector = {"host": "client", "initiator": INITIATOR, "connection_key": "one"}
    first = await hosts.volumes.connect(volume, connection_key="one")
    second = await hosts.volumes.connect(volume, connection_key="two")
    async with clients.session(first, tmp_path), clients.session(second, tmp_path) as two:
        async with _reading(two, 0) as outcomes:
            await hosts.caller.call(
                "terminate_connection",
                volume.address,
                {**volume.at, "connector": connector, "force": True},
            )
        assert all(outcomes)
    assert not await clients.gets_in(first, tmp_path)


@ALL
async def test_force_without_a_connector_ends_all(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    for key in "abc":
        await hosts.volumes.connect(volume, connection_key=key)
    async with hosts.volumes.local(volume) if backend in ("fast", "iscsi") else _nothing():
        assert len((await hosts.volumes.record(volume))["connections"]) >= 3
    await hosts.volumes.disconnect_all(volume)
    record = await hosts.volumes.record(volume)
    assert record["connections"] == []
    assert record["exported"] is False


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


@ALL
async def test_the_same_connector_gets_the_same_connection(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    first = await hosts.volumes.connect(volume, connection_key="k", ip="10.0.0.1", odd=1)
    again = await hosts.volumes.connect(volume, connection_key="k", ip="10.0.0.2", os_type="x")
    assert again == first
    upper = await hosts.volumes.connect(volume, connection_key="k", initiator=INITIATOR.upper())
    assert upper["connection_id"] == first["connection_id"]
    others = [
        {"connection_key": "other"},
        {"connection_key": "k", "host": "other"},
        {"connection_key": "k", "initiator": f"{INITIATOR}-other"},
    ]
    ids = {(await hosts.volumes.connect(volume, **other))["connection_id"] for other in others}
    assert len(ids | {first["connection_id"]}) == 4
    assert len((await hosts.volumes.record(volume))["connections"]) == 4


async def test_connectors_with_long_names_are_told_apart(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    some = random.Random(7)
    host = "".join(chr(some.randrange(0x1F300, 0x1F5FF)) for _ in range(1024))
    wwpns = [f"{some.getrandbits(64):016x}" for _ in range(400)]
    long = {"host": host, "initiator": None, "wwpns": wwpns, "connection_key": host[::-1]}
    made = [
        (await hosts.volumes.connect(volume, **{**long, **changed}))["connection_id"]
        for changed in (
            {},
            {"wwpns": wwpns[::-1]},
            {"wwpns": wwpns[1:]},
            {"host": host[1:]},
            {"connection_key": host},
        )
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 4
    args = {**volume.at, "connector": long}
    await hosts.caller.call("terminate_connection", volume.address, args)
    left = {one["id"] for one in (await hosts.volumes.record(volume))["connections"]}
    assert left == set(made[2:])


@ALL
async def test_the_same_connector_in_another_mode_is_refused(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    first = await hosts.volumes.connect(volume)
    error = await hosts.caller.fails(
        "initialize_connection",
        volume.address,
        {**volume.at, "connector": {"host": "client", "initiator": INITIATOR, "mode": "ro"}},
    )
    assert error.code == "InvalidConnector"
    assert (await hosts.volumes.connect(volume)) == first
    record = await hosts.volumes.record(volume)
    assert [one["access_mode"] for one in record["connections"]] == ["rw"]


@REAL
async def test_a_read_only_connection_cannot_write(
    hosts: Hosts, backend: str, tmp_path: pathlib.Path
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    await hosts.volumes.write(volume, {0: b"\x05" * 65536})
    info = await hosts.volumes.connect(volume, mode="ro")
    assert info["data"]["access_mode"] == "ro"
    async with clients.session(info, tmp_path, read_only=True) as session:
        assert await session.reads(5, 0, 65536)
    try:
        async with clients.session(info, tmp_path) as session:
            assert not await session.writes(6, 0, 4096)
    except ConnectionError:
        pass  # the client would not even open it for writing
    writable = await hosts.volumes.connect(volume, connection_key="rw")
    async with clients.session(writable, tmp_path) as session:
        assert await session.writes(8, 65536, 4096)
    assert (await hosts.volumes.content(volume))[:65536] == b"\x05" * 65536


@REAL
async def test_a_stranger_does_not_get_in(
    hosts: Hosts, backend: str, tmp_path: pathlib.Path
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    info = await hosts.volumes.connect(volume)
    data = dict(info["data"])
    if backend == "fast":
        data["uri"] = data["uri"].replace(data["export"], str(uuid.uuid4()))
        assert not await clients.gets_in({**info, "data": data}, tmp_path)
        data["uri"] = info["data"]["uri"].replace(data["export"], volume.id)
        assert not await clients.gets_in({**info, "data": data}, tmp_path)
    else:
        stranger = "iqn.2004-10.org.example:stranger"
        assert not await clients.gets_in(info, tmp_path, initiator=stranger)
        for change in ({"auth_password": "wrong-wrong-16ch"}, {"auth_username": "wrong"}):
            assert not await clients.gets_in({**info, "data": data | change}, tmp_path)
    assert await clients.gets_in(info, tmp_path)


@ALL
async def test_an_implicit_export_ends_with_the_last_connection(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    assert (await hosts.volumes.record(volume))["exported"] is False
    first = await hosts.volumes.connect(volume, connection_key="one")
    second = await hosts.volumes.connect(volume, connection_key="two")
    await hosts.volumes.disconnect(volume, first["connection_id"])
    assert (await hosts.volumes.record(volume))["exported"] is True
    await hosts.volumes.disconnect(volume, second["connection_id"])
    record = await hosts.volumes.record(volume)
    assert record["exported"] is False
    assert record["provider_location"] is None


@ALL
async def test_an_export_that_was_asked_for_stays_until_it_is_removed(
    hosts: Hosts, backend: str
) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    for method in ("create_export", "create_export", "ensure_export"):
        record = await hosts.caller.call(method, volume.address, volume.at)
        assert record["exported"] is True
        assert record["status"] == "available"
    info = await hosts.volumes.connect(volume)
    error = await hosts.caller.fails("remove_export", volume.address, volume.at)
    assert error.code == "VolumeIsBusy"
    await hosts.volumes.disconnect(volume, info["connection_id"])
    assert (await hosts.volumes.record(volume))["exported"] is True
    await hosts.caller.call("remove_export", volume.address, volume.at)
    assert (await hosts.volumes.record(volume))["exported"] is False
    assert await hosts.caller.call("remove_export", volume.address, volume.at) == {}


async def test_an_export_asked_for_while_connected_stays_after_the_connection(
    hosts: Hosts,
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    info = await hosts.volumes.connect(volume)
    await hosts.caller.call("create_export", volume.address, volume.at)
    await hosts.volumes.disconnect(volume, info["connection_id"])
    assert (await hosts.volumes.record(volume))["exported"] is True
    await hosts.caller.call("remove_export", volume.address, volume.at)


@ALL
async def test_ending_what_has_ended_is_no_error(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    info = await hosts.volumes.connect(volume)
    by_id = {**volume.at, "connection_id": info["connection_id"]}
    by_connector = {**volume.at, "connector": {"host": "client", "initiator": INITIATOR}}
    for args in (by_id, by_id, by_connector, {**volume.at, "connector": None, "force": True}):
        assert await hosts.caller.call("terminate_connection", volume.address, args) == {}
    error = await hosts.caller.fails(
        "terminate_connection", volume.address, {**volume.at, "connection_id": NOWHERE}
    )
    assert error.code == "ConnectionNotFound"
    other = await hosts.volumes.create(hosts.a.at(backend))
    error = await hosts.caller.fails(
        "terminate_connection", other.address, {**by_id, "volume_id": other.id}
    )
    assert error.code == "ConnectionNotFound"


@ALL
async def test_a_connected_volume_is_not_deleted(hosts: Hosts, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    info = await hosts.volumes.connect(volume)
    error = await hosts.caller.fails("delete_volume", volume.address, volume.at)
    assert error.code == "VolumeIsBusy"
    record = await hosts.volumes.record(volume)
    assert record["status"] == "available"
    assert [one["id"] for one in record["connections"]] == [info["connection_id"]]
    assert {one["volume_id"] for one in record["connections"]} == {volume.id}
    assert {one["connector_host"] for one in record["connections"]} == {"client"}
    await hosts.volumes.disconnect_all(volume)
    await hosts.volumes.delete(volume)


@pytest.mark.parametrize("backend", ["iscsi", "sim", "iser"])
@pytest.mark.parametrize(
    "connector",
    [{}, {"host": "x"}, {"host": "x", "initiator": ""}, {"initiator": "x y"}, {"wwpns": ["50"]}],
    ids=str,
)
async def test_a_connector_without_an_initiator_is_refused_where_one_is_needed(
    hosts: Hosts, backend: str, connector: dict[str, Any]
) -> None:
    error = await hosts.caller.fails(
        "validate_connector", hosts.a.at(backend), {"connector": connector}
    )
    assert error.code == "InvalidConnector"
    volume = await hosts.volumes.create(hosts.a.at(backend))
    error = await hosts.caller.fails(
        "initialize_connection", volume.address, {**volume.at, "connector": connector}
    )
    assert error.code == "InvalidConnector"
    record = await hosts.volumes.record(volume)
    assert record["connections"] == []
    assert record["exported"] is False


@ALL
async def test_a_good_connector_is_valid(hosts: Hosts, backend: str) -> None:
    connector = {"host": "c", "ip": "10.0.0.1", "initiator": INITIATOR, "multipath": False}
    args = {"connector": connector}
    assert await hosts.caller.call("validate_connector", hosts.a.at(backend), args) == {}


@pytest.mark.parametrize(
    ("backend", "kind"), [("iscsi", "iscsi"), ("sim", "iscsi"), ("iser", "iser")]
)
async def test_connection_info_has_cinders_members(hosts: Hosts, backend: str, kind: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at(backend))
    info = await hosts.volumes.connect(volume)
    assert set(info) == {"connection_id", "driver_volume_type", "data"}
    assert info["driver_volume_type"] == kind
    data = info["data"]
    assert data["target_iqn"].startswith("iqn.")
    assert data["target_portal"].rpartition(":")[2].isdigit()
    assert isinstance(data["target_lun"], int)
    assert data["auth_method"] == "CHAP"
    assert data["auth_username"]
    assert len(data["auth_password"]) >= 12
    assert data["access_mode"] == "rw"
    assert data["encrypted"] is False
    assert data["target_discovered"] is False
    assert data["volume_id"] == volume.id


async def test_nbd_connection_info_has_its_members(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    info = await hosts.volumes.connect(volume)
    assert info["driver_volume_type"] == "nbd"
    data = info["data"]
    assert data["uri"] == f"nbd://127.0.0.1:{hosts.a.nbd_port}/{data['export']}"
    assert (data["host"], data["port"]) == ("127.0.0.1", hosts.a.nbd_port)
    assert data["access_mode"] == "rw"


async def test_a_local_connection_is_for_the_volumes_own_host_alone(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    here = await hosts.volumes.connect(volume, host="host-a", do_local_attach=True)
    assert here["driver_volume_type"] == "local"
    path = pathlib.Path(here["data"]["device_path"])
    assert path.stat().st_size == volume.size_bytes
    there = await hosts.volumes.connect(volume, host="host-b", do_local_attach=True)
    assert there["driver_volume_type"] == "nbd"
    error = await hosts.caller.fails("delete_volume", volume.address, volume.at)
    assert error.code == "VolumeIsBusy"


async def test_connections_do_not_change_the_status(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    async with hosts.caller.events(f"volume.{volume.id}.*") as events:
        info = await hosts.volumes.connect(volume)
        assert await hosts.volumes.status(volume) == "available"
        await hosts.volumes.disconnect(volume, info["connection_id"])
        await hosts.volumes.attach(volume)
        info = await hosts.volumes.connect(volume)
        assert await hosts.volumes.status(volume) == "in-use"
        await hosts.volumes.detach(volume)
        record = await hosts.volumes.record(volume)
        assert record["status"] == "available"
        assert [one["id"] for one in record["connections"]] == [info["connection_id"]]
        await asyncio.sleep(0.3)
    assert {event.status for event in events.all} <= {
        "available", "attaching", "in-use", "detaching",
    }  # fmt: skip


async def test_a_volume_in_a_wrong_status_is_not_connected(
    hosts: Hosts,
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.installation.rows(
        "UPDATE volumes SET status = 'error' WHERE id = $1", uuid.UUID(volume.id)
    )
    for method, more in (
        ("initialize_connection", {"connector": {"host": "x"}}),
        ("create_export", {}),
        ("attach_volume", {"mountpoint": "/dev/vdb"}),
        ("extend_volume", {"new_size_bytes": 2 * MIB}),
    ):
        error = await hosts.caller.fails(method, volume.address, {**volume.at, **more})
        assert error.code == "InvalidVolumeStatus"
    await hosts.volumes.delete(volume)


async def test_a_target_is_gone_from_tgtd_with_its_connection(
    hosts: Hosts, tgtd: tgtd_service.Tgtd
) -> None:
    volume = await hosts.volumes.create(hosts.a.at("iscsi"))
    info = await hosts.volumes.connect(volume)
    assert info["data"]["target_iqn"] in tgtd.targets()
    await hosts.volumes.disconnect(volume, info["connection_id"])
    assert volume.id not in tgtd.targets()
    accounts = tgtd.adm("--op", "show", "--mode", "account")
    assert info["data"]["auth_username"] not in accounts


async def test_many_connections_at_once_are_each_made_once(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    infos = await asyncio.gather(
        *(hosts.volumes.connect(volume, connection_key=str(n % 4)) for n in range(16))
    )
    assert len({info["connection_id"] for info in infos}) == 4
    assert len((await hosts.volumes.record(volume))["connections"]) == 4
    await asyncio.gather(
        *(hosts.volumes.disconnect(volume, info["connection_id"]) for info in infos)
    )
    assert (await hosts.volumes.record(volume))["exported"] is False


@pytest.mark.parametrize("done", ["deleted", "cut short", "a link"])
async def test_a_volume_whose_file_was_tampered_with_lets_nobody_in(
    start_worker: workers.Starter, caller: amqp.Caller, tmp_path: pathlib.Path, done: str
) -> None:
    worker = await start_worker("host-a", max_attempts=1)
    new = {"volume": {"name": "v", "size_bytes": MIB}}
    volume = await caller.call("create_volume", worker.at("fast"), new)
    [path] = worker.folder.rglob(f"volume-{volume['id']}")
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret" * MIB)
    match done:
        case "deleted":
            path.unlink()
        case "cut short":
            os.truncate(path, MIB // 2)
        case _:
            path.unlink()
            path.symlink_to(outside)
    for local in (True, False):
        connector = {"host": "host-a", "do_local_attach": local}
        args = {"volume_id": volume["id"], "connector": connector}
        error = await caller.fails("initialize_connection", worker.at("fast"), args)
        assert error.code == "DeviceUnavailable"
    record = await caller.call("get_volume", worker.at("fast"), {"volume_id": volume["id"]})
    assert (record["connections"], record["exported"]) == ([], False)
