"""Where one worker dies: an installation with its hosts, and what a test asks of them."""

import asyncio
import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from tests.faults import points
from tests.services import amqp, children, clock, environment, tgtd, volumes, workers

LEASE: Final = 3.0
"""Seconds; the shortest that is allowed."""
LONG: Final = 15.0
"""Seconds by which the clock is moved: longer than a lease and than the outbox waits, shorter than
one worker waits for another."""
DEATH_TIMEOUT: Final = 30.0
GRACE: Final = 3.0
"""Seconds that a worker may live on after its last answer, and its children after it."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """How a volume has to be in the end; ``status`` None: gone."""

    address: str
    size_bytes: int
    id: str | None = None
    """None: that of the result."""
    status: str | None = "available"
    exported: bool = False
    connections: int = 0
    attachments: int = 0
    content: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What is sent, and what has to become of it."""

    address: str
    args: Mapping[str, Any]
    expected: tuple[Expected, ...] = ()
    hidden: pathlib.Path | None = None
    """A volume's file that the storage has lost until the worker has died."""


class World:
    """An installation with workers, one of which can be made to die at a point."""

    def __init__(
        self,
        site: environment.Installation,
        start: workers.Starter,
        caller: amqp.Caller,
        folder: pathlib.Path,
        daemon: tgtd.Tgtd | None,
    ) -> None:
        self.site = site
        self.caller = caller
        self.volumes = volumes.Volumes(caller)
        self.hosts: dict[str, workers.Worker] = {}
        self.daemon = daemon
        self._start = start
        self._armed = folder / "armed"
        self._trace = folder / "trace"
        self._hidden: list[tuple[pathlib.Path, pathlib.Path]] = []

    async def add_host(
        self, host: str, command: Sequence[str] = (workers.COMMAND,), **settings: Any
    ) -> None:
        """Starts the worker of a host."""
        backends: dict[str, Mapping[str, Any]] = {"fast": workers.FAST, "sim": workers.SIM}
        env: Mapping[str, str] = {}
        if self.daemon is not None:
            backends["iscsi"] = workers.iscsi(self.daemon)
            env = self.daemon.env
        worker = self._start.new(host, backends=backends, env=env, lease=LEASE, **settings)
        self.hosts[host] = worker
        worker.command = command
        await worker.start()

    def crashing(self, at: points.At | None) -> list[str]:
        """The command of a worker that dies at a point, or of one that only notes its points."""
        options = ["--when", str(self._armed), "--trace", str(self._trace)]
        if at is not None:
            options += ["--at", str(at)]
        return [sys.executable, "-m", "tests.faults.crashing_worker", *options, "--"]

    async def arm(self) -> None:
        """From now on, points count: what was asked before has been told to its end."""

        async def is_told() -> bool:
            return not await self.site.rows("SELECT FROM outbox LIMIT 1")

        await until(is_told, what="the end of what was asked before")
        self._armed.touch()

    def disarm(self) -> None:
        """No point counts any more."""
        self._armed.unlink()

    def reached(self) -> list[points.Point]:
        """The points that workers have come to while armed."""
        if not self._trace.exists():
            return []
        return [points.Point(line) for line in self._trace.read_text().splitlines()]

    async def send(self, method: str, request: Request) -> amqp.Sent:
        """Sends the request of a case; what it says is hidden is so from now on."""
        if request.hidden is not None:
            away = request.hidden.with_name("away")
            request.hidden.rename(away)
            self._hidden.append((away, request.hidden))
        return await self.caller.send(
            method, request.address, request.args, headers={"status-updates": True}
        )

    def mend(self) -> None:
        """Brings back what was hidden."""
        while self._hidden:
            away, there = self._hidden.pop()
            away.rename(there)

    async def death(self, host: str, sent: amqp.Sent) -> bool:
        """Waits for the worker to kill itself; whether it has, and took its children along."""
        worker = self.hosts[host]
        answered: float | None = None
        deadline = time.monotonic() + DEATH_TIMEOUT
        while worker.is_running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if self.caller.results(sent):
                answered = answered or time.monotonic()
                if time.monotonic() > answered + GRACE:
                    return False
        return not worker.is_running

    async def orphans(self, host: str) -> list[children.Found]:
        """What a dead worker has left after a lease, apart from what serves its exports."""
        worker = self.hosts[host]

        def left() -> list[children.Found]:
            return [one for one in worker.leftovers() if "nbd-server" not in one.command]

        deadline = time.monotonic() + LEASE
        while left() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return left()

    async def restart(self, host: str, *, at: points.At | None = None, after: float = LONG) -> None:
        """Starts a dead worker again, the installed one unless it is to die ``at`` a point.

        So many seconds pass for its jobs first: by then their leases have run out.
        """
        worker = self.hosts[host]
        worker.command = (workers.COMMAND,) if at is None else self.crashing(at)
        await clock.advance(self.site, after, host=host)
        await worker.start()

    async def stop(self) -> None:
        """Ends all workers, as an operator would."""
        for worker in self.hosts.values():
            await worker.terminate()


async def until(
    look: Callable[[], Awaitable[bool]], *, what: str, timeout: float = amqp.TIMEOUT
) -> None:
    """Looks until it is so."""
    deadline = time.monotonic() + timeout
    while not await look():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout} s"
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(
    site: environment.Installation,
    start: workers.Starter,
    folder: pathlib.Path,
    daemon: tgtd.Tgtd | None = None,
) -> AsyncIterator[World]:
    """A world for the time of the block."""
    async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
        yield World(site, start, caller, folder, daemon)
