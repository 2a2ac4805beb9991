"""A worker that can be made to stand still: ``python -m tests.services.holding_worker``.

    holding_worker FOLDER run --config FILE

is ``volume-worker run --config FILE``, except that whatever comes to one of the points that are
named in ``FOLDER/hold`` (``NAME`` or ``NAME:N``, see :mod:`tests.faults.points`; the last word is a
number of its own for each content) waits there, once, until that changes, and says so by
``FOLDER/held``.
"""

import asyncio
import collections
import pathlib
import sys
import threading
import time
from typing import Final

from tests.faults import points
from worker import cli

PAUSE: Final = 0.01


class Hold:
    """The points at which to wait, as the test says now."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._file = folder / "hold"
        self._held = folder / "held"
        self._times: collections.Counter[points.Point] = collections.Counter()
        self._text = ""

    async def wait(self, point: points.Point) -> None:
        """Somebody has come to a point."""
        if text := self._found(point):
            while self._read() == text:
                await asyncio.sleep(PAUSE)

    def wait_in_thread(self, point: points.Point) -> None:
        """The same in a thread; what the event loop calls itself must not keep it."""
        if threading.current_thread() is not threading.main_thread() and (
            text := self._found(point)
        ):
            while self._read() == text:
                time.sleep(PAUSE)

    def _found(self, point: points.Point) -> str:
        """What is said now, where it names this point and this time; else nothing."""
        text = self._read()
        if text != self._text:
            self._text = text
            self._times.clear()
        self._times[point] += 1
        time = self._times[point] - points.PLACES[point].nth + 1
        if points.At(point, time) not in map(points.At.read, text.split()[:-1]):
            return ""
        self._held.write_text(f"{text} {point}")
        return text

    def _read(self) -> str:
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return ""


def main() -> None:
    """Runs the command line with every place wrapped."""
    hold = Hold(pathlib.Path(sys.argv[1]))
    points.watch(hold.wait_in_thread, hold.wait)
    sys.argv = ["volume-worker", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
