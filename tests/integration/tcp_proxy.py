"""A TCP proxy that a test can cut, stop and start again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Between a client and a server that does not move."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
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
        """Ends every connection, hard."""
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

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
        self.accepted += 1
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection(*self._target)
            pair = {writer, ours}
            self._writers |= pair
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, ours))
                    group.create_task(_pump(theirs, writer))
            finally:
                self._writers -= pair
        self._tasks.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
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
