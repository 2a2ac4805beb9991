"""The NBD target against a real qemu-storage-daemon and other people's clients."""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from messages import errors
from tests.services import leftovers, nbd_clients, tgtd
from worker import durable, process
from worker.connectors import base as connectors
from worker.connectors import nbd as nbd_connector
from worker.drivers import base as drivers
from worker.storage_daemon import daemon
from worker.targets import base, nbd

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: pathlib.Path) -> Iterator[None]:
    tgtd.require_program("qemu-storage-daemon", "qemu-io", "nbdinfo")
    with leftovers.none(tmp_path):
        yield


class Bench:
    """Volumes as sparse files, and a target that serves them on a port of its own."""

    def __init__(self, folder: pathlib.Path, **options: Any) -> None:
        self.folder = folder
        self.port = tgtd.free_port()
        self.options = {"target_listen": f"127.0.0.1:{self.port}", **options}
        self.state_dir = folder / "state"
        self.state_dir.mkdir()
        self.volumes: dict[uuid.UUID, pathlib.Path] = {}
        self.target = self.new_target()

    def new_target(self, **options: Any) -> nbd.NbdTarget:
        """The target as one more worker process makes it."""
        made = nbd.NbdTarget.Options(**{**self.options, **options})
        return nbd.NbdTarget(
            base.Context("host-a", "fast", made, process.Executor(), self.state_dir)
        )

    def volume(self, size: int = MIB) -> tuple[drivers.Volume, pathlib.Path]:
        volume_id = uuid.uuid4()
        path = self.folder / f"volume-{volume_id}"
        path.touch()
        os.truncate(path, size)
        return drivers.Volume(volume_id, "v", size), path

    def connection(self, mode: base.AccessMode = base.AccessMode.READ_WRITE) -> base.Connection:
        return base.Connection(
            uuid.uuid4(), {"host": "client"}, mode, self.target.new_credentials()
        )

    @property
    def pid(self) -> int | None:
        return self.target._daemon.pid

    @property
    def server(self) -> str:
        return f"nbd://127.0.0.1:{self.port}"

    async def restart(self, **options: Any) -> None:
        """A new worker after the old one ended."""
        await self.target.close()
        self.target = self.new_target(**options)
        await self.target.do_setup()


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    await bench.target.do_setup()
    try:
        yield bench
    finally:
        await bench.target.restore([])
        await bench.target.close()


@pytest.fixture
async def bench(tmp_path: pathlib.Path) -> AsyncIterator[Bench]:
    async with running(Bench(tmp_path)) as made:
        yield made


@pytest.fixture
async def tls_bench(tmp_path: pathlib.Path) -> AsyncIterator[Bench]:
    async with running(Bench(tmp_path, target_tls="psk")) as made:
        yield made


async def connect(
    bench: Bench, mode: base.AccessMode = base.AccessMode.READ_WRITE
) -> tuple[drivers.Volume, pathlib.Path, base.Connection, base.Info]:
    volume, path = bench.volume()
    await bench.target.create_export(volume, path)
    connection = bench.connection(mode)
    info = await bench.target.initialize_connection(volume, path, connection)
    return volume, path, connection, info


