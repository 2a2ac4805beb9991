"""Processes of this machine that have to do with a worker: found, looked at, ended by id."""

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from typing import NamedTuple


class Found(NamedTuple):
    """A process that mentions what was looked for."""

    pid: int
    command: str


def mentioning(text: str) -> list[Found]:
    """The processes with ``text`` in their environment or command line, zombies left out."""
    wanted = text.encode()
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if wanted in command or wanted in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and int(folder.name) != os.getpid():
                    shown = command.replace(b"\0", b" ").decode(errors="replace")
                    found.append(Found(int(folder.name), shown.strip()))
    return found


def command_lines() -> str:
    """The command lines of all processes: what any user of the machine can see."""
    lines = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1"))
    return "\n".join(lines)


def end(pid: int) -> None:
    """Kills a process, if it is still there, and waits until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _lives(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.01)


async def gone(text: str, *, timeout: float) -> list[Found]:
    """Waits until no process mentions ``text``; returns what is left at the end."""
    deadline = time.monotonic() + timeout
    while (left := mentioning(text)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


def _lives(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
