"""The iSCSI connector against a real tgtd and a real /dev/fuse."""

import asyncio
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from messages import errors
from tests.services import attaching, leftovers, nbd_clients, tgtd
from worker import process
from worker.connectors import base, bridge, devices, iscsi
from worker.storage_daemon import daemon

MIB = attaching.MIB
SECRET = "chap-secret-nobody-may-see"
IQN = "iqn.2026-11.org.example:volume-1"
STREAM, PATH = base.Access.STREAM, base.Access.PATH


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: pathlib.Path) -> Iterator[None]:
    with attaching.nothing_left(tmp_path):
        yield


@pytest.fixture
def backing(tmp_path: pathlib.Path) -> pathlib.Path:
    return attaching.new_volume(tmp_path)


@pytest.fixture
def context(tmp_path: pathlib.Path) -> base.Context:
    return attaching.new_context(tmp_path)


@pytest.fixture(scope="module")
def portal() -> Iterator[tgtd.Tgtd]:
    with tgtd.running() as started:
        yield started


@pytest.fixture
def target(portal: tgtd.Tgtd, backing: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Connection info of a target with CHAP that serves ``backing``."""
    portal.add_target(1, IQN, backing, account=("user", SECRET))
    yield {
        "target_portal": portal.portal,
        "target_iqn": IQN,
        "target_lun": 1,
        "auth_method": "CHAP",
        "auth_username": "user",
        "auth_password": SECRET,
        "access_mode": "rw",
        "encrypted": False,
    }
    portal.adm("--op", "delete", "--mode", "target", "--tid", "1", "--force")
    portal.adm("--op", "delete", "--mode", "account", "--user", "user")


@pytest.mark.parametrize("access", [STREAM, PATH])
async def test_an_iscsi_volume_is_read_and_written_with_chap(
    context: base.Context, target: dict[str, Any], backing: pathlib.Path, access: base.Access
) -> None:
    attaching.need_fuse(access)
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=access, read_only=False)
    assert (device.path is None) == (access is STREAM)
    assert await connector.check_valid_device(device)
    assert await nbd_clients.works(attaching.where(device), "write -P 7 64k 64k")
    await connector.disconnect_volume(target, key="k")
    assert not await connector.check_valid_device(device)
    assert await nbd_clients.works(backing, "read -P 7 64k 64k", "read -P 0 0 64k")
    await connector.disconnect_volume(target, key="k")


async def test_a_hole_punched_through_a_path_reads_as_zeros_and_gives_its_space_back(
    context: base.Context, target: dict[str, Any], backing: pathlib.Path
) -> None:
    attaching.need_fuse(PATH)
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=PATH, read_only=False)
    assert device.path is not None
    assert await nbd_clients.works(device.path, "write -P 7 0 1M", "flush")
    before = attaching.allocated(backing)
    punched = await nbd_clients.run(
        "fallocate", "--punch-hole", "--offset", "0", "--length", "512KiB", device.path
    )
    assert punched.code == 0
    assert await nbd_clients.works(device.path, "read -P 0 0 512k", "read -P 7 512k 512k")
    assert attaching.holes(device.path) == [(512 * 1024, MIB)]
    await connector.disconnect_volume(target, key="k")
    assert attaching.allocated(backing) < before


async def test_holes_are_seen_through_a_stream(
    context: base.Context, target: dict[str, Any], backing: pathlib.Path
) -> None:
    assert await nbd_clients.works(backing, "write -P 7 1M 1M")
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=STREAM, read_only=True)
    extents = await nbd_clients.run("nbdinfo", "--map", attaching.where(device))
    assert [line.split()[2] for line in extents.text.splitlines()] == ["3", "0", "3"]
    await connector.disconnect_volume(target, key="k")


@pytest.mark.parametrize("access", [STREAM, PATH])
async def test_what_is_attached_read_only_cannot_be_written(
    context: base.Context, target: dict[str, Any], access: base.Access
) -> None:
    attaching.need_fuse(access)
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=access, read_only=True)
    assert await connector.check_valid_device(device)
    assert await nbd_clients.works(attaching.where(device), "read -P 0 0 64k", read_only=True)
    assert not await nbd_clients.works(attaching.where(device), "write -P 7 0 64k")
    await connector.disconnect_volume(target, key="k")


@pytest.mark.parametrize("password", ["wrong-secret-of-sixteen", None])
async def test_a_wrong_chap_secret_fails_soon_and_is_not_shown(
    context: base.Context,
    target: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    password: str | None,
) -> None:
    data = {**target, "auth_password": password}
    if password is None:
        data = {**target, "auth_method": None}
    began = time.monotonic()
    with pytest.raises(errors.DeviceUnavailable, match=r"[Ll]og ?in|[Aa]uth") as caught:
        await iscsi.IscsiConnector(context).connect_volume(
            data, key="k", access=STREAM, read_only=False
        )
    assert time.monotonic() - began < 15
    shown = repr(caught.value) + "".join(capfd.readouterr())
    assert (password or SECRET) not in shown


async def test_the_secret_is_on_no_command_line_and_in_no_file(
    context: base.Context, target: dict[str, Any]
) -> None:
    connector = iscsi.IscsiConnector(context)
    await connector.connect_volume(target, key="k", access=STREAM, read_only=False)
    [daemon_line] = [
        line
        for line in leftovers.processes(os.environ[leftovers.MARK])
        if line.startswith("qemu-storage-daemon")
    ]
    assert SECRET not in daemon_line
    assert not attaching.files_with(context.state_dir, SECRET)
    await connector.disconnect_volume(target, key="k")


async def test_an_unknown_target_and_an_unknown_lun_are_told(
    context: base.Context, target: dict[str, Any]
) -> None:
    connector = iscsi.IscsiConnector(context)
    for wrong in ({"target_iqn": f"{IQN}0"}, {"target_lun": 7}):
        with pytest.raises(errors.DeviceUnavailable, match="refused blockdev-add"):
            await connector.connect_volume(
                {**target, **wrong}, key="k", access=STREAM, read_only=False
            )


async def test_a_portal_where_nobody_listens_fails_soon(
    context: base.Context, target: dict[str, Any]
) -> None:
    data = {**target, "target_portal": f"127.0.0.1:{tgtd.free_port()}"}
    began = time.monotonic()
    with pytest.raises(errors.DeviceUnavailable):
        await iscsi.IscsiConnector(context).connect_volume(
            data, key="k", access=STREAM, read_only=False
        )
    assert time.monotonic() - began < 15


async def test_a_portal_that_never_answers_is_given_up(
    context: base.Context, target: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "CONNECT_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = {**target, "target_portal": f"127.0.0.1:{silent.getsockname()[1]}"}
        began = time.monotonic()
        with pytest.raises(errors.DeviceUnavailable, match="did not answer"):
            await iscsi.IscsiConnector(context).connect_volume(
                data, key="k", access=STREAM, read_only=False
            )
        assert time.monotonic() - began < 10


async def test_a_cancelled_attach_leaves_nothing(
    context: base.Context, target: dict[str, Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = {**target, "target_portal": f"127.0.0.1:{silent.getsockname()[1]}"}
        attaching = asyncio.create_task(
            iscsi.IscsiConnector(context).connect_volume(
                data, key="k", access=STREAM, read_only=False
            )
        )
        await asyncio.sleep(0.5)
        attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching


async def test_a_flush_that_fails_keeps_the_volume_attached_unless_forced(
    context: base.Context,
    target: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=STREAM, read_only=False)

    async def fail(*_: object) -> None:
        raise errors.DeviceUnavailable("Input/output error")

    monkeypatch.setattr(devices, "_flush_nbd", fail)
    with pytest.raises(errors.DeviceUnavailable, match="Input/output"):
        await connector.disconnect_volume(target, key="k")
    assert await connector.check_valid_device(device)
    await connector.disconnect_volume(target, key="k", force=True)
    assert not await connector.check_valid_device(device)


async def test_each_key_has_a_bridge_of_its_own(
    context: base.Context, target: dict[str, Any]
) -> None:
    connector = iscsi.IscsiConnector(context)
    keys = ["job/1:src", "../escape", "x" * 300, "ü"]
    attached = await asyncio.gather(
        *(connector.connect_volume(target, key=key, access=STREAM, read_only=True) for key in keys)
    )
    assert len({attaching.where(device) for device in attached}) == len(keys)
    await connector.disconnect_volume(target, key=keys[0])
    assert not await connector.check_valid_device(attached[0])
    for device in attached[1:]:
        assert await connector.check_valid_device(device)
    await asyncio.gather(*(connector.disconnect_volume(target, key=key) for key in keys))


async def test_the_same_key_again_replaces_its_bridge(
    context: base.Context, target: dict[str, Any]
) -> None:
    connector = iscsi.IscsiConnector(context)
    await connector.connect_volume(target, key="k", access=STREAM, read_only=False)
    device = await connector.connect_volume(target, key="k", access=STREAM, read_only=False)
    assert await connector.check_valid_device(device)
    await connector.disconnect_volume(target, key="k")


@pytest.mark.parametrize("access", [STREAM, PATH])
async def test_a_killed_bridge_is_cleared_away(
    context: base.Context, target: dict[str, Any], access: base.Access
) -> None:
    attaching.need_fuse(access)
    connector = iscsi.IscsiConnector(context)
    device = await connector.connect_volume(target, key="k", access=access, read_only=False)
    await leftovers.kill(connector._bridges._daemons["k"].pid)
    assert not await connector.check_valid_device(device)
    await connector.disconnect_volume(target, key="k")
    device = await connector.connect_volume(target, key="k", access=access, read_only=False)
    assert await connector.check_valid_device(device)
    await connector.disconnect_volume(target, key="k")


WORKER = """
import asyncio, json, pathlib, sys
from worker import process
from worker.connectors import base, iscsi

async def main():
    data, state = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
    connector = iscsi.IscsiConnector(base.Context("host-a", process.Executor(), state))
    device = await connector.connect_volume(
        data, key="k", access=base.Access[sys.argv[3]], read_only=False
    )
    print("attached", device.path or device.nbd_uri, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("access", [STREAM, PATH])
async def test_what_a_killed_worker_left_is_cleared_by_the_key(
    context: base.Context, target: dict[str, Any], portal: tgtd.Tgtd, access: base.Access
) -> None:
    attaching.need_fuse(access)
    data = daemon.json_argument(target)
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, data, str(context.state_dir), access.name),
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdout is not None
    attached = [line async for line in attaching.until(worker.stdout, b"attached ")]
    assert attached
    worker.kill()
    await worker.communicate()
    connector = iscsi.IscsiConnector(context)
    await connector.disconnect_volume(target, key="k")
    assert "Initiator: " not in portal.targets()
    device = await connector.connect_volume(target, key="k", access=access, read_only=False)
    assert await connector.check_valid_device(device)
    await connector.disconnect_volume(target, key="k")


async def test_the_initiator_name_stays_and_is_what_the_target_sees(
    context: base.Context,
    target: dict[str, Any],
    portal: tgtd.Tgtd,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setattr(iscsi, "_SYSTEM_NAME", tmp_path / "none")
    connector = iscsi.IscsiConnector(context)
    name = (await connector.get_connector_properties())["initiator"]
    assert iscsi.check_name(name).startswith("iqn.2026-11.org.volume-worker:")
    later = iscsi.IscsiConnector(context)
    assert (await later.get_connector_properties())["initiator"] == name
    await later.connect_volume(target, key="k", access=STREAM, read_only=False)
    assert f"Initiator: {name}" in portal.targets()
    await later.disconnect_volume(target, key="k")


async def test_the_systems_initiator_name_is_taken_where_there_is_one(
    context: base.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    system = tmp_path / "initiatorname.iscsi"
    monkeypatch.setattr(iscsi, "_SYSTEM_NAME", system)
    system.write_text("## comment\nInitiatorName=iqn.1993-08.org.debian:01:abc\n")
    properties = await iscsi.IscsiConnector(context).get_connector_properties()
    assert properties == {"initiator": "iqn.1993-08.org.debian:01:abc"}


async def test_state_may_lie_deep(
    tmp_path: pathlib.Path, target: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 40)
    deep.mkdir()
    runtime = tmp_path / "r"
    runtime.mkdir()
    # Too long itself: a short folder elsewhere must do.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    connector = iscsi.IscsiConnector(base.Context("host-a", process.Executor(), deep))
    for access in (STREAM, PATH):
        attaching.need_fuse(access)
        device = await connector.connect_volume(target, key="k", access=access, read_only=False)
        assert await connector.check_valid_device(device)
        await connector.disconnect_volume(target, key="k")
    assert leftovers.entries(deep / "iscsi") == []
