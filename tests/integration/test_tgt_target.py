"""The tgt target against a real tgtd, with QEMU and libiscsi as initiators."""

import asyncio
import dataclasses
import json
import os
import pathlib
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from structlog.testing import capture_logs

from messages import errors
from tests.services import leftovers, tgtd
from worker import process
from worker.drivers import base as drivers
from worker.targets import base, tgt, tgtadm

MIB = 1024**2
INITIATOR = "iqn.1993-08.org.debian:01:abcdef"


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[tgtd.Tgtd]:
    with tgtd.running() as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: tgtd.Tgtd, monkeypatch: pytest.MonkeyPatch) -> tgtd.Tgtd:
    for name, value in shared_daemon.env.items():
        monkeypatch.setenv(name, value)
    return shared_daemon


@dataclasses.dataclass
class Bench:
    """A target of one backend, its volumes, and the initiators that log in to it."""

    daemon: tgtd.Tgtd
    folder: pathlib.Path
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    target: tgt.TgtTarget = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts over, as a new worker process does."""
        state_dir = self.folder / "state"
        state_dir.mkdir(exist_ok=True)
        options = tgt.Options(iscsi_port=self.daemon.port, **dict(self.options))
        context = base.Context("host-a", "fast", options, process.Executor(), state_dir)
        self.target = tgt.TgtTarget(context)

    def volume(self, size: int = 8 * MIB) -> tuple[drivers.Volume, pathlib.Path]:
        volume = drivers.Volume(uuid.uuid4(), "v", size)
        path = self.folder / f"volume-{volume.id}"
        with path.open("wb") as file:
            file.truncate(size)
        return volume, path

    def connection(
        self, mode: base.AccessMode = base.AccessMode.READ_WRITE, initiator: str = INITIATOR
    ) -> base.Connection:
        credentials = self.target.new_credentials()
        return base.Connection(uuid.uuid4(), {"initiator": initiator}, mode, credentials)

    def shown(self) -> dict[str, tgtadm.Target]:
        return {target.iqn: target for target in tgtadm.parse_targets(self.daemon.targets())}

    def accounts(self) -> str:
        return self.daemon.adm("--op", "show", "--mode", "account")


@pytest.fixture
async def bench(daemon: tgtd.Tgtd, tmp_path: pathlib.Path) -> AsyncIterator[Bench]:
    bench = Bench(daemon, tmp_path)
    await bench.target.do_setup()
    with leftovers.none(tmp_path):
        yield bench
    if daemon.pid is None:
        daemon.start()
    bench.begin()
    await bench.target.do_setup()
    await bench.target.restore([])


def image(info: base.Info, *, initiator: str = INITIATOR, **changed: str) -> str:
    """The volume as QEMU's options name it."""
    fields = {
        "driver": "iscsi",
        "transport": "tcp",
        "portal": info.data["target_portal"],
        "target": info.data["target_iqn"],
        "lun": info.data["target_lun"],
        "user": info.data["auth_username"],
        "password": info.secrets["auth_password"],
        "initiator-name": initiator,
        **changed,
    }
    return ",".join(f"{name}={value}" for name, value in fields.items() if value)


def qemu_io(image_options: str, *commands: str, read_only: bool = False) -> tuple[bool, str]:
    """Runs commands on the volume; returns whether all went well, and what was said."""
    tgtd.require_program("qemu-io")
    arguments = [part for command in commands for part in ("-c", command)]
    result = subprocess.run(
        ["qemu-io", *(["-r"] if read_only else []), *arguments, "--image-opts", image_options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = result.stdout + result.stderr
    return result.returncode == 0 and "failed" not in said, said


class Session:
    """An initiator that stays logged in."""

    def __init__(self, image_options: str) -> None:
        tgtd.require_program("qemu-io")
        self._process = subprocess.Popen(
            ["qemu-io", "--image-opts", image_options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        said = ""
        while "ops/sec" not in said and (line := self._process.stdout.readline()):
            said += line
        return said

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


async def connected(
    bench: Bench, connection: base.Connection | None = None
) -> tuple[drivers.Volume, pathlib.Path, base.Connection, base.Info]:
    volume, path = bench.volume()
    connection = connection or bench.connection()
    await bench.target.create_export(volume, path)
    return (
        volume,
        path,
        connection,
        await bench.target.initialize_connection(volume, path, connection),
    )


# Exports and connections


async def test_a_connected_initiator_reads_and_writes_the_volume(bench: Bench) -> None:
    _, path, _, info = await connected(bench)
    worked, said = await asyncio.to_thread(
        qemu_io, image(info), "write -P 0x5a 1M 64k", "read -P 0x5a 1M 64k", "flush"
    )
    assert worked, said
    assert path.read_bytes()[MIB : MIB + 65536] == b"\x5a" * 65536


async def test_a_connection_tells_all_that_a_connector_needs(bench: Bench) -> None:
    volume, path, connection, info = await connected(bench)
    prefix = "iqn.2010-10.org.openstack:volume-"
    assert info.driver_volume_type == "iscsi"
    assert info.data == {
        "target_discovered": False,
        "target_iqn": f"{prefix}{volume.id}-{connection.id}",
        "target_portal": bench.daemon.portal,
        "target_lun": 1,
        "volume_id": str(volume.id),
        "auth_method": "CHAP",
        "auth_username": connection.credentials["auth_username"],
        "access_mode": "rw",
        "encrypted": False,
        "discard": True,
    }
    assert info.secrets == {"auth_password": connection.credentials["auth_password"]}
    location = await bench.target.create_export(volume, path)
    assert location == f"{bench.daemon.portal},1 {prefix}{volume.id} 1"


async def test_nobody_gets_in_by_the_export_itself(bench: Bench) -> None:
    volume, _, _, info = await connected(bench)
    export = bench.target.volume_iqn(volume.id)
    for options in (image(info, target=export), image(info, target=export, user="", password="")):
        worked, said = await asyncio.to_thread(qemu_io, options, "read 0 4k", read_only=True)
        assert not worked
        assert "Target not found" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"password": "wrong.wrong.wron"}, "Authentication failure"),
        ({"user": "somebody"}, "Authentication failure"),
        ({"user": "", "password": ""}, "Authentication failure"),
        ({"initiator-name": "iqn.1993-08.org.debian:01:other"}, "Target not found"),
    ],
)
async def test_only_the_connected_initiator_with_its_secret_gets_in(
    bench: Bench, changed: dict[str, str], words: str
) -> None:
    _, _, _, info = await connected(bench)
    worked, said = await asyncio.to_thread(
        qemu_io, image(info, **changed), "read 0 4k", read_only=True
    )
    assert not worked
    assert words in said


async def test_a_read_only_connection_cannot_write_and_another_one_can(bench: Bench) -> None:
    reader = bench.connection(base.AccessMode.READ_ONLY)
    volume, path, _, read_info = await connected(bench, reader)
    write_info = await bench.target.initialize_connection(volume, path, bench.connection())
    assert read_info.data["access_mode"] == "ro"
    worked, said = await asyncio.to_thread(qemu_io, image(read_info), "write 0 4k")
    assert not worked
    assert "write protected" in said
    worked, said = await asyncio.to_thread(qemu_io, image(write_info), "write -P 7 0 4k")
    assert worked, said
    worked, said = await asyncio.to_thread(
        qemu_io, image(read_info), "read -P 7 0 4k", read_only=True
    )
    assert worked, said


async def test_the_same_connection_again_is_the_same_and_disturbs_no_session(
    bench: Bench,
) -> None:
    volume, path, connection, info = await connected(bench)
    session = Session(image(info))
    try:
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 0 4k")
        before = bench.shown()
        assert await bench.target.initialize_connection(volume, path, connection) == info
        await bench.target.create_export(volume, path)
        assert bench.shown() == before
    finally:
        session.end()


async def test_ending_one_connection_leaves_the_others_of_the_same_initiator(
    bench: Bench,
) -> None:
    volume, path, first, first_info = await connected(bench)
    second = bench.connection()
    second_info = await bench.target.initialize_connection(volume, path, second)
    session = Session(image(second_info))
    try:
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 0 4k")
        connections = bench.shown()[second_info.data["target_iqn"]].connections
        await bench.target.terminate_connection(volume, first, force=True)
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 4k 4k")
        assert bench.shown()[second_info.data["target_iqn"]].connections == connections != []
    finally:
        session.end()
    worked, said = await asyncio.to_thread(qemu_io, image(first_info), "read 0 4k", read_only=True)
    assert not worked
    assert "Target not found" in said
    assert first.credentials["auth_username"] not in bench.accounts()


async def test_ending_a_connection_cuts_a_live_session(bench: Bench) -> None:
    volume, _, connection, info = await connected(bench)
    session = Session(image(info))
    try:
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 0 4k")
        before = time.monotonic()
        await bench.target.terminate_connection(volume, connection)
        assert time.monotonic() - before < 5
        assert info.data["target_iqn"] not in bench.shown()
    finally:
        session.end()
    await bench.target.terminate_connection(volume, connection)


