"""What the demo leaves: processes that were seen at work, ports, targets."""

import asyncio
import collections
import pathlib
from collections.abc import Iterable

from worker import process
from worker.storage_daemon import record


class Processes:
    """Every process that was seen below the workers, or serves for one, for as long as it looks."""

    def __init__(self, roots: Iterable[int], state_dirs: Iterable[pathlib.Path]) -> None:
        self._roots = set(roots)
        self._state_dirs = list(state_dirs)
        self._seen: dict[tuple[int, int], str] = {}

    async def run(self) -> None:
        """Looks, again and again, until cancelled."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(0.1)

    def children(self) -> list[str]:
        """The processes below the workers now."""
        return [f"{name} (pid {pid})" for pid, _, name in _descendants(self._roots)]

    def names(self) -> str:
        """What was seen, for people: each program with how many there were."""
        counted = collections.Counter(self._seen.values())
        return ", ".join(f"{count} x {name}" for name, count in sorted(counted.items()))

    def alive(self) -> list[str]:
        """Which of those seen still run."""
        return [
            f"{name} (pid {pid})"
            for (pid, started), name in self._seen.items()
            if process.start_time(pid) == started
        ]

    def _look(self) -> None:
        for pid, started, name in _descendants(self._roots):
            self._seen[pid, started] = name
        for state_dir in self._state_dirs:
            # An NBD server is nobody's child: it outlives its worker.
            for path in state_dir.glob("backends/*/nbd"):
                found = record.read(path)
                if found is not None and found.pid is not None and found.started is not None:
                    self._seen[found.pid, found.started] = _name(found.pid)


def _descendants(roots: set[int]) -> list[tuple[int, int, str]]:
    parents = {}
    for path in pathlib.Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(path)) is not None:
            parents[int(path.name)] = parent
    below = set(roots)
    found: list[tuple[int, int, str]] = []
    grew = True
    while grew:
        new = {pid for pid, parent in parents.items() if parent in below} - below
        below |= new
        grew = bool(new)
    for pid in below - roots:
        started = process.start_time(pid)
        if started is not None:
            found.append((pid, started, _name(pid)))
    return found


def _parent(path: pathlib.Path) -> int | None:
    try:
        stat = (path / "stat").read_bytes()
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


def _name(pid: int) -> str:
    try:
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return pathlib.Path(command[0].decode("utf-8", "replace")).name or "?"
