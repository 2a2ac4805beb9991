"""A gate that lets many in at a time, or one alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Who wants to be alone waits for those inside, and not for new ones."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Beside others. Not to be entered twice by one task."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            await self._tell()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With nobody else inside."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._closed = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._inside == 0)
            yield
        finally:
            self._closed = False
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
