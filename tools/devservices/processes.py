"""Linux processes by pid *and* start time, so that a reused pid is never taken for ours."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")


class Process(NamedTuple):
    """One process for all its life: the kernel reuses a pid, but not with this start time."""

    pid: int
    start: int  # clock ticks since boot, as in /proc/PID/stat


class Entry(NamedTuple):
    """A row of the process table."""

    process: Process
    parent: int
    session: int
    name: str


def boot_id() -> str:
    """Start times count from the boot, so they mean nothing after another one."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def look_up(pid: int) -> Entry | None:
    """The process that has this pid now, or None if there is none or only a zombie is left."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain any character.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if fields[0] in {"Z", "X"}:
        return None
    return Entry(
        process=Process(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        name=head.partition("(")[2],
    )


def is_alive(process: Process) -> bool:
    entry = look_up(process.pid)
    return entry is not None and entry.process == process


def table() -> list[Entry]:
    pids = [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]
    return [entry for entry in map(look_up, pids) if entry is not None]


def family(members: Iterable[Process], is_ours: Callable[[int], bool]) -> list[Process]:
    """The live ones of `members`, what else `is_ours` knows, and all their sessions and children.

    A session's id is the pid of its first process, and the kernel gives that pid to nobody else
    while the session has members: so they are found even after their first process has ended.
    """
    entries = table()
    recorded = set(members)
    others = {entry.process.pid for entry in entries if entry.process not in recorded}
    sessions = {process.pid for process in recorded} - others
    ours: dict[int, Process] = {
        entry.process.pid: entry.process
        for entry in entries
        if entry.process in recorded or entry.session in sessions or is_ours(entry.process.pid)
    }
    grown = True
    while grown:
        grown = False
        for entry in entries:
            if entry.parent in ours and entry.process.pid not in ours:
                ours[entry.process.pid] = entry.process
                grown = True
    ours.pop(os.getpid(), None)
    return list(ours.values())


def environment_has(pid: int, variable: str, value: str) -> bool:
    with contextlib.suppress(OSError):
        wanted = f"{variable}={value}".encode()
        return wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def arguments(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        text = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        return text.split("\0")
    return []


def working_directory(pid: int) -> Path | None:
    """None also where the kernel does not let us look."""
    try:
        return (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None


def send(process: Process, number: signal.Signals) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def all_gone(processes: Iterable[Process]) -> bool:
    return not any(is_alive(process) for process in processes)
