"""What asyncio's child processes lack: the end of a stream, and an end that no pipe holds up."""

import asyncio
import asyncio.subprocess
from typing import Final

from worker import children

CAPTURE_LIMIT: Final = 256 * 1024
"""How many bytes of each pipe's end are kept."""


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int = CAPTURE_LIMIT) -> None:
        self._limit = limit
        self._bytes = bytearray()

    async def drain(self, stream: asyncio.StreamReader) -> None:
        """Reads to the end of the stream."""
        while chunk := await stream.read(64 * 1024):
            self._bytes += chunk
            del self._bytes[: -self._limit]

    def text(self) -> str:
        """What is kept, without bytes that no text can hold."""
        return bytes(self._bytes).decode("utf-8", "replace").replace("\0", "")


class Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Knows of the program's end by itself.

    Whether asyncio's ``wait`` returns while a grandchild holds a pipe differs between versions.
    """

    def __init__(self, started_here: children.Children) -> None:
        super().__init__(limit=CAPTURE_LIMIT, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()
        self._started_here = started_here
        self._pid: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when it runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._pid = transport.get_pid()
        if self._pid is not None:
            self._started_here.add(self._pid)
        super().connection_made(transport)

    def process_exited(self) -> None:
        """Called when it has ended and was reaped."""
        if self._pid is not None:
            self._started_here.remove(self._pid)
        self.exited.set()
        super().process_exited()


class Process(asyncio.subprocess.Process):
    """A child whose :meth:`wait` ends with it, whoever holds its pipes."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: Protocol) -> None:
        super().__init__(transport, protocol, asyncio.get_running_loop())
        self._exited = protocol.exited
        self.transport = transport

    async def wait(self) -> int:
        """Waits for its end; returns the exit code, negative for a signal."""
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode
