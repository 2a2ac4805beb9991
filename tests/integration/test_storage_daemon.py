"""The daemon wrapper against a real qemu-storage-daemon."""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest

from messages import errors
from tests.services import attaching, leftovers, tgtd
from worker import durable, process
from worker.storage_daemon import daemon, record

SECRET = "a-secret-nobody-may-see"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: pathlib.Path) -> Iterator[None]:
    tgtd.require_program("qemu-storage-daemon", "setpriv")
    with leftovers.none(tmp_path):
        yield


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "daemon"


@pytest.fixture
async def built(folder: pathlib.Path) -> AsyncIterator[daemon.StorageDaemon]:
    wrapped = daemon.StorageDaemon(process.Executor(), folder)
    yield wrapped
    await wrapped.stop()


def another(folder: pathlib.Path) -> daemon.StorageDaemon:
    """The same daemon as a later worker sees it."""
    return daemon.StorageDaemon(process.Executor(), folder)


@pytest.mark.parametrize("outlives_worker", [False, True], ids=["bridge", "server"])
async def test_a_started_daemon_answers_and_ends_without_a_trace(
    built: daemon.StorageDaemon, folder: pathlib.Path, outlives_worker: bool
) -> None:
    await built.start(outlives_worker=outlives_worker)
    assert built.alive
    assert await built.execute("query-block-exports") == []
    assert os.stat(folder).st_mode & 0o777 == 0o700  # noqa: PTH116 - no blocking worth a thread
    pid = built.pid
    assert pid is not None
    await built.stop()
    assert process.start_time(pid) is None
    assert leftovers.entries(folder) == []


async def test_a_later_worker_finds_the_same_server(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True, configuration="one")
    pid = built.pid
    await built.release()
    later = another(folder)
    assert await later.adopt(configuration="one")
    assert later.pid == pid
    await later.execute("query-version")
    await later.stop()


async def test_a_server_whose_worker_died_before_it_recorded_the_pid_is_found_all_the_same(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True)
    pid = built.pid
    await built.release()
    found = record.read(folder)
    assert found is not None
    await record.write(folder, record.Record(found.sockets, "", boot_id=found.boot_id))
    later = another(folder)
    assert await later.adopt()
    assert later.pid == pid
    await later.stop()


async def test_starting_anew_ends_a_server_that_was_left_without_a_recorded_pid(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True)
    pid = built.pid
    assert pid is not None
    await built.release()
    found = record.read(folder)
    assert found is not None
    await record.write(folder, record.Record(found.sockets, "", boot_id=found.boot_id))
    later = another(folder)
    await later.start(outlives_worker=True)
    assert process.start_time(pid) is None
    await later.stop()


async def test_a_server_with_another_configuration_is_ended_and_not_adopted(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True, configuration="one")
    pid = built.pid
    assert pid is not None
    await built.release()
    assert not await another(folder).adopt(configuration="two")
    assert process.start_time(pid) is None
    assert leftovers.entries(folder) == []


async def test_a_recorded_process_that_is_somebody_else_is_left_alone(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True)
    found = record.read(folder)
    assert found is not None
    await built.stop()
    stranger = await process.Executor().start("sleep", "60")
    # The pid came again, the start time did not.
    await record.write(
        folder, record.Record(found.sockets, "", stranger.pid, found.started, found.boot_id)
    )
    assert not await another(folder).adopt()
    assert stranger.exit_code is None
    await stranger.stop()


async def test_a_record_of_before_the_last_boot_names_no_process(folder: pathlib.Path) -> None:
    durable.make_private(folder)
    started = process.start_time(os.getpid())
    await record.write(folder, record.Record(folder, "", os.getpid(), started, "another-boot"))
    found = record.read(folder)
    assert found is not None
    assert found.pid is None


async def test_a_record_that_cannot_be_read_counts_as_none(folder: pathlib.Path) -> None:
    durable.make_private(folder)
    (folder / "daemon.json").write_text('{"sockets": ')
    assert not await another(folder).adopt()


async def test_a_killed_daemon_is_noticed(
    built: daemon.StorageDaemon, folder: pathlib.Path
) -> None:
    await built.start(outlives_worker=True)
    assert built.pid is not None
    await leftovers.kill(built.pid)
    assert not built.connected
    with pytest.raises(errors.TargetError, match=r"ended|not running"):
        await built.execute("query-version")
    assert not await another(folder).adopt()
    assert leftovers.entries(folder) == []