async def test_an_export_is_removed_with_the_connections_that_are_left(bench: Bench) -> None:
    volume, _, connection, _ = await connected(bench)
    other, other_path, _, _ = await connected(bench)
    await bench.target.remove_export(volume)
    assert not [iqn for iqn in bench.shown() if str(volume.id) in iqn]
    assert len([iqn for iqn in bench.shown() if str(other.id) in iqn]) == 2
    assert connection.credentials["auth_username"] not in bench.accounts()
    await bench.target.remove_export(volume)
    await bench.target.terminate_connection(volume, connection)
    assert await bench.target.check_health()
    assert other_path.exists()


async def test_targets_of_others_are_left_alone(bench: Bench) -> None:
    volume, path = bench.volume()
    theirs = f"{bench.target.volume_iqn(volume.id)}0"
    tid = max([target.tid for target in bench.shown().values()], default=0) + 1
    bench.daemon.add_target(tid, theirs, path)
    try:
        await bench.target.create_export(volume, path)
        await bench.target.remove_export(volume)
        await bench.target.restore([])
        assert theirs in bench.shown()
    finally:
        bench.daemon.adm("--op", "delete", "--mode", "target", "--tid", str(tid), "--force")


async def test_many_connections_made_at_once_get_ids_of_their_own(bench: Bench) -> None:
    async def connect() -> str:
        _, _, _, info = await connected(bench)
        return str(info.data["target_iqn"])

    names = await asyncio.gather(*(connect() for _ in range(12)))
    shown = bench.shown()
    assert set(names) <= set(shown)
    assert len({target.tid for target in shown.values()}) == len(shown)
    assert all(shown[name].accounts and shown[name].initiators for name in names)


async def test_an_id_that_a_stranger_takes_meanwhile_is_chosen_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_target = tgtadm.Tgtadm.new_target
    stolen: list[int] = []

    async def steal(self: tgtadm.Tgtadm, tid: int, iqn: str) -> None:
        if not stolen:
            stolen.append(tid)
            await new_target(self, tid, "iqn.2001-01.com.stranger:x")
        await new_target(self, tid, iqn)

    monkeypatch.setattr(tgtadm.Tgtadm, "new_target", steal)
    try:
        volume, path = bench.volume()
        await bench.target.create_export(volume, path)
        assert bench.shown()[bench.target.volume_iqn(volume.id)].tid != stolen[0]
    finally:
        bench.daemon.adm("--op", "delete", "--mode", "target", "--tid", str(stolen[0]))


# The unit


async def test_volumes_differ_in_what_multipath_knows_them_by(bench: Bench) -> None:
    tgtd.require_program("iscsi-inq")
    volume, _, connection, info = await connected(bench)
    account = "%".join(connection.credentials[n] for n in ("auth_username", "auth_password"))
    url = f"iscsi://{account}@{bench.daemon.portal}/{info.data['target_iqn']}/1"

    def inquire(page: str) -> str:
        return subprocess.run(
            ["iscsi-inq", "-i", INITIATOR, "-e", "1", "-c", page, url],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=True,
        ).stdout

    assert volume.id.hex in await asyncio.to_thread(inquire, "128")
    assert volume.id.hex[1:] in await asyncio.to_thread(inquire, "131")


