"""One statement for what many tasks want of the database at the same time.

While one statement is on its way, what comes meanwhile gathers for the next: nobody waits longer
than for one other, and a commit serves many.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Generic, TypeVar

from messages import errors

LIMIT: Final = 100
"""Rows in one statement."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    """An item, and who waits for what becomes of it."""

    item: Item
    result: asyncio.Future[Result]
    is_over: bool = False
    """Nothing more becomes of it."""

    def end(self, result: Result) -> None:
        """Its statement has ended well."""
        self.is_over = True
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Its statement has failed."""
        self.is_over = True
        if not self.result.done():
            self.result.set_exception(error)

    def drop(self) -> None:
        """Its statement was cancelled, or never begun."""
        self.is_over = True
        self.result.cancel()


class Batch(Generic[Item, Result]):
    """Gathers items and runs them together.

    Args:
        run: runs a statement for many items; its results are in their order.
        keys: what no two items of one statement may have in common.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        keys: Callable[[Item], Collection[object]] = lambda _: (),
    ) -> None:
        self._run = run
        self._keys = keys
        self._waiting: list[_Waiting[Item, Result]] = []
        self._work: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Result:
        """Runs one item, together with others where there are any.

        Cancelled, it waits for the statement's end: what it does is never left unknown.

        Raises: what the statement raised for this item.
        """
        loop = asyncio.get_running_loop()
        waiting: _Waiting[Item, Result] = _Waiting(item, loop.create_future())
        self._waiting.append(waiting)
        if self._work is None:
            # Begins after this turn of the loop: those that come in it belong together.
            self._work = asyncio.create_task(self._work_off())
        try:
            return await waiting.result
        except asyncio.CancelledError:
            if not waiting.is_over:
                waiting.result = loop.create_future()
                await asyncio.wait({waiting.result})
            if not waiting.result.cancelled():
                waiting.result.exception()  # nobody else looks at it
            raise

    async def _work_off(self) -> None:
        try:
            while self._waiting:
                await self._run_together(self._take())
        finally:
            self._work = None
            for one in self._waiting:
                one.drop()
            self._waiting = []

    def _take(self) -> list[_Waiting[Item, Result]]:
        taken: list[_Waiting[Item, Result]] = []
        left: list[_Waiting[Item, Result]] = []
        keys: set[object] = set()
        for one in self._waiting:
            its = self._keys(one.item)
            if len(taken) == LIMIT or not keys.isdisjoint(its):
                left.append(one)
            else:
                taken.append(one)
                keys.update(its)
        self._waiting = left
        return taken

    async def _run_together(self, taken: Sequence[_Waiting[Item, Result]]) -> None:
        try:
            results = await self._run([one.item for one in taken])
        except asyncio.CancelledError:
            for one in taken:
                one.drop()
            raise
        except Exception as error:
            if len(taken) == 1 or isinstance(error, errors.Unreachable):
                for one in taken:
                    one.fail(error)
                return
            # One of them is at fault: alone, it fails alone.
            for one in taken:
                await self._run_together([one])
            return
        for one, found in zip(taken, results, strict=True):
            one.end(found)
