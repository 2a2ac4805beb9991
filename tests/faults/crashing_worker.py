"""A worker that kills itself at a crash point: ``python -m tests.faults.crashing_worker``.

    crashing_worker [--at NAME[:N]] [--when FILE] [--trace FILE] -- run --config FILE

is ``volume-worker run --config FILE``, except that its process gets SIGKILL the ``N``\\ th time it
comes to the point. With ``--when``, only what happens while that file is there counts; ``--trace``
names a file in which each point is noted, on a line of its own, before anything else is done.
"""

import argparse
import collections
import functools
import importlib
import inspect
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

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

    def wrap(self, point: points.Point, place: points.Place, name: str) -> None:
        """Wraps what ``name`` stands for.

        Raises:
            AttributeError: there is nothing of that name; the table of places is to be mended.
        """
        module, _, path = name.partition(":")
        *outer, last = path.split(".")
        owner: Any = importlib.import_module(module)
        for one in outer:
            owner = getattr(owner, one)
        setattr(owner, last, self._wrapped(point, place, getattr(owner, last)))

    def _wrapped(
        self, point: points.Point, place: points.Place, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        if not inspect.iscoroutinefunction(call):

            @functools.wraps(call)
            def plain(*args: Any, **kwargs: Any) -> Any:
                if place.before:
                    self.reach(point)
                result = call(*args, **kwargs)
                if not place.before and place.counts(args, result):
                    self.reach(point)
                return result

            return plain

        @functools.wraps(call)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            if place.before:
                self.reach(point)
            result = await call(*args, **kwargs)
            if not place.before and place.counts(args, result):
                self.reach(point)
            return result

        return waiting


def main(arguments: Sequence[str]) -> None:
    """Runs the command line with every place wrapped."""
    parser = argparse.ArgumentParser(prog="crashing_worker", description=__doc__)
    parser.add_argument("--at", type=points.At.read)
    parser.add_argument("--when", type=pathlib.Path)
    parser.add_argument("--trace", type=pathlib.Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    watch = Watch(options.at, when=options.when, trace=options.trace)
    for point, place in points.PLACES.items():
        for name in place.names:
            watch.wrap(point, place, name)
    sys.argv = ["volume-worker", *options.command]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