async def test_holes_are_seen_and_made_through_it(bench: Bench) -> None:
    tgtd.require_program("qemu-img")
    _, path, _, info = await connected(bench)
    worked, said = await asyncio.to_thread(qemu_io, image(info), "write -P 1 0 1M", "flush")
    assert worked, said
    mapped = await asyncio.to_thread(
        subprocess.run,
        ["qemu-img", "map", "--output=json", "--image-opts", image(info)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    hole = {"start": MIB, "length": 7 * MIB, "zero": True, "data": False}
    assert hole.items() <= json.loads(mapped.stdout)[1].items()
    before = path.stat().st_blocks
    worked, said = await asyncio.to_thread(
        qemu_io, image(info, discard="unmap"), "discard 0 1M", "flush"
    )
    assert worked, said
    assert path.stat().st_blocks < before


async def test_without_a_write_cache_the_unit_says_so(
    daemon: tgtd.Tgtd, tmp_path: pathlib.Path
) -> None:
    bench = Bench(daemon, tmp_path, {"iscsi_write_cache": "off"})
    await bench.target.do_setup()
    try:
        _, path, _, info = await connected(bench)
        worked, said = await asyncio.to_thread(qemu_io, image(info), "write -P 3 0 4k")
        assert worked, said
        assert path.read_bytes()[:4096] == b"\3" * 4096
    finally:
        await bench.target.restore([])


# Restarts, of tgtd and of the worker


async def test_a_restart_of_tgtd_is_noticed_and_all_is_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, path, connection, info = await connected(bench)
    reader = bench.connection(base.AccessMode.READ_ONLY)
    read_info = await bench.target.initialize_connection(volume, path, reader)
    assert await bench.target.check_health()
    bench.daemon.kill()
    with pytest.raises(errors.TargetError, match="start it with"):
        await bench.target.check_health()
    with monkeypatch.context() as patched:
        patched.delenv(leftovers.MARK)  # it outlives the test, as others use it too
        bench.daemon.start()
    assert not await bench.target.check_health()
    assert await bench.target.restore([base.Export(volume, path, [connection, reader])]) == {}
    assert await bench.target.check_health()
    worked, said = await asyncio.to_thread(qemu_io, image(info), "write -P 9 0 4k")
    assert worked, said
    worked, said = await asyncio.to_thread(qemu_io, image(read_info), "write 0 4k")
    assert not worked
    assert "write protected" in said


async def test_a_new_worker_leaves_what_is_served_undisturbed_and_ends_the_rest(
    bench: Bench,
) -> None:
    volume, path, connection, info = await connected(bench)
    gone, _, gone_connection, _ = await connected(bench)
    session = Session(image(info))
    try:
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 0 4k")
        before = bench.shown()[info.data["target_iqn"]]
        bench.begin()
        await bench.target.do_setup()
        assert await bench.target.restore([base.Export(volume, path, [connection])]) == {}
        assert bench.shown()[info.data["target_iqn"]] == before
        assert "4096/4096" in await asyncio.to_thread(session.ask, "read 4k 4k")
    finally:
        session.end()
    assert not [iqn for iqn in bench.shown() if str(gone.id) in iqn]
    assert gone_connection.credentials["auth_username"] not in bench.accounts()
    assert await bench.target.check_health()


async def test_what_another_worker_of_the_host_is_making_meanwhile_stays(bench: Bench) -> None:
    other = Bench(bench.daemon, bench.folder)
    await other.target.do_setup()
    _, _, _, info = await connected(bench)
    await other.target.restore([])
    assert info.data["target_iqn"] in bench.shown()


async def test_one_bad_volume_does_not_stop_the_rest(bench: Bench) -> None:
    volume, path = bench.volume()
    bad, bad_path = bench.volume()
    bad_path.unlink()
    exports = [base.Export(bad, bad_path, []), base.Export(volume, path, [])]
    failures = await bench.target.restore(exports)
    assert list(failures) == [bad.id]
    assert failures[bad.id].code == "TargetError"
    assert bench.target.volume_iqn(volume.id) in bench.shown()
    assert bench.target.volume_iqn(bad.id) not in bench.shown()
    assert await bench.target.check_health()


async def test_a_connection_that_fails_half_way_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, path = bench.volume()
    connection = bench.connection()

    async def refuse(*_: object) -> None:
        raise tgtadm.Refused("no")

    with monkeypatch.context() as patched:
        patched.setattr(tgtadm.Tgtadm, "bind_initiator", refuse)
        with pytest.raises(errors.TargetError):
            await bench.target.initialize_connection(volume, path, connection)
    assert bench.target.connection_iqn(volume.id, connection.id) not in bench.shown()
    assert connection.credentials["auth_username"] not in bench.accounts()


async def test_a_target_left_half_made_by_a_crash_is_made_whole(bench: Bench) -> None:
    volume, path = bench.volume()
    connection = bench.connection(base.AccessMode.READ_ONLY)
    iqn = bench.target.connection_iqn(volume.id, connection.id)
    tid = max([target.tid for target in bench.shown().values()], default=0) + 1
    bench.daemon.adm("--op", "new", "--mode", "target", "--tid", str(tid), "-T", iqn)
    info = await bench.target.initialize_connection(volume, path, connection)
    worked, said = await asyncio.to_thread(qemu_io, image(info), "write 0 4k")
    assert not worked
    assert "write protected" in said


async def test_a_removal_that_tgtd_only_pretends_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, _, connection, info = await connected(bench)

    async def pretend(*_: object) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(tgtadm.Tgtadm, "delete_target", pretend)
        patched.setattr(tgt, "_PATIENCE", 0.2)
        with pytest.raises(errors.TargetError, match="does not let go"):
            await bench.target.terminate_connection(volume, connection)
    assert info.data["target_iqn"] in bench.shown()
    await bench.target.terminate_connection(volume, connection)
    assert info.data["target_iqn"] not in bench.shown()


# Trouble with the service


async def test_a_tgtd_that_is_away_is_a_target_error_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    volume, path, connection, _ = await connected(bench)
    with monkeypatch.context() as patched:
        patched.setenv("TGT_IPC_SOCKET", str(tmp_path / "nobody"))
        before = time.monotonic()
        for call in (
            bench.target.do_setup(),
            bench.target.check_health(),
            bench.target.create_export(volume, path),
            bench.target.initialize_connection(volume, path, connection),
            bench.target.terminate_connection(volume, connection),
            bench.target.restore([base.Export(volume, path, [connection])]),
        ):
            with pytest.raises(errors.TargetError, match="systemctl start tgt") as caught:
                await call
            assert caught.value.retryable
        assert time.monotonic() - before < 5
    await bench.target.terminate_connection(volume, connection)
    assert bench.target.connection_iqn(volume.id, connection.id) not in bench.shown()


async def test_a_missing_tgtadm_is_a_target_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.TargetError, match="install the package tgt"):
            await bench.target.do_setup()


async def test_a_portal_that_tgtd_does_not_serve_is_told_at_set_up(
    daemon: tgtd.Tgtd, tmp_path: pathlib.Path
) -> None:
    bench = Bench(daemon, tmp_path, {"target_address": "192.0.2.1"})
    with capture_logs() as logs:
        await bench.target.do_setup()
    assert "target.portal_not_served" in [line["event"] for line in logs]


async def test_the_secret_shows_in_no_log_no_error_and_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    spy = folder / "tgtadm"
    spy.write_text('#!/bin/sh\necho "tgtadm: cannot $*" >&2\nexit 22\n')
    spy.chmod(0o755)
    volume, _, connection, info = await connected(bench)
    secret = info.secrets["auth_password"]
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setenv("PATH", f"{folder}:/usr/bin:/bin")
        with pytest.raises(errors.TargetError) as caught:
            await tgtadm.Tgtadm(process.Executor()).new_account("u", secret)
    assert secret not in f"{logs} {caught.value} {caught.value.details} {caught.value.__cause__}"
    assert secret not in repr(info)
    assert secret not in repr(connection)
    state = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert state
    assert not [file for file in state if secret in file.read_text()]
    await bench.target.terminate_connection(volume, connection)


async def test_the_list_of_hundreds_of_targets_is_read_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, path = bench.volume()
    first = max([target.tid for target in bench.shown().values()], default=0) + 1
    tids = range(first, first + 450)
    for tid in tids:
        name = f"iqn.2001-01.com.stranger:{tid}"
        bench.daemon.adm("--op", "new", "--mode", "target", "--tid", str(tid), "-T", name)
    try:
        assert len(bench.daemon.targets()) > process.CAPTURE_LIMIT
        await bench.target.create_export(volume, path)
        assert await bench.target.check_health()
    finally:
        for tid in tids:
            bench.daemon.adm("--op", "delete", "--mode", "target", "--tid", str(tid))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}', "\0\0\0"])
