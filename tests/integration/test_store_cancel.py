"""Jobs that are asked to be cancelled, as the store keeps them."""

import uuid
from collections.abc import AsyncIterator

import pytest

from messages import errors, resources
from tests.integration import store_bench
from tests.integration.store_bench import HERE, NONE, job, need
from tests.services import environment
from worker.store import jobs

CLEANUP = "terminate_connection"


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


async def cancel(bench: store_bench.Bench, one: jobs.Job, *, lease: float = 30) -> list[jobs.Job]:
    """Asks for a job to be cancelled; those that are to be ended."""
    return await jobs.cancel(
        bench.store, one.id, owner=bench.owner, lease=lease, cleanups=[CLEANUP]
    )


async def test_one_that_never_began_is_whoever_asks_to_end_and_frees_its_volumes(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    waiting = await bench.queued(need(volume_id), address=store_bench.ELSEWHERE)
    behind = await bench.queued(need(volume_id))
    (taken,) = await cancel(bench, waiting)
    assert taken.id == waiting.id
    assert taken.state is resources.JobState.RUNNING
    assert taken.owner == bench.owner
    assert (taken.attempt, taken.started_at, taken.slot) == (0, None, jobs.Slot.WAITING)
    assert taken.refusal == {"code": "Cancelled"}
    assert [one.id for one in await bench.claim()] == [behind.id]
    ended = await bench.finish(
        taken, state=resources.JobState.CANCELLED, result=None, error=errors.Cancelled()
    )
    assert ended.job.state is resources.JobState.CANCELLED


async def test_one_whose_ender_was_lost_is_ended_at_its_own_host(bench: store_bench.Bench) -> None:
    waiting = await bench.queued(need(uuid.uuid4()))
    (taken,) = await cancel(bench.other(), waiting)
    assert await bench.claim() == []
    await bench.expire(taken)
    # It needs no slot, and no volume.
    (claimed,) = await bench.claim(free=NONE)
    assert (claimed.id, claimed.resumed) == (waiting.id, False)
    assert claimed.refusal == {"code": "Cancelled"}


async def test_one_that_runs_is_its_owners_to_end(bench: store_bench.Bench) -> None:
    running = await bench.started(need(uuid.uuid4()))
    other = await bench.started(need(uuid.uuid4()))
    assert await cancel(bench.other(), running) == []
    assert await jobs.to_cancel(bench.store, bench.owner) == {running.id}
    assert await jobs.to_cancel(bench.store, bench.other().owner) == set()
    assert await bench.state_of(other.id) == "running"
    await bench.finish(running)
    assert await jobs.to_cancel(bench.store, bench.owner) == set()


async def test_one_that_waits_to_be_tried_again_is_due_at_once_and_needs_no_slot(
    bench: store_bench.Bench,
) -> None:
    running = await bench.started(need(uuid.uuid4()), slot=jobs.Slot.DATA)
    await jobs.requeue(bench.store, running, delay=600, error=None)
    assert await bench.claim() == []
    assert await cancel(bench, running) == []
    (claimed,) = await bench.claim(free=NONE)
    assert claimed.id == running.id
    assert claimed.cancel_requested
    assert claimed.resumed


@pytest.mark.parametrize("is_lost", [False, True])
async def test_one_that_is_put_back_all_the_same_is_due_at_once_and_needs_no_slot(
    bench: store_bench.Bench, is_lost: bool
) -> None:
    running = await bench.started(need(uuid.uuid4()), slot=jobs.Slot.DATA)
    assert await cancel(bench, running) == []
    if is_lost:
        await bench.expire(running)
    else:
        await jobs.requeue(bench.store, running, delay=600, error=errors.TargetError("t"))
    (claimed,) = await bench.claim(free=NONE)
    assert claimed.cancel_requested


async def test_what_a_job_called_for_is_cancelled_with_it_but_for_what_cleans_up(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id), slot=jobs.Slot.DATA)
    made = {
        name: job(need(volume_id), method=name, parent_job=parent.id, address=HERE)
        for name in ("initialize_connection", CLEANUP)
    }
    await bench.accept(*made.values(), free=NONE)
    stranger = await bench.queued(need(uuid.uuid4()))
    taken = await cancel(bench, parent)
    assert [one.id for one in taken] == [made["initialize_connection"].id]
    for one in (made[CLEANUP], stranger):
        assert await bench.state_of(one.id) == "queued"
        assert not (await jobs.get(bench.store, one.id)).cancel_requested


async def test_one_that_has_ended_is_left_as_it_is(bench: store_bench.Bench) -> None:
    running = await bench.started(need(uuid.uuid4()))
    await bench.finish(running)
    before = await jobs.get(bench.store, running.id)
    assert await cancel(bench, running) == []
    assert await jobs.get(bench.store, running.id) == before


async def test_the_ended_are_told_from_the_others_and_so_are_the_unknown(
    bench: store_bench.Bench,
) -> None:
    running = await bench.started(need(uuid.uuid4()))
    done = await bench.started(need(uuid.uuid4()))
    await bench.finish(done)
    unknown = uuid.uuid4()
    found = await jobs.ended(bench.store, [running.id, done.id, unknown])
    assert found == {done.id, unknown}


async def test_the_children_of_a_job_are_kept_until_its_attempt_ends(
    bench: store_bench.Bench,
) -> None:
    running = await bench.started(need(uuid.uuid4()))
    children = [{"pid": 5, "started": 2**40, "boot": "b"}]
    await jobs.set_children(bench.store, running, children)
    await bench.expire(running)
    (taken,) = await bench.claim()
    assert taken.children == children
    back = await jobs.requeue(bench.store, taken, delay=0, error=None)
    assert back.children == []
