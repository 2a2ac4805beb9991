"""How fast a copy may go, and how fast it goes."""

import threading
import time
from collections import deque
from typing import Any, Final

CHUNK: Final = 1024 * 1024
"""Bytes moved at a time, at most."""
_SMALLEST: Final = 64 * 1024
_LATE: Final = 0.2
"""Seconds of falling behind that may be caught up."""
_WINDOW: Final = 10
"""Reports over which the rate is taken."""


class Throttle:
    """Lets so many bytes pass in a second, or any number."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._due = time.monotonic()
        self._changed = threading.Condition()
        self._turn = threading.Lock()

    def set(self, bytes_per_second: int | None) -> None:
        """Changes the rate, for those who already wait too."""
        with self._changed:
            self._rate = bytes_per_second
            self._due = time.monotonic()
            self._changed.notify_all()

    def step(self) -> int:
        """How many bytes to move at a time, so that it goes smoothly."""
        rate = self._rate
        return CHUNK if rate is None else min(CHUNK, max(_SMALLEST, rate // 8))

    def take(self, count: int) -> None:
        """Waits until ``count`` bytes may pass."""
        if self._rate is None:
            return
        with self._turn, self._changed:
            while self._rate and (delay := self._due - time.monotonic()) > 0:
                self._changed.wait(delay)
            if self._rate:
                self._due = max(self._due, time.monotonic() - _LATE) + count / self._rate


class Meter:
    """Counts what was done, from several threads; ``before`` bytes were done before."""

    def __init__(self, total: int, *, before: int = 0) -> None:
        self.total = total
        self._before = before
        self.copied = 0
        self.zeroed = 0
        self._moved = 0
        self._lock = threading.Lock()
        self._reports = deque([(time.monotonic(), 0)], maxlen=_WINDOW)

    def count(self, *, copied: int = 0, zeroed: int = 0, read: int = 0) -> None:
        """Adds bytes: copied as data, made or left zero, or read back."""
        with self._lock:
            self.copied += copied
            self.zeroed += zeroed
            self._moved += copied + read

    def report(self) -> dict[str, Any]:
        """The progress up to now: its rate is that of data over the last few reports."""
        now, moved = time.monotonic(), self._moved
        then, before = self._reports[0]
        self._reports.append((now, moved))
        return {
            "done_bytes": self._before + self.copied + self.zeroed,
            "total_bytes": self.total,
            "bytes_per_second": round((moved - before) / max(now - then, 1e-3)),
        }
