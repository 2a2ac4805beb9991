"""The NBD connector against a real NBD server and a real /dev/fuse."""

import asyncio
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from messages import errors
from tests.services import attaching, nbd_clients
from worker.connectors import base, bridge, devices, nbd
from worker.storage_daemon import daemon

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


async def test_an_nbd_export_is_given_as_it_is(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    connector = nbd.NbdConnector(context)
    assert await connector.get_connector_properties() == {}
    async with attaching.nbd_server(tmp_path, backing) as data:
        device = await connector.connect_volume(data, key="k", access=STREAM, read_only=False)
        assert device.nbd_uri == f"nbd://127.0.0.1:{data['port']}/rw"
        assert await connector.check_valid_device(device)
        assert await nbd_clients.works(device.nbd_uri, "write -P 7 0 64k")
        await connector.disconnect_volume(data, key="k")
    assert not await connector.check_valid_device(device)
    await connector.disconnect_volume(data, key="k")


@pytest.mark.parametrize(("psk", "access"), [(False, PATH), (True, STREAM), (True, PATH)])
async def test_an_nbd_export_is_bridged_for_a_path_and_for_tls(
    context: base.Context,
    tmp_path: pathlib.Path,
    backing: pathlib.Path,
    psk: bool,
    access: base.Access,
) -> None:
    attaching.need_fuse(access)
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing, psk=psk) as data:
        device = await connector.connect_volume(data, key="k", access=access, read_only=False)
        assert await connector.check_valid_device(device)
        assert await nbd_clients.works(attaching.where(device), "write -P 7 64k 64k")
        assert not attaching.files_with(context.state_dir, attaching.PSK)
        await connector.disconnect_volume(data, key="k")
        assert await nbd_clients.works(backing, "read -P 7 64k 64k")


async def test_a_wrong_key_is_told_and_not_shown(
    context: base.Context,
    tmp_path: pathlib.Path,
    backing: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wrong = "ab" * 32
    async with attaching.nbd_server(tmp_path, backing, psk=True) as data:
        bad = {**data, "tls": {**data["tls"], "psk_key": wrong}}
        with pytest.raises(errors.DeviceUnavailable) as caught:
            await nbd.NbdConnector(context).connect_volume(
                bad, key="k", access=STREAM, read_only=False
            )
    assert wrong not in repr(caught.value) + "".join(capfd.readouterr())


async def test_an_nbd_server_or_export_that_is_not_there_is_told(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing) as data:
        for access in (STREAM, PATH):
            attaching.need_fuse(access)
            with pytest.raises(errors.DeviceUnavailable, match="nothere"):
                await connector.connect_volume(
                    {**data, "export": "nothere"}, key="k", access=access, read_only=False
                )
            with pytest.raises(errors.DeviceUnavailable, match=r"read-only|write access"):
                await connector.connect_volume(
                    {**data, "export": "ro"}, key="k", access=access, read_only=False
                )
    with pytest.raises(errors.DeviceUnavailable, match="cannot be reached"):
        await connector.connect_volume(data, key="k", access=STREAM, read_only=False)


async def test_a_tls_server_is_not_reached_without_a_key(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    async with attaching.nbd_server(tmp_path, backing, psk=True) as data:
        del data["tls"]
        with pytest.raises(errors.DeviceUnavailable, match="TLS"):
            await nbd.NbdConnector(context).connect_volume(
                data, key="k", access=STREAM, read_only=False
            )


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n" * 4, bytes(200)])
async def test_what_is_no_nbd_server_is_told(context: base.Context, answer: bytes) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    stranger = await asyncio.start_server(speak, "127.0.0.1", 0)
    data = {"host": "127.0.0.1", "port": stranger.sockets[0].getsockname()[1], "export": "e"}
    with pytest.raises(errors.DeviceUnavailable, match="NBD server"):
        await nbd.NbdConnector(context).connect_volume(
            data, key="k", access=STREAM, read_only=False
        )
    stranger.close()
    await stranger.wait_closed()


async def test_a_server_that_is_gone_fails_the_flush_unless_forced(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing) as data:
        await connector.connect_volume(data, key="k", access=STREAM, read_only=False)
    with pytest.raises(errors.DeviceUnavailable):
        await connector.disconnect_volume(data, key="k")
    await connector.disconnect_volume(data, key="k", force=True)
    await connector.disconnect_volume(data, key="k")


async def test_an_empty_export_is_no_valid_device(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    connector = nbd.NbdConnector(context)
    os.truncate(backing, 0)
    async with attaching.nbd_server(tmp_path, backing) as data:
        device = await connector.connect_volume(data, key="k", access=STREAM, read_only=True)
        assert not await connector.check_valid_device(device)


async def test_without_fuse_a_path_says_what_to_do_and_a_stream_works(
    context: base.Context,
    tmp_path: pathlib.Path,
    backing: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "_FUSE_DEVICE", tmp_path / "no-fuse")
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing) as data:
        with pytest.raises(errors.DeviceUnavailable, match="/dev/fuse"):
            await connector.connect_volume(data, key="k", access=PATH, read_only=False)
        await connector.connect_volume(data, key="k", access=STREAM, read_only=True)


async def test_a_bridge_that_hangs_can_be_detached_by_force(
    context: base.Context,
    tmp_path: pathlib.Path,
    backing: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attaching.need_fuse(PATH)
    monkeypatch.setattr(devices, "FORCED_FLUSH_TIMEOUT", 0.5)
    monkeypatch.setattr(daemon, "STOP_TIMEOUT", 0.5)
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing) as data:
        await connector.connect_volume(data, key="k", access=PATH, read_only=False)
        pid = connector._bridges._daemons["k"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(connector.disconnect_volume(data, key="k", force=True), 20)


@pytest.mark.parametrize("access", [STREAM, PATH])
async def test_a_volume_whose_server_hangs_fails_in_time_and_is_detached_by_force(
    context: base.Context,
    tmp_path: pathlib.Path,
    backing: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    access: base.Access,
) -> None:
    attaching.need_fuse(access)
    for limit in ("READ_TIMEOUT", "FLUSH_TIMEOUT", "FORCED_FLUSH_TIMEOUT"):
        monkeypatch.setattr(devices, limit, 0.5)
    monkeypatch.setattr(daemon, "STOP_TIMEOUT", 0.5)
    connector = nbd.NbdConnector(context)
    async with attaching.nbd_server(tmp_path, backing) as data:
        device = await connector.connect_volume(data, key="k", access=access, read_only=False)
        with attaching.hanging(data["pid"]):
            assert not await connector.check_valid_device(device)
            with pytest.raises(errors.DeviceUnavailable, match="did not answer within"):
                await connector.disconnect_volume(data, key="k")
            await asyncio.wait_for(connector.disconnect_volume(data, key="k", force=True), 20)
    for _ in range(200):
        if not devices._stuck:
            break
        await asyncio.sleep(0.02)
    assert not devices._stuck
