"""A worker that kills itself at a crash point: ``python -m tests.faults.crashing_worker``.

    crashing_worker [--at NAME[:N]] [--when FILE] [--trace FILE] -- run --config FILE

is ``volume-worker run --config FILE``, except that its process gets SIGKILL the ``N``\\ th time it
comes to the point. With ``--when``, only what happens while that file is there counts; ``--trace``
names a file in which each point is noted, on a line of its own, before anything else is done.
"""

import argparse
import collections
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from tests.faults import points
from worker import cli


class Watch:
    """Notes the points that this process comes to, and ends it at one of them."""

    def __init__(
        self,
        at: points.At | None,
        *,
        when: pathlib.Path | None,
        trace: pathlib.Path | None,
    ) -> None:
        self._at = at
        self._when = when
        self._trace = trace
        self._times: collections.Counter[points.Point] = collections.Counter()

    def reach(self, point: points.Point) -> None:
        """The process has come to a point; this may be the end of it."""
        if self._when is not None and not self._when.exists():
            return
        self._times[point] += 1
        time = self._times[point] - points.PLACES[point].nth + 1
        if time < 1:
            return
        self._note(point)
        if self._at == (point, time):
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, point: points.Point) -> None:
        if self._trace is not None:
            with self._trace.open("a") as file:
                file.write(f"{point}\n")

    async def reach_awaited(self, point: points.Point) -> None:
        """As :meth:`reach`."""
        self.reach(point)


def main(arguments: Sequence[str]) -> None:
    """Runs the command line with every place wrapped."""
    parser = argparse.ArgumentParser(prog="crashing_worker", description=__doc__)
    parser.add_argument("--at", type=points.At.read)
    parser.add_argument("--when", type=pathlib.Path)
    parser.add_argument("--trace", type=pathlib.Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    watch = Watch(options.at, when=options.when, trace=options.trace)
    points.watch(watch.reach, watch.reach_awaited)
    sys.argv = ["volume-worker", *options.command]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
