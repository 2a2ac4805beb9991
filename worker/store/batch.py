"""One statement for what many tasks want of the database at the same time.

While one statement is on its way, what comes meanwhile gathers for the next: nobody waits longer
than for one other, and a commit serves many.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from messages import errors

LIMIT: Final = 100
"""Rows in one statement."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batch(Generic[Item, Result]):
    """Gathers items and runs them together.

    Args:
        run: runs a statement for many items; its results are in their order.
        key: what no two items of one statement may have in common; None for nothing.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        key: Callable[[Item], object] = lambda _: None,
    ) -> None:
        self._run = run
        self._key = key
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._work: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Result:
        """Runs one item, together with others where there are any.

        Cancelled, it waits for the statement's end: what it does is never left unknown.

        Raises: what the statement raised for this item.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._work is None:
            self._work = asyncio.create_task(self._work_off())
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await asyncio.wait({result})
            if not result.cancelled():
                result.exception()  # nobody else looks at it
            raise

    async def _work_off(self) -> None:
        try:
            # Those that are about to come in this turn of the loop belong to it.
            await asyncio.sleep(0)
            while self._waiting:
                await self._run_together(self._take())
        finally:
            self._work = None
            for _, result in self._waiting:
                result.cancel()
            self._waiting = []

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        taken: list[tuple[Item, asyncio.Future[Result]]] = []
        left: list[tuple[Item, asyncio.Future[Result]]] = []
        keys: set[object] = set()
        for one in self._waiting:
            key = self._key(one[0])
            if len(taken) == LIMIT or (key is not None and key in keys):
                left.append(one)
            else:
                taken.append(one)
                keys.add(key)
        self._waiting = left
        return taken

    async def _run_together(self, taken: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in taken])
        except asyncio.CancelledError:
            for _, result in taken:
                result.cancel()
            raise
        except Exception as error:
            if len(taken) == 1 or isinstance(error, errors.Unreachable):
                for _, result in taken:
                    result.set_exception(error)
                return
            # One of them is at fault: alone, it fails alone.
            for one in taken:
                await self._run_together([one])
            return
        for (_, result), found in zip(taken, results, strict=True):
            result.set_result(found)
