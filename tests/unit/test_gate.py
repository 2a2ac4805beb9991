"""The gate: who may be inside beside whom, and that nobody waits for ever."""

import asyncio

from worker import gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_alone_waits_for_those_inside_and_keeps_new_ones_out() -> None:
    entered, closed, said = asyncio.Event(), gate.Gate(), list[str]()

    async def together(name: str, until: asyncio.Event) -> None:
        async with closed.together():
            said.append(name)
            await until.wait()

    async def alone(until: asyncio.Event) -> None:
        async with closed.alone():
            said.append("alone")
            await until.wait()

    leave, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(together("first", entered))
        group.create_task(together("second", entered))
        await settle()
        group.create_task(alone(leave))
        await settle()
        group.create_task(together("late", ready))
        await settle()
        assert said == ["first", "second"]
        entered.set()
        await settle()
        assert said == ["first", "second", "alone"]
        leave.set()
        await settle()
        assert said[-1] == "late"
        ready.set()


async def test_who_leaves_wakes_the_others_however_often_it_is_cancelled() -> None:
    closed, inside = gate.Gate(), asyncio.Event()

    async def stay() -> None:
        async with closed.together():
            inside.set()
            await asyncio.Event().wait()

    async def alone() -> str:
        async with closed.alone():
            return "alone"

    staying = asyncio.create_task(stay())
    await inside.wait()
    waiting = asyncio.create_task(alone())
    await settle()
    staying.cancel()
    staying.cancel()
    await asyncio.sleep(0)
    staying.cancel()
    async with asyncio.timeout(1):
        assert await waiting == "alone"


async def test_one_that_gives_up_waiting_to_be_alone_lets_the_others_in() -> None:
    closed, leave = gate.Gate(), asyncio.Event()

    async def stay() -> None:
        async with closed.together():
            await leave.wait()

    async def alone() -> None:
        async with closed.alone():
            pass

    staying = asyncio.create_task(stay())
    await settle()
    waiting = asyncio.create_task(alone())
    await settle()
    waiting.cancel()
    async with asyncio.timeout(1), closed.together():
        assert not staying.done()
        leave.set()
    await staying
    assert waiting.cancelled()
