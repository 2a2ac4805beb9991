"""A gate that lets many in at a time, or one alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Gate:
    """Who wants to be alone waits for those inside, and not for new ones."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._inside = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Beside others. Not to be entered twice by one task."""
        await self._until(lambda: not self._closed)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._tell()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With nobody else inside."""
        await self._until(lambda: not self._closed)
        self._closed = True
        try:
            await self._until(lambda: self._inside == 0)
            yield
        finally:
            self._closed = False
            self._tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            woken = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            try:
                await woken
            finally:
                self._waiting.remove(woken)

    def _tell(self) -> None:
        # Without an await: who leaves may be cancelled a second time, and has to wake them anyway.
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)
