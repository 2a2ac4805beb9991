"""The children that this process has started, told from those that it was left with.

Whose parent ends becomes a child of PID 1 (or of a subreaper, prctl(2)), and stays a zombie until
that reaps it. In a container without an init of its own, PID 1 is the worker.
"""

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
from collections.abc import Iterator, Sequence
from typing import Final

REAP_INTERVAL: Final = 1.0
"""Seconds between two looks for orphans that have ended."""
_BOOT_ID: Final = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Children:
    """The programs that were started here and have not been reaped yet."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._starting = 0

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While one is being started: it may end before its pid is known here."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def add(self, pid: int) -> None:
        """One has started."""
        self._pids.add(pid)

    def remove(self, pid: int) -> None:
        """One has ended, and was reaped."""
        self._pids.discard(pid)

    def kill_all(self) -> None:
        """Kills them with their groups and waits for nothing; may be called from any thread."""
        for pid in tuple(self._pids):
            # Of one that is reaped in this moment, the pid may be another's.
            if parent(pid) == os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    async def reap_orphans(self) -> None:
        """Reaps, until cancelled, the children that ended and were not started here."""
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            if not self._starting and _any_has_ended():
                self._reap()

    def _reap(self) -> None:
        for pid in _zombies():
            # asyncio reaps its own, and has to: an exit code can be had once.
            if pid not in self._pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def stat(pid: int) -> Sequence[bytes] | None:
    """The fields of proc_pid_stat(5) from the third, the state, on; None if there is no process."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The program's name, in parentheses, may hold spaces and parentheses itself.
    return text[text.rindex(b")") + 2 :].split()


def parent(pid: int) -> int | None:
    """The pid of a process's parent; None if there is no process."""
    fields = stat(pid)
    return int(fields[1]) if fields else None


def _any_has_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _zombies() -> list[int]:
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        fields = stat(int(folder.name))
        if fields and fields[0] == b"Z" and int(fields[1]) == os.getpid():
            found.append(int(folder.name))
    return found


@functools.cache
def boot_id() -> str:
    """Tells one boot of this machine from another, random(4)."""
    return _BOOT_ID.read_text().strip()