async def test_a_daemon_that_ends_during_a_command_is_a_target_error(
    built: daemon.StorageDaemon,
) -> None:
    await built.start()
    assert built.pid is not None
    os.kill(built.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(built.execute("query-version"))
    await asyncio.sleep(0.05)
    os.kill(built.pid, signal.SIGKILL)
    with pytest.raises(errors.TargetError, match="ended during query-version"):
        await waiting


async def test_a_daemon_that_hangs_is_a_target_error_in_time_and_can_be_stopped(
    built: daemon.StorageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "STOP_TIMEOUT", 0.2)
    await built.start(outlives_worker=True)
    assert built.pid is not None
    os.kill(built.pid, signal.SIGSTOP)
    with pytest.raises(errors.TargetError, match=r"did not answer query-version within 0\.1 s"):
        await built.execute("query-version", timeout=0.1)
    await built.stop()
    assert not built.alive


async def test_a_daemon_that_hangs_is_not_adopted_and_not_killed(
    built: daemon.StorageDaemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "CONNECT_TIMEOUT", 0.2)
    await built.start(outlives_worker=True)
    pid = built.pid
    assert pid is not None
    await built.release()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(errors.TargetError, match="runs but does not answer"):
        await another(folder).adopt()
    os.kill(pid, signal.SIGCONT)
    assert await built.adopt()
    assert built.pid == pid


async def test_a_hung_daemon_with_a_full_backlog_holds_up_nothing_else(
    built: daemon.StorageDaemon, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "CONNECT_TIMEOUT", 0.3)
    await built.start(outlives_worker=True)
    pid = built.pid
    assert pid is not None
    found = record.read(folder)
    assert found is not None
    await built.release()
    with attaching.hanging(pid), contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            for _ in range(20):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.settimeout(0)
                waiting.connect(str(found.sockets / "qmp"))
        adopting = asyncio.create_task(another(folder).adopt())
        turns = 0
        while not adopting.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(errors.TargetError, match="runs but does not answer"):
            await adopting
        assert turns > 5
    assert process.start_time(pid) is not None
    assert await built.adopt()
    assert built.pid == pid


async def test_a_refused_command_is_told_in_the_words_of_qemu(built: daemon.StorageDaemon) -> None:
    await built.start()
    with pytest.raises(errors.TargetError, match=r"refused blockdev-del: .*nothere"):
        await built.execute("blockdev-del", {"node-name": "nothere"})
    await built.execute("query-version")


@pytest.mark.parametrize("outlives_worker", [False, True], ids=["bridge", "server"])
async def test_a_daemon_that_cannot_start_says_why_and_leaves_nothing(
    built: daemon.StorageDaemon, folder: pathlib.Path, outlives_worker: bool
) -> None:
    with pytest.raises(errors.TargetError, match=r"does not start: .*no-such-driver"):
        await built.start("--blockdev", "driver=no-such-driver", outlives_worker=outlives_worker)
    assert leftovers.entries(folder) == []


async def test_a_missing_program_is_a_target_error(
    built: daemon.StorageDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PROGRAM", "no-such-storage-daemon")
    with pytest.raises(errors.TargetError, match="does not start"):
        await built.start(outlives_worker=True)


@pytest.mark.parametrize(
    "name", ["x" * 200, "with, comma", "with space and 'quotes'", "üñí=code", "."], ids=repr
)
async def test_any_folder_will_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        wrapped = another(tmp_path / name)
        await wrapped.start(outlives_worker=True)
        assert len(os.fsencode(wrapped.data_socket)) <= record.SOCKET_PATH_LIMIT
        await wrapped.release()
        later = another(tmp_path / name)
        assert await later.adopt()
        await later.stop()
        assert leftovers.entries(tmp_path / name) == []
        assert leftovers.entries(runtime) == []


async def test_a_secret_shows_nowhere(
    built: daemon.StorageDaemon, folder: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await built.start()
    await built.add_secret("s", SECRET)
    with pytest.raises(errors.TargetError) as caught:
        await built.add_secret("s", SECRET)
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert SECRET not in leftovers.command_line(built.pid)
    assert leftovers.entries(folder) == ["daemon.json", "sockets"]
    out, err = capfd.readouterr()
    assert SECRET not in out + err


WORKER = """
import asyncio, pathlib, sys
from worker import durable, process
from worker.storage_daemon import daemon

async def main():
    built = daemon.StorageDaemon(process.Executor(), pathlib.Path(sys.argv[1]))
    await built.start(outlives_worker=sys.argv[2] == "server")
    print("pid", built.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["bridge", "server"])
async def test_a_bridge_dies_with_its_killed_worker_and_a_server_goes_on(
    folder: pathlib.Path, kind: str
) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(folder), kind), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    pid = None
    async for line in worker.stdout:
        if line.startswith(b"pid "):
            pid = int(line.split()[1])
            break
    assert pid is not None
    worker.kill()
    await worker.communicate()
    later = another(folder)
    if kind == "server":
        assert await later.adopt()
        assert later.pid == pid
    else:
        assert not await later.adopt()
        assert process.start_time(pid) is None
    await later.stop()
    assert leftovers.entries(folder) == []
