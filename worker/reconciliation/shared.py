"""One run for all who ask before it begins."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Shared(Generic[Result]):
    """Something slow that many may ask for: one is at work, and the others wait for the next.

    Who asks while it is at work is not answered with that, which may have looked too early.
    """

    def __init__(self, run: Callable[[], Awaitable[Result]]) -> None:
        self._run = run
        self._working = asyncio.Lock()
        self._next: asyncio.Future[Result] | None = None

    async def __call__(self) -> Result:
        """What a run found that began after this call, or the error that it met."""
        if self._next is not None:
            return await asyncio.shield(self._next)
        mine: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._next = mine
        try:
            async with self._working:
                self._next = None
                mine.set_result(await self._run())
        except asyncio.CancelledError:
            mine.cancel()
            raise
        except Exception as error:
            mine.set_exception(error)
        finally:
            if self._next is mine:
                self._next = None
        return await mine