async def test_a_connected_client_reads_and_writes_the_volume(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    assert info.driver_volume_type == "nbd"
    assert info.data == {
        "uri": f"{bench.server}/{connection.id}",
        "host": "127.0.0.1",
        "port": bench.port,
        "export": str(connection.id),
        "access_mode": "rw",
        "volume_id": str(volume.id),
        "encrypted": False,
    }
    assert info.secrets == {}
    assert await nbd_clients.size(info.data["uri"]) == MIB
    assert await nbd_clients.works(info.data["uri"], "write -P 7 64k 64k", "flush")
    assert await nbd_clients.works(path, "read -P 7 64k 64k", "read -P 0 0 64k")


async def test_zeroing_and_discarding_give_the_space_back(bench: Bench) -> None:
    _, path, _, info = await connect(bench)
    await nbd_clients.works(info.data["uri"], "write -P 7 0 512k", "flush")
    assert allocated(path) >= 512 * 1024
    assert await nbd_clients.works(info.data["uri"], "write -z -u 0 256k", "discard 256k 256k")
    assert allocated(path) == 0
    assert await nbd_clients.works(info.data["uri"], "read -P 0 0 512k")


async def test_a_read_only_connection_cannot_write_beside_one_that_can(bench: Bench) -> None:
    volume, path, _, writer = await connect(bench)
    reader = await bench.target.initialize_connection(
        volume, path, bench.connection(base.AccessMode.READ_ONLY)
    )
    assert reader.data["access_mode"] == "ro"
    assert await nbd_clients.works(writer.data["uri"], "write -P 9 0 64k")
    assert await nbd_clients.works(reader.data["uri"], "read -P 9 0 64k", read_only=True)
    assert not await nbd_clients.works(reader.data["uri"], "write -P 1 0 64k")
    assert await nbd_clients.works(path, "read -P 9 0 64k")


async def test_ending_a_connection_cuts_its_live_client_and_no_other(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    other = await bench.target.initialize_connection(volume, path, bench.connection())
    cut, kept = await client(info), await client(other)
    await bench.target.terminate_connection(volume, connection)
    assert await asyncio.wait_for(cut.reader.read(), 5) == b""
    assert await kept.first_block() == bytes(512)
    assert await nbd_clients.names(bench.server) == [other.data["export"]]
    await bench.target.terminate_connection(volume, connection, force=True)
    cut.writer.close()
    kept.writer.close()


async def test_the_same_connection_again_is_the_same_and_cuts_nobody(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    kept = await client(info)
    assert await bench.target.initialize_connection(volume, path, connection) == info
    assert await kept.first_block() == bytes(512)
    kept.writer.close()


async def test_the_daemon_lives_as_long_as_there_is_an_export(bench: Bench) -> None:
    assert not (bench.state_dir / "nbd").exists()
    one, path = bench.volume()
    two, other_path = bench.volume()
    assert await bench.target.create_export(one, path) == f"{bench.server}/"
    pid = bench.pid
    assert pid is not None
    await bench.target.create_export(two, other_path)
    await bench.target.remove_export(one)
    assert bench.pid == pid
    await bench.target.remove_export(two)
    assert process.start_time(pid) is None
    await bench.target.remove_export(two)


async def test_removing_an_export_ends_what_is_left_of_its_connections(bench: Bench) -> None:
    volume, _, _, info = await connect(bench)
    await connect(bench)
    cut = await client(info)
    await bench.target.remove_export(volume)
    assert await asyncio.wait_for(cut.reader.read(), 5) == b""
    assert info.data["export"] not in await nbd_clients.names(bench.server)
    cut.writer.close()


async def test_a_volume_without_a_connection_is_not_held_open(bench: Bench) -> None:
    volume, path, connection, _ = await connect(bench)
    assert str(path) in open_files(bench.pid)
    await bench.target.terminate_connection(volume, connection)
    assert str(path) not in open_files(bench.pid)


async def test_a_volume_that_grew_or_was_replaced_shows_so_to_the_next_connection(
    bench: Bench,
) -> None:
    volume, path, connection, info = await connect(bench)
    with pytest.raises(errors.NotSupported):
        await bench.target.extend_volume(volume, path)
    await bench.target.terminate_connection(volume, connection)
    replacement = path.with_suffix(".new")
    replacement.write_bytes(b"\5" * 2 * MIB)
    replacement.replace(path)
    await bench.target.extend_volume(volume, path)
    info = await bench.target.initialize_connection(volume, path, bench.connection())
    assert await nbd_clients.size(info.data["uri"]) == 2 * MIB
    assert await nbd_clients.works(info.data["uri"], "read -P 5 0 2M")


async def test_ids_that_differ_in_the_last_digit_are_two_volumes(bench: Bench) -> None:
    infos = []
    for last in (1, 2):
        path = bench.folder / f"volume-{last}"
        path.write_bytes(bytes([last]) * MIB)
        volume = drivers.Volume(uuid.UUID(int=last), "v", MIB)
        infos.append(await bench.target.initialize_connection(volume, path, bench.connection()))
    for last, info in enumerate(infos, 1):
        assert await nbd_clients.works(info.data["uri"], f"read -P {last} 0 1M")


@pytest.mark.parametrize("name", ["a b", "with,comma", "json:{}", "nbd:x", "ü=ñ", "x" * 200])
async def test_a_volume_may_have_any_file_name(bench: Bench, name: str) -> None:
    path = bench.folder / name
    path.write_bytes(b"\3" * MIB)
    volume = drivers.Volume(uuid.uuid4(), "v", MIB)
    connection = bench.connection()
    info = await bench.target.initialize_connection(volume, path, connection)
    pid = bench.pid
    kept = await client(info)
    await bench.restart()
    assert await bench.target.restore([base.Export(volume, path, [connection])]) == {}
    assert bench.pid == pid
    assert (await kept.first_block()) == b"\3" * 512
    kept.writer.close()


async def test_what_cannot_be_served_is_a_target_error_and_leaves_nothing(bench: Bench) -> None:
    await connect(bench)
    for path in (bench.folder / "missing", bench.folder):
        volume = drivers.Volume(uuid.uuid4(), "v", MIB)
        with pytest.raises(errors.TargetError, match=path.name):
            await bench.target.initialize_connection(volume, path, bench.connection())
    assert len(await nbd_clients.names(bench.server)) == 1
    assert await bench.target.check_health()


async def test_many_calls_at_once_end_as_if_they_came_one_by_one(bench: Bench) -> None:
    async def come_and_go(*, stays: bool) -> str:
        volume, _, connection, info = await connect(bench)
        if not stays:
            await bench.target.terminate_connection(volume, connection)
            await bench.target.remove_export(volume)
        return str(info.data["export"])

    exports = await asyncio.gather(*(come_and_go(stays=bool(i % 2)) for i in range(30)))
    assert await nbd_clients.names(bench.server) == sorted(exports[1::2])
    assert await bench.target.check_health()


# Restarts and crashes


async def test_a_new_worker_takes_the_daemon_over_and_no_client_notices(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    pid, kept = bench.pid, await client(info)
    await bench.restart()
    assert await bench.target.restore([base.Export(volume, path, [connection])]) == {}
    assert bench.pid == pid
    assert await kept.first_block() == bytes(512)
    await bench.target.terminate_connection(volume, connection)
    assert await asyncio.wait_for(kept.reader.read(), 5) == b""
    kept.writer.close()


async def test_restoring_ends_what_is_no_longer_recorded(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    second = bench.connection()
    await bench.target.initialize_connection(volume, path, second)
    _, other_path, _, _ = await connect(bench)
    await bench.restart()
    await bench.target.restore([base.Export(volume, path, [connection])])
    assert await nbd_clients.names(bench.server) == [info.data["export"]]
    assert str(other_path) not in open_files(bench.pid)


async def test_restoring_serves_a_connection_in_the_mode_that_is_recorded(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    now = base.Connection(connection.id, connection.connector, base.AccessMode.READ_ONLY)
    await bench.target.restore([base.Export(volume, path, [now])])
    assert not await nbd_clients.works(info.data["uri"], "write 0 64k")


async def test_restoring_nothing_ends_the_daemon(bench: Bench) -> None:
    await connect(bench)
    pid = bench.pid
    assert pid is not None
    await bench.restart()
    assert await bench.target.restore([]) == {}
    assert process.start_time(pid) is None
    assert leftovers.entries(bench.state_dir / "nbd") == []


async def test_one_bad_volume_does_not_keep_the_rest_from_being_restored(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    bad, bad_path, bad_connection, _ = await connect(bench)
    await leftovers.kill(bench.pid)
    bad_path.unlink()
    failures = await bench.target.restore(
        [
            base.Export(bad, bad_path, [bad_connection]),
            base.Export(volume, path, [connection]),
        ]
    )
    assert list(failures) == [bad.id]
    assert isinstance(failures[bad.id], errors.TargetError)
    assert await nbd_clients.names(bench.server) == [info.data["export"]]
    assert not await bench.target.check_health()


async def test_a_killed_daemon_is_noticed_and_restored_under_the_same_names(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    assert await bench.target.check_health()
    await leftovers.kill(bench.pid)
    assert not await bench.target.check_health()
    assert await bench.target.restore([base.Export(volume, path, [connection])]) == {}
    assert await bench.target.check_health()
    assert await nbd_clients.works(info.data["uri"], "write -P 3 0 64k")


async def test_the_next_call_after_a_kill_brings_everything_back(bench: Bench) -> None:
    _, _, _, first = await connect(bench)
    await leftovers.kill(bench.pid)
    _, _, _, second = await connect(bench)
    assert await nbd_clients.names(bench.server) == sorted(
        [first.data["export"], second.data["export"]]
    )
    assert await bench.target.check_health()


async def test_ending_a_connection_of_a_killed_daemon_is_no_error(bench: Bench) -> None:
    volume, _, connection, _ = await connect(bench)
    await leftovers.kill(bench.pid)
    await bench.target.terminate_connection(volume, connection)
    await bench.target.remove_export(volume)
    assert await bench.target.check_health()


async def test_an_export_that_vanished_is_noticed(bench: Bench) -> None:
    _, _, connection, _ = await connect(bench)
    await bench.target._daemon.execute(
        "block-export-del", {"id": f"rw-{connection.id}", "mode": "hard"}
    )
    assert not await bench.target.check_health()


async def test_a_daemon_that_hangs_is_a_target_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connect(bench)
    assert bench.pid is not None
    monkeypatch.setattr(daemon.StorageDaemon.execute, "__kwdefaults__", {"timeout": 0.2})
    os.kill(bench.pid, signal.SIGSTOP)
    with pytest.raises(errors.TargetError, match="did not answer"):
        await bench.target.check_health()
    os.kill(bench.pid, signal.SIGCONT)
    assert await bench.target.check_health()


async def test_a_second_worker_process_is_kept_out_until_the_first_ends(bench: Bench) -> None:
    await connect(bench)
    second = bench.new_target()
    with pytest.raises(errors.TargetError, match="another worker process"):
        await second.do_setup()
    await bench.target.close()
    await second.do_setup()
    bench.target = second
    await second.do_setup()


async def test_a_port_that_is_taken_is_named(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", bench.port)):
        volume, path = bench.volume()
        with pytest.raises(errors.TargetError, match=f"127.0.0.1:{bench.port}.*in use"):
            await bench.target.create_export(volume, path)
    assert await bench.target.create_export(volume, path)


async def test_a_new_listen_address_moves_everything_there(bench: Bench) -> None:
    volume, path, connection, _ = await connect(bench)
    bench.port = tgtd.free_port()
    bench.options["target_listen"] = f"127.0.0.1:{bench.port}"
    await bench.restart()
    await bench.target.restore([base.Export(volume, path, [connection])])
    assert await nbd_clients.names(bench.server) == [str(connection.id)]


async def test_closing_leaves_clients_served(bench: Bench) -> None:
    volume, path, connection, info = await connect(bench)
    await bench.target.close()
    assert await nbd_clients.works(info.data["uri"], "write -P 1 0 64k")
    bench.target = bench.new_target()
    await bench.target.do_setup()
    await bench.target.restore([base.Export(volume, path, [connection])])


async def test_a_missing_program_is_told_at_set_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PROGRAM", "no-such-storage-daemon")
    with pytest.raises(errors.TargetError, match="no-such-storage-daemon is not on PATH"):
        await bench.new_target().do_setup()


async def test_ipv6_is_served_and_stands_in_brackets(tmp_path: pathlib.Path) -> None:
    port = tgtd.free_port()
    async with running(Bench(tmp_path, target_listen=f"[::1]:{port}")) as bench:
        _, _, _, info = await connect(bench)
        assert info.data["host"] == "::1"
        assert info.data["uri"] == f"nbd://[::1]:{port}/{info.data['export']}"
        assert await nbd_clients.works(info.data["uri"], "write -P 1 0 64k")


# TLS


async def test_a_key_lets_its_client_in_and_its_end_keeps_it_out(tls_bench: Bench) -> None:
    bench = tls_bench
    keys = bench.folder / "client.psk"
    volume, _, connection, info = await connect(bench)
    _, _, _, other = await connect(bench)
    uri = psk_uri(keys, info)
    assert info.data["uri"].startswith(f"nbds://{info.data['tls']['username']}@127.0.0.1:")
    assert await nbd_clients.size(uri) == MIB
    await bench.target.terminate_connection(volume, connection)
    outcome = await nbd_clients.run("nbdinfo", psk_uri(keys, info))
    assert outcome.code != 0
    assert await nbd_clients.size(psk_uri(keys, other)) == MIB


@pytest.mark.parametrize("end", ["terminate_connection", "remove_export", "restore"])
async def test_what_is_ended_is_served_no_more_even_where_its_key_cannot_be_taken_back(
    tls_bench: Bench, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    bench, target = tls_bench, tls_bench.target
    keys = bench.folder / "client.psk"
    volume, _, connection, info = await connect(bench)
    other, path, kept, shown = await connect(bench)

    async def ended() -> None:
        match end:
            case "terminate_connection":
                await target.terminate_connection(volume, connection)
            case "remove_export":
                await target.remove_export(volume)
            case _:
                await target.restore([base.Export(other, path, [kept])])

    def refuse(*_: object) -> None:
        raise errors.TargetError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "write_private", refuse)
        with pytest.raises(errors.TargetError, match="No space"):
            await ended()
    assert (await nbd_clients.run("nbdinfo", psk_uri(keys, info))).code != 0
    assert await nbd_clients.size(psk_uri(keys, shown)) == MIB
    assert info.data["tls"]["username"] in target._keys.usernames()
    await ended()
    assert target._keys.usernames() == {shown.data["tls"]["username"]}


async def test_without_a_key_or_with_a_wrong_one_nobody_gets_in(tls_bench: Bench) -> None:
    _, _, _, info = await connect(tls_bench)
    plain = f"{tls_bench.server}/{info.data['export']}"
    assert (await nbd_clients.run("nbdinfo", plain)).code != 0
    wrong = nbd_clients.psk_uri(
        info.data["uri"], tls_bench.folder / "wrong", info.data["tls"]["username"], "00" * 32
    )
    assert (await nbd_clients.run("nbdinfo", wrong)).code != 0


async def test_keys_come_back_with_a_killed_daemon(tls_bench: Bench) -> None:
    volume, path, connection, info = await connect(tls_bench)
    await leftovers.kill(tls_bench.pid)
    await tls_bench.target.restore([base.Export(volume, path, [connection])])
    assert await nbd_clients.size(psk_uri(tls_bench.folder / "client.psk", info)) == MIB


async def test_a_key_is_a_secret_and_only_the_worker_can_read_it(
    tls_bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, connection, info = await connect(tls_bench)
    key = connection.credentials["psk_key"]
    assert info.secrets == {"tls.psk_key": key}
    assert key not in repr(info)
    assert key not in leftovers.command_line(tls_bench.pid)
    out, err = capfd.readouterr()
    assert key not in out + err
    assert private(tls_bench.state_dir / "nbd-tls", 0o700)
    assert private(tls_bench.state_dir / "nbd-tls" / "keys.psk", 0o600)
    assert tls_bench.target.new_credentials() != tls_bench.target.new_credentials()


async def test_a_connection_of_before_tls_is_refused(tls_bench: Bench) -> None:
    volume, path = tls_bench.volume()
    keyless = base.Connection(uuid.uuid4(), {"host": "h"}, base.AccessMode.READ_WRITE)
    with pytest.raises(errors.TargetError, match="without a key"):
        await tls_bench.target.initialize_connection(volume, path, keyless)


async def test_a_bridged_client_lives_through_a_crash_of_the_server(
    tls_bench: Bench, tmp_path: pathlib.Path
) -> None:
    volume, path, connection, info = await connect(tls_bench)
    data = {**info.data, "tls": {**info.data["tls"], "psk_key": info.secrets["tls.psk_key"]}}
    state = tmp_path / "connectors"
    state.mkdir()
    connector = nbd_connector.NbdConnector(connectors.Context("host-b", process.Executor(), state))
    device = await connector.connect_volume(
        data, key="k", access=connectors.Access.STREAM, read_only=False
    )
    assert device.nbd_uri is not None
    assert await nbd_clients.works(device.nbd_uri, "write -P 1 0 64k")
    await leftovers.kill(tls_bench.pid)
    waiting = asyncio.create_task(nbd_clients.works(device.nbd_uri, "write -P 2 64k 64k"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await tls_bench.target.restore([base.Export(volume, path, [connection])])
    assert await waiting
    await connector.disconnect_volume(data, key="k")
    assert await nbd_clients.works(path, "read -P 1 0 64k", "read -P 2 64k 64k")


# Helpers


class Client:
    """A raw session with an export, to see whether it is cut."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def first_block(self) -> bytes:
        self.writer.write(bytes.fromhex("25609513 0000 0000") + bytes(16) + (512).to_bytes(4))
        reply = await asyncio.wait_for(self.reader.readexactly(16 + 512), 5)
        assert reply[4:8] == bytes(4)
        return reply[16:]


async def client(info: base.Info) -> Client:
    name = info.data["export"].encode()
    reader, writer = await asyncio.open_connection(info.data["host"], info.data["port"])
    await reader.readexactly(18)
    # NBD_OPT_EXPORT_NAME, without the 124 zeroes.
    writer.write(bytes([0, 0, 0, 3]) + b"IHAVEOPT" + bytes([0, 0, 0, 1]))
    writer.write(len(name).to_bytes(4) + name)
    await reader.readexactly(10)
    return Client(reader, writer)


def psk_uri(keys: pathlib.Path, info: base.Info) -> str:
    return nbd_clients.psk_uri(
        info.data["uri"], keys, info.data["tls"]["username"], info.secrets["tls.psk_key"]
    )


def allocated(path: pathlib.Path) -> int:
    return path.stat().st_blocks * 512


def private(path: pathlib.Path, mode: int) -> bool:
    return path.stat().st_mode & 0o777 == mode


def open_files(pid: int | None) -> list[str]:
    folder = pathlib.Path(f"/proc/{pid}/fd")
    return [str(handle.readlink()) for handle in folder.iterdir()]
