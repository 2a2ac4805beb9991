"""One run for all who ask before it begins."""

import asyncio

import pytest

from worker.reconciliation import shared


class Slow:
    """Counts its runs; each ends when it is let go."""

    def __init__(self) -> None:
        self.runs = 0
        self.go = asyncio.Semaphore(0)
        self.fails = False

    async def __call__(self) -> int:
        self.runs += 1
        number = self.runs
        await self.go.acquire()
        if self.fails:
            raise OSError("away")
        return number


async def _ask(ask: shared.Shared[int], count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(ask()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_whoever_asks_while_one_is_at_work_is_answered_by_the_next_one() -> None:
    slow = Slow()
    ask = shared.Shared(slow)
    early, late = await _ask(ask, 1), await _ask(ask, 300)
    slow.go.release()
    assert await asyncio.gather(*early) == [1]
    slow.go.release()
    assert await asyncio.gather(*late) == [2] * 300
    slow.go.release()
    assert await ask() == 3


async def test_a_failure_is_told_to_all_who_wait_and_not_to_the_next() -> None:
    slow = Slow()
    ask = shared.Shared(slow)
    early, late = await _ask(ask, 1), await _ask(ask, 2)
    slow.go.release()
    await asyncio.gather(*early)
    slow.fails = True
    slow.go.release()
    assert [type(one) for one in await asyncio.gather(*late, return_exceptions=True)] == [
        OSError,
        OSError,
    ]
    slow.fails = False
    slow.go.release()
    assert await ask() == 3


async def test_one_that_is_cancelled_in_its_turn_keeps_no_later_one_waiting() -> None:
    slow = Slow()
    ask = shared.Shared(slow)
    [early], [leading, following] = await _ask(ask, 1), await _ask(ask, 2)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    slow.go.release()
    await early
    slow.go.release()
    assert await ask() == 2
