"""Finding what a test leaves behind: processes, mounts and files."""

import asyncio
import contextlib
import os
import pathlib
import signal
import time
import uuid
from collections.abc import Iterator

from worker import process

MARK = "VOLUME_WORKER_TEST_MARK"
PATIENCE = 5.0
"""Seconds that a killed process may take to be gone."""


@contextlib.contextmanager
def none(folder: pathlib.Path) -> Iterator[None]:
    """Fails where a process started in the block outlives it, or a mount below ``folder``."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
    deadline = time.monotonic() + PATIENCE
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes are left: {left}"
    assert not mounts(folder)


def processes(mark: str) -> list[str]:
    """The command lines of the running processes that were started in a marked block."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = command_line(int(folder.name)).strip()
            if wanted in environment and command:
                found.append(command)
    return found


def command_line(pid: int | None) -> str:
    """What anyone on the machine can see of a process."""
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def kill(pid: int | None) -> None:
    """Kills a process as a crash would, and waits until it is gone."""
    assert pid is not None
    started = process.start_time(pid)
    os.kill(pid, signal.SIGKILL)
    for _ in range(1000):
        if process.start_time(pid) != started:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"process {pid} does not go")


def mounts(folder: pathlib.Path) -> list[str]:
    """The mounts below a folder."""
    lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(f"{folder}/")]


def entries(folder: pathlib.Path | str) -> list[str]:
    """What is in a folder, hidden files too."""
    return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths
