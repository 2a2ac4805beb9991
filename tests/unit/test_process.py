import asyncio
import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from messages import errors
from worker import process

SECRET = "hunter2hunter2"


@pytest.fixture
def execute() -> process.Executor:
    return process.Executor()


def alive(pid: int) -> bool:
    return process.start_time(pid) is not None


async def until(condition: Callable[[], bool], *, seconds: float = 5.0) -> None:
    """Waits until a condition holds; its caller's assert tells where it never did."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)


def written_pid(path: pathlib.Path) -> int:
    """The pid in a file, or 0 while it is not there."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


async def read_pid(path: pathlib.Path) -> int:
    await until(lambda: written_pid(path) > 0)
    return written_pid(path)


def descriptors() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def python(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.DEVNULL)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "300"])


@contextlib.asynccontextmanager
async def started(child: process.Child) -> AsyncIterator[process.Child]:
    try:
        yield child
    finally:
        await child.stop()


# How a program ends


async def test_a_result_has_both_streams_and_the_exit_code(execute: process.Executor) -> None:
    result = await execute.run("sh", "-c", "echo out; echo err >&2; exit 3", ok_codes=(0, 3))
    assert result == process.Result("sh", 3, "out\n", "err\n")


async def test_stdin_reaches_the_program(execute: process.Executor) -> None:
    assert (await execute.run("cat", stdin=b"x" * 300_000)).stdout == "x" * process.CAPTURE_LIMIT


async def test_a_program_that_never_reads_its_stdin_ends_all_the_same(
    execute: process.Executor,
) -> None:
    assert (await execute.run("true", stdin=b"x" * 5_000_000)).exit_code == 0