async def test_a_record_that_a_power_loss_has_spoiled_is_one_without_an_account(
    bench: Bench, content: str
) -> None:
    volume, path = bench.volume()
    await bench.target.create_export(volume, path)
    connection = bench.connection()
    await bench.target.initialize_connection(volume, path, connection)
    for record in (bench.folder / "state" / "tgt").iterdir():
        record.write_text(content)
    bench.begin()
    await bench.target.do_setup()
    wanted = base.Export(volume, path, [connection])
    assert await bench.target.restore([wanted]) == {}
    # Written anew, so that the account goes with its target.
    await bench.target.terminate_connection(volume, connection)
    assert connection.credentials["auth_username"] not in bench.accounts()
    await bench.target.remove_export(volume)
    assert bench.shown() == {}
    assert leftovers.entries(bench.folder / "state" / "tgt") == []


async def test_a_spoiled_record_of_what_is_not_wanted_any_more_is_swept(bench: Bench) -> None:
    volume, path = bench.volume()
    await bench.target.create_export(volume, path)
    (record,) = (bench.folder / "state" / "tgt").iterdir()
    record.write_text("")
    bench.begin()
    os.utime(record, (0, 0))
    await bench.target.do_setup()
    assert await bench.target.restore([]) == {}
    assert bench.shown() == {}
