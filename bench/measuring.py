"""Calls, kept in flight and timed. Standard library alone: the peers' environment uses it too.

A caller is a process of its own, so that its work is not the server's. It reads one line of JSON
for each measurement, ``{"in_flight": 64, "seconds": 5}``, and prints one with what came of it.
"""

import asyncio
import concurrent.futures
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

BROKER_URL = "VOLUME_WORKER_BROKER_URL"
"""The variable that the processes have it by: its password belongs on no argument list."""
READY = "ready"
"""The line that a process prints once it can be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What came of one measurement; latencies in milliseconds."""

    calls_per_second: float
    p50: float
    p99: float
    calls: int
    """All that were answered, those too late to be counted included."""


class Clock:
    """Counts the calls that are answered in time."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._seconds = seconds
        self._late = 0
        self._taken: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether no more calls are to be made."""
        return time.perf_counter() - self._began >= self._seconds

    def answered(self, called_at: float) -> None:
        """Takes note of a call that began at ``called_at`` of ``time.perf_counter``."""
        if self.is_over:
            self._late += 1
        else:
            self._taken.append(time.perf_counter() - called_at)

    def measured(self) -> Measured:
        """The figures. With less than two calls there are none."""
        if len(self._taken) < 2:
            raise SystemExit("no call was answered in time")
        hundredths = statistics.quantiles(self._taken, n=100, method="inclusive")
        return Measured(
            calls_per_second=len(self._taken) / self._seconds,
            p50=hundredths[49] * 1000,
            p99=hundredths[98] * 1000,
            calls=len(self._taken) + self._late,
        )


Measure = Callable[[int, float], Measured]


def serve(measure: Measure) -> None:
    """Measures as the lines on stdin say, until there are no more."""
    print(READY, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(dataclasses.asdict(measure(asked["in_flight"], asked["seconds"]))))
        sys.stdout.flush()


async def serve_async(call: Callable[[], Awaitable[None]]) -> None:
    """As :func:`serve`, for a call that is a coroutine."""
    loop = asyncio.get_running_loop()
    print(READY, flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        clock = Clock(asked["seconds"])
        await asyncio.gather(*(_call_on(call, clock) for _ in range(asked["in_flight"])))
        print(json.dumps(dataclasses.asdict(clock.measured())), flush=True)


async def _call_on(call: Callable[[], Awaitable[None]], clock: Clock) -> None:
    while not clock.is_over:
        called_at = time.perf_counter()
        await call()
        clock.answered(called_at)


def by_threads(call: Callable[[], None]) -> Measure:
    """Measures a call that blocks, by a thread for each in flight."""

    def call_on(clock: Clock) -> None:
        while not clock.is_over:
            called_at = time.perf_counter()
            call()
            clock.answered(called_at)

    def measure(in_flight: int, seconds: float) -> Measured:
        clock = Clock(seconds)
        with concurrent.futures.ThreadPoolExecutor(in_flight) as pool:
            for done in [pool.submit(call_on, clock) for _ in range(in_flight)]:
                done.result()
        return clock.measured()

    return measure