async def test_words_of_a_program_are_in_the_c_locale(
    execute: process.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    result = await execute.run("sh", "-c", "echo $LC_ALL $EXTRA", env={"EXTRA": "more"})
    assert result.stdout == "C more\n"


async def test_a_failure_tells_its_code_and_the_end_of_stderr(execute: process.Executor) -> None:
    with pytest.raises(errors.CommandFailed, match="sh ended with exit code 7: it broke") as caught:
        await execute.run("sh", "-c", "echo first >&2; echo it broke >&2; exit 7")
    assert caught.value.details == {
        "program": "sh",
        "exit_code": 7,
        "stderr": "first\nit broke\n",
    }


async def test_a_program_ended_by_a_signal_fails_with_its_negative_number(
    execute: process.Executor,
) -> None:
    with pytest.raises(errors.CommandFailed) as caught:
        await execute.run("sh", "-c", "kill -SEGV $$")
    assert caught.value.details["exit_code"] == -signal.SIGSEGV


@pytest.mark.parametrize("argv", [("no-such-program",), ("/",), ("/proc/version",)])
async def test_a_program_that_cannot_be_started_is_a_failed_command(
    execute: process.Executor, argv: tuple[str, ...]
) -> None:
    with pytest.raises(errors.CommandFailed, match="cannot be started"):
        await execute.run(*argv)


async def test_a_missing_program_cannot_be_started_to_go_on_running(
    execute: process.Executor,
) -> None:
    with pytest.raises(errors.CommandFailed, match="no-such-program cannot be started"):
        await execute.start("no-such-program")


# What it prints


async def test_five_mebibytes_on_stderr_do_not_block_it(execute: process.Executor) -> None:
    result = await execute.run(
        "sh", "-c", "head -c 5242880 /dev/zero | tr '\\0' e >&2; echo done", timeout=30
    )
    assert result.stdout == "done\n"
    assert result.stderr == "e" * process.CAPTURE_LIMIT


async def test_an_error_of_one_huge_line_has_a_short_message(execute: process.Executor) -> None:
    with pytest.raises(errors.CommandFailed) as caught:
        await execute.run("sh", "-c", "head -c 5242880 /dev/zero | tr '\\0' e >&2; exit 1")
    assert len(caught.value.message) < 1000
    assert len(caught.value.details["stderr"]) == 2000


async def test_more_of_the_output_is_kept_where_the_caller_needs_it(
    execute: process.Executor,
) -> None:
    size = 2 * process.CAPTURE_LIMIT
    result = await execute.run("head", "-c", str(size), "/dev/zero", capture_limit=10 * size)
    assert result.stdout == ""  # NULs are removed
    result = await execute.run("sh", "-c", f"yes | head -c {size}", capture_limit=10 * size)
    assert len(result.stdout) == size


async def test_bytes_that_are_not_utf8_and_nuls_hide_no_exit_code(
    execute: process.Executor,
) -> None:
    with pytest.raises(errors.CommandFailed) as caught:
        await execute.run("sh", "-c", r"printf 'a\377\376b\000c' >&2; exit 1")
    assert caught.value.details["exit_code"] == 1
    assert caught.value.details["stderr"] == "a��bc"
    assert "\0" not in str(caught.value)


# Timeouts, cancellation, and what is left behind


async def test_a_timeout_ends_the_grandchild_that_holds_the_pipe(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    pid_file = tmp_path / "pid"
    before = time.monotonic()
    with pytest.raises(errors.CommandTimeout) as caught:
        await execute.run("sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait", timeout=1)
    assert time.monotonic() - before < 4
    assert caught.value.details["timeout_seconds"] == 1
    grandchild = written_pid(pid_file)
    await until(lambda: not alive(grandchild))
    assert not alive(grandchild)


async def test_a_program_that_ignores_sigterm_is_killed(
    execute: process.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE", 0.3)
    before = time.monotonic()
    with pytest.raises(errors.CommandTimeout):
        await execute.run("sh", "-c", "trap '' TERM; sleep 300 & wait; sleep 300", timeout=0.3)
    assert time.monotonic() - before < 4


async def test_a_grandchild_that_stays_does_not_hold_up_the_result(
    execute: process.Executor, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that leaves a daemon behind has ended, whoever holds its pipes."""
    monkeypatch.setattr(process, "GRACE", 0.5)
    pid_file = tmp_path / "pid"
    before = time.monotonic()
    result = await execute.run(
        "sh", "-c", f"echo ready; sleep 300 & echo $! >{pid_file}; sleep 0.3"
    )
    try:
        assert time.monotonic() - before < 3
        assert result.stdout == "ready\n"
        assert alive(written_pid(pid_file))
    finally:
        os.kill(written_pid(pid_file), signal.SIGKILL)


async def test_a_killed_leader_is_not_waited_for_because_of_a_pipe_in_another_session(
    execute: process.Executor, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE", 0.5)
    pid_file = tmp_path / "pid"
    before = time.monotonic()
    try:
        with pytest.raises(errors.CommandTimeout):
            await execute.run(
                "sh",
                "-c",
                f"setsid sh -c 'echo $$ >{pid_file}; exec sleep 300' & sleep 300",
                timeout=0.5,
            )
        assert time.monotonic() - before < 4
    finally:
        os.kill(await read_pid(pid_file), signal.SIGKILL)


async def test_cancellation_ends_the_whole_group(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(execute.run("sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait"))
    grandchild = await read_pid(pid_file)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not alive(grandchild))
    assert not alive(grandchild)


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 5, 8, 13])
async def test_cancellation_during_the_start_leaves_nothing(
    execute: process.Executor, tmp_path: pathlib.Path, milliseconds: int
) -> None:
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(execute.run("sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait"))
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task
    grandchild = written_pid(pid_file)
    await until(lambda: not grandchild or not alive(grandchild))
    assert not grandchild or not alive(grandchild)


async def test_cancellation_is_never_swallowed_while_pipes_are_drained(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(execute.run("sh", "-c", f"sleep 300 & echo $! >{pid_file}"))
    try:
        await read_pid(pid_file)
        await asyncio.sleep(0.2)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        os.kill(await read_pid(pid_file), signal.SIGKILL)


async def test_many_programs_at_once_leave_no_descriptors(execute: process.Executor) -> None:
    await execute.run("true")
    before = descriptors()
    await asyncio.gather(*(execute.run("sh", "-c", "echo x; echo y >&2") for _ in range(40)))
    await until(lambda: descriptors() <= before)
    assert descriptors() <= before


# Secrets


async def test_a_secret_shows_in_no_error_and_no_log(execute: process.Executor) -> None:
    script = f"echo value {SECRET} refused >&2; exit 7"
    with capture_logs() as logs, pytest.raises(errors.CommandFailed) as caught:
        await execute.run("sh", "-c", script, secrets=[SECRET])
    assert SECRET not in f"{logs} {caught.value} {caught.value.details} {caught.value!r}"
    assert "value *** refused" in caught.value.message


async def test_a_secret_shows_in_no_error_of_a_timeout(execute: process.Executor) -> None:
    with capture_logs() as logs, pytest.raises(errors.CommandTimeout) as caught:
        await execute.run(
            "sh", "-c", f"echo {SECRET} >&2; sleep 300", secrets=[SECRET], timeout=0.5
        )
    assert SECRET not in f"{logs} {caught.value} {caught.value.details}"
    assert "***" in caught.value.details["stderr"]


async def test_a_password_that_nobody_declared_is_masked_by_its_name(
    execute: process.Executor,
) -> None:
    script = f"echo tool: bad option --password {SECRET} >&2; exit 7"
    with capture_logs() as logs, pytest.raises(errors.CommandFailed) as caught:
        await execute.run("sh", "-c", script)
    assert SECRET not in f"{logs} {caught.value} {caught.value.details}"


async def test_no_argument_is_ever_logged(execute: process.Executor) -> None:
    with capture_logs() as logs:
        await execute.run("true", "--user", "somebody", SECRET)
    assert SECRET not in str(logs)
    assert logs[0]["event"] == "process.started"


# Root


async def test_the_root_helper_goes_first_and_keeps_the_environment() -> None:
    """sudo(8) resets the environment, so env(1) sets it again behind it."""
    helped = process.Executor(root_helper=("env", "-i", f"PATH={os.environ['PATH']}"))
    result = await helped.run(
        "sh", "-c", "echo $SOCKET:$LC_ALL", env={"SOCKET": "/run/s"}, run_as_root=True
    )
    assert result.stdout == "/run/s:C\n"
    assert result.program == "sh"


async def test_the_root_helper_is_left_out_where_root_is_not_needed() -> None:
    helped = process.Executor(root_helper=("false",))
    assert (await helped.run("echo", "x")).stdout == "x\n"


# Programs that go on running


async def test_a_child_is_spoken_to_line_by_line(execute: process.Executor) -> None:
    async with started(await execute.start("cat")) as child:
        await child.write_line(b"hello")
        assert await anext(child.lines()) == b"hello"
        assert child.exit_code is None


async def test_a_stopped_child_is_gone_with_its_group(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    pid_file = tmp_path / "pid"
    child = await execute.start("sh", "-c", f"sleep 300 & echo $! >{pid_file}; wait")
    grandchild = await read_pid(pid_file)
    await child.stop()
    await until(lambda: not alive(grandchild))
    assert not alive(grandchild)
    assert child.exit_code is not None
    await child.stop()


async def test_a_child_that_ends_tells_its_code_and_last_words(execute: process.Executor) -> None:
    async with started(await execute.start("sh", "-c", "echo oops >&2; exit 4")) as child:
        assert await child.wait() == 4
        assert child.stderr == "oops\n"
        await child.write_line(b"nobody hears this")


async def test_a_child_dies_with_a_worker_that_is_killed(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import asyncio, pathlib
from worker import process

async def main():
    child = await process.Executor().start("sleep", "300")
    pathlib.Path({str(pid_file)!r}).write_text(f"{{child.pid}}\\n")
    await asyncio.sleep(300)

asyncio.run(main())
"""
    worker = python(script)
    try:
        child = await read_pid(pid_file)
        assert alive(child)
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not alive(child))
    assert not alive(child)


# Processes of an earlier worker


async def test_a_recorded_process_is_ended() -> None:
    left = sleeper()
    started = process.start_time(left.pid)
    assert started is not None
    assert await process.end_recorded(left.pid, started)
    assert left.wait() == -signal.SIGTERM
    assert not await process.end_recorded(left.pid, started)


async def test_another_process_under_a_recorded_pid_is_left_alone() -> None:
    left = sleeper()
    try:
        started = process.start_time(left.pid)
        assert started is not None
        assert not await process.end_recorded(left.pid, started - 1)
        assert left.poll() is None
    finally:
        left.kill()
        left.wait()


def test_the_start_time_is_read_past_an_odd_program_name(tmp_path: pathlib.Path) -> None:
    odd = tmp_path / "a) S (b"
    odd.write_text(f"#!{shlex.quote('/bin/sh')}\nsleep 300\n")
    odd.chmod(0o755)
    program = subprocess.Popen([odd], start_new_session=True)
    try:
        assert (process.start_time(program.pid) or 0) > 0
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert process.start_time(program.pid) is None


def test_a_program_is_found_on_the_path_or_not_at_all() -> None:
    assert process.find_program("sh") is not None
    assert process.find_program("no-such-program") is None


# A worker that ends


async def test_what_runs_while_the_worker_ends_is_killed_when_its_time_is_up(
    execute: process.Executor,
) -> None:
    hanging = asyncio.create_task(execute.run("sh", "-c", "trap '' TERM; sleep 300 & wait; wait"))
    await asyncio.sleep(0.1)
    execute.end_by(0.2)
    with pytest.raises(errors.CommandTimeout, match=r"sh was killed after .* s: the worker ends"):
        await asyncio.wait_for(hanging, 60)


async def test_what_is_run_while_the_worker_ends_gets_the_time_that_is_left(
    execute: process.Executor,
) -> None:
    execute.end_by(1)
    assert (await execute.run("echo", "x")).stdout == "x\n"
    with pytest.raises(errors.CommandTimeout, match="the worker ends"):
        await asyncio.wait_for(execute.run("sleep", "300"), 60)
    with pytest.raises(errors.CommandTimeout, match="echo was not started: the worker ends"):
        await execute.run("echo", "x")


async def test_all_that_runs_can_be_killed_at_once(
    execute: process.Executor, tmp_path: pathlib.Path
) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 300 & echo $! >{pid_file}; wait"
    running = asyncio.create_task(execute.run("sh", "-c", script, ok_codes=(-signal.SIGKILL,)))
    child = await execute.start("sleep", "300")
    grandchild = await read_pid(pid_file)
    execute.children.kill_all()
    await asyncio.wait_for(running, 60)
    assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
    await child.stop()
    await until(lambda: not alive(grandchild))
    assert not alive(grandchild)


async def test_a_program_that_is_waited_for_dies_with_a_worker_that_is_killed(
    tmp_path: pathlib.Path,
) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import asyncio
from worker import process

asyncio.run(process.Executor().run("sh", "-c", "echo $$ >{pid_file}; exec sleep 300"))
"""
    worker = python(script)
    try:
        child = await read_pid(pid_file)
        assert alive(child)
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not alive(child))
    assert not alive(child)


def test_orphans_are_reaped_and_no_exit_code_of_a_child_is_lost() -> None:
    """As PID 1 does it; a subreaper inherits orphans like that, prctl(2)."""
    script = """
import asyncio, ctypes, os
from worker import children, process

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
children.REAP_INTERVAL = 0.001

async def main():
    execute = process.Executor()
    reaping = asyncio.create_task(execute.children.reap_orphans())
    orphan = "setsid sleep 0.1 >/dev/null 2>&1 </dev/null & exit 3"
    for _ in range(5):
        await asyncio.gather(*(
            execute.run("sh", "-c", orphan, ok_codes=(3,)) for _ in range(8)
        ))
    async with asyncio.timeout(30):
        while True:
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            await asyncio.sleep(0.01)

asyncio.run(main())
"""
    ended = python(script)
    assert ended.wait(60) == 0
