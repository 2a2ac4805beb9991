"""A way to a service that can stop to move: connections stay open, and nothing comes through.

It is a process, stopped and continued by signals: what a stalled network looks like from outside.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit


class Way:
    """The forwarding process."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(parts.hostname), str(parts.port)],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        login, at, _ = parts.netloc.rpartition("@")
        self.url = urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{port}"))
        """That of the service, over this way."""

    def stall(self) -> None:
        """From now on nothing comes through."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """What was held up comes through, late."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def before(url: str) -> Iterator[Way]:
    """A way to the service at a URL, for the time of the block."""
    way = Way(url)
    try:
        yield way
    finally:
        way.close()


async def _forward(host: str, port: int) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, ours), pump(theirs, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_forward(sys.argv[1], int(sys.argv[2])))
