"""A TCP proxy that does to a connection what networks do: cut, stall, half-open, delay.

What is set holds for every connection, those to come too, until :meth:`Proxy.heal`.
"""

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit


class Way(enum.Enum):
    """A direction, seen from the client."""

    OUT = enum.auto()
    """What the client sends."""
    BACK = enum.auto()
    """What the server sends."""


class _Lane:
    """One direction of all connections: whether it takes bytes, and whether it passes them on."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.passes = asyncio.Event()
        self.delay = 0.0
        self.heal()

    def heal(self) -> None:
        self.takes.set()
        self.passes.set()
        self.delay = 0.0


class Proxy:
    """Between a client and a server that does not move."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes = {way: _Lane() for way in Way}
        self.port = 0
        self.accepted = 0

    async def start(self) -> None:
        """Listens; the second time on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Lets nobody in any more; those inside stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def cut(self) -> None:
        """Ends every connection, hard: both sides get a reset. New ones are let in."""
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    def stall(self, *ways: Way) -> None:
        """Takes every byte, of new connections too, and passes none on; both ways if none is named.

        Whoever sends is never held up, as behind a router that has lost its way.
        """
        for way in ways or Way:
            self._lanes[way].passes.clear()

    def half_open(self, way: Way) -> None:
        """One direction is dead: nothing is read, nothing passed on, and no end is told either.

        Who sends there is held up once the sockets' buffers are full; the other way is as it was.
        """
        self._lanes[way].takes.clear()
        self._lanes[way].passes.clear()

    def delay(self, seconds: float) -> None:
        """Passes on whatever comes from now on only after so many seconds, in order, both ways."""
        for lane in self._lanes.values():
            lane.delay = seconds

    def heal(self) -> None:
        """Passes everything on again: first what was held back."""
        for lane in self._lanes.values():
            lane.heal()

    async def close(self) -> None:
        """Ends everything."""
        await self.stop()
        while self._tasks:
            await self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.accepted += 1
        pair = {writer}
        # Cancelled by a cut: that is an end like any other.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            theirs, ours = await asyncio.open_connection(*self._target)
            pair.add(ours)
            self._writers.add(ours)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, ours, self._lanes[Way.OUT]))
                group.create_task(_pump(theirs, writer, self._lanes[Way.BACK]))
        for one in pair:
            one.transport.abort()
        self._writers -= pair
        self._tasks.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: _Lane) -> None:
    taken: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        group.create_task(_take(reader, lane, taken))
        group.create_task(_pass_on(taken, lane, writer))


async def _take(
    reader: asyncio.StreamReader, lane: _Lane, taken: asyncio.Queue[tuple[float, bytes]]
) -> None:
    data = b" "
    while data:
        await lane.takes.wait()
        data = b""
        with contextlib.suppress(OSError):
            data = await reader.read(65536)
        due = asyncio.get_running_loop().time() + lane.delay
        taken.put_nowait((due, data))


async def _pass_on(
    taken: asyncio.Queue[tuple[float, bytes]], lane: _Lane, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = await taken.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await lane.passes.wait()
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def before(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before the server of a URL, and the URL that leads through it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(parts.hostname, parts.port)
    await proxy.start()
    login = parts.netloc.rpartition("@")[0]
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{proxy.port}"))
    finally:
        await proxy.close()
