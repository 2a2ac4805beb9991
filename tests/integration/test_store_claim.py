"""Jobs that are claimed, kept and ended: by one worker at a time, in order, however many try."""

import asyncio
import collections
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from messages import errors, resources
from tests.integration import store_bench
from tests.integration.store_bench import ELSEWHERE, HERE, NONE, C, R, X, job, need, slots
from tests.services import environment
from worker.store import acceptance, database, jobs, volumes


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


# Claiming


async def test_the_oldest_are_claimed_first(bench: store_bench.Bench) -> None:
    waiting = [await bench.queued(need(uuid.uuid4())) for _ in range(5)]
    assert [one.id for one in await bench.claim(free=slots(3))] == [one.id for one in waiting[:3]]
    assert [one.id for one in await bench.claim(free=slots(3))] == [one.id for one in waiting[3:]]
    assert await bench.claim() == []


async def test_a_claimed_job_runs_under_a_lease_and_its_attempt_is_counted(
    bench: store_bench.Bench,
) -> None:
    waiting = await bench.queued(need(uuid.uuid4()))
    (claimed,) = await bench.claim(lease=20)
    assert claimed.id == waiting.id
    assert claimed.state is resources.JobState.RUNNING
    assert (claimed.attempt, claimed.owner) == (1, bench.owner)
    assert claimed.started_at is not None
    assert claimed.version > waiting.version
    (row,) = await bench.rows("SELECT lease_until - now() AS left FROM jobs")
    assert 15 < row["left"].total_seconds() <= 20


async def test_each_class_is_claimed_within_its_own_slots(bench: store_bench.Bench) -> None:
    for _ in range(3):
        await bench.queued(need(uuid.uuid4()))
        await bench.queued(need(uuid.uuid4()), slot=jobs.Slot.DATA)
    claimed = await bench.claim(free=slots(control=2, data=1))
    assert collections.Counter(one.slot for one in claimed) == {"control": 2, "data": 1}
    assert await bench.claim(free=NONE) == []
    claimed = await bench.claim(free=slots(control=0, data=5))
    assert [one.slot for one in claimed] == ["data", "data"]


async def test_only_jobs_of_the_workers_own_addresses_are_claimed(
    bench: store_bench.Bench,
) -> None:
    here = await bench.queued(need(uuid.uuid4()))
    there = await bench.queued(need(uuid.uuid4()), address=ELSEWHERE)
    assert await bench.claim(addresses=[]) == []
    assert [one.id for one in await bench.claim(addresses=[ELSEWHERE])] == [there.id]
    assert [one.id for one in await bench.claim(addresses=[ELSEWHERE, HERE])] == [here.id]


async def test_a_job_is_not_claimed_before_its_time(bench: store_bench.Bench) -> None:
    one = await bench.started(need(uuid.uuid4()))
    await jobs.requeue(bench.store, one, delay=3, error=errors.TargetError("away"))
    assert await bench.claim() == []
    await asyncio.sleep(3.1)
    (claimed,) = await bench.claim()
    assert claimed.attempt == 2
    assert claimed.error is not None
    assert claimed.error["code"] == "TargetError"


async def test_a_job_whose_worker_let_the_lease_run_out_is_claimed_again(
    bench: store_bench.Bench,
) -> None:
    lost = await bench.started(need(uuid.uuid4()))
    other = bench.other()
    assert await other.claim() == []
    await bench.expire(lost)
    (taken,) = await other.claim()
    assert taken.id == lost.id
    assert (taken.owner, taken.attempt) == (other.owner, 2)
    assert taken.lease_token > lost.lease_token
    assert await bench.claim() == []


async def test_an_expired_lease_also_takes_a_slot(bench: store_bench.Bench) -> None:
    lost = [await bench.started(need(uuid.uuid4())) for _ in range(3)]
    await bench.queued(need(uuid.uuid4()))
    await bench.expire(*lost)
    assert len(await bench.other().claim(free=slots(control=2))) == 2


async def test_a_job_that_was_lost_keeps_its_volumes(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    lost = await bench.started(need(volume_id))
    await bench.queued(need(volume_id))
    await bench.expire(lost)
    # Whatever the lost worker's children still do, nobody else is let in.
    assert [one.id for one in await bench.other().claim()] == [lost.id]


# Leases


async def test_a_lease_is_renewed_by_its_owner_alone(bench: store_bench.Bench) -> None:
    mine = await bench.started(need(uuid.uuid4()), lease=5)
    gone = await bench.started(need(uuid.uuid4()), lease=5)
    await bench.finish(gone)
    stranger = dataclasses.replace(mine, lease_token=mine.lease_token + 1)
    assert await jobs.renew(bench.store, [stranger], lease=60) == set()
    assert await jobs.renew(bench.store, [mine, gone], lease=60) == {mine.id}
    (row,) = await bench.rows("SELECT lease_until - now() AS left FROM jobs WHERE id = $1", mine.id)
    assert row["left"].total_seconds() > 50


async def test_a_lease_that_was_taken_over_is_not_renewed(bench: store_bench.Bench) -> None:
    one = await bench.started(need(uuid.uuid4()))
    await bench.expire(one)
    await bench.other().claim()
    assert await jobs.renew(bench.store, [one], lease=60) == set()


async def test_a_worker_that_took_its_own_job_over_renews_it_under_the_new_token_only(
    bench: store_bench.Bench,
) -> None:
    one = await bench.started(need(uuid.uuid4()))
    await bench.expire(one)
    (again,) = await bench.claim()
    assert again.owner == one.owner
    assert await jobs.renew(bench.store, [one], lease=60) == set()
    assert await jobs.renew(bench.store, [again], lease=60) == {one.id}


# Ends


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "dead"])
async def test_an_end_is_the_state_the_result_and_what_has_to_be_told(
    bench: store_bench.Bench, state: str
) -> None:
    one = await bench.started(need(uuid.uuid4()))
    error = None if state == "succeeded" else errors.TargetError("away")
    ended = await bench.finish(
        one,
        state=resources.JobState(state),
        result={"a": 1} if error is None else None,
        error=error,
    )
    assert ended.job.state == state
    assert ended.job.result == ({"a": 1} if error is None else None)
    assert (ended.job.error or {}).get("code") == (None if error is None else "TargetError")
    assert (ended.job.first_failed_at is None) is (error is None)
    assert (ended.job.owner, ended.job.endings) == (None, 1)
    assert ended.job.finished_at is not None
    assert ended.job.version > one.version
    (row,) = await bench.rows("SELECT * FROM outbox")
    assert (row["id"], row["job_id"], row["reply_only"]) == (ended.outbox_id, one.id, False)
    assert not await bench.rows("SELECT FROM job_locks")


async def test_the_end_of_a_job_and_of_its_volumes_change_are_one(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    error = errors.Internal("broken")
    change = jobs.VolumeChange(volume.id, {"status": "error", "error": error.to_wire()})
    ended = await bench.finish(
        one, state=resources.JobState.FAILED, result=None, error=error, change=change
    )
    now = await volumes.get(bench.store, volume.id)
    assert now.status == "error"
    assert now.error is not None
    assert now.seq == volume.seq + 1
    assert ended.event == now.event()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_job_and_its_child_end_at_once_and_both_do_to_their_volume_what_they_have_to(
    bench: store_bench.Bench, *, is_first: bool
) -> None:
    volume = await bench.volume()
    parent = await bench.started(need(volume.id, known=True))
    await volumes.take(
        bench.store,
        parent,
        volume.id,
        allowed=[resources.VolumeStatus.AVAILABLE],
        status=resources.VolumeStatus.MAINTENANCE,
    )
    child = await bench.started(need(volume.id, C, known=True), parent_job=parent.id)
    # That it holds the volume, the statement finds.
    failed = bench.finish(
        parent, state=resources.JobState.FAILED, result=None, error=errors.TargetError("away")
    )
    connected = bench.finish(child, change=jobs.VolumeChange(volume.id))
    both = (failed, connected) if is_first else (connected, failed)
    ended = await asyncio.gather(*both)
    now = await volumes.get(bench.store, volume.id)
    assert (now.status, now.status_job) == ("available", None)
    events = [one.event["seq"] for one in ended if one.event is not None]
    assert len(events) == 2
    assert now.seq == max(events)
    assert now.seq == volume.seq + 3


async def test_a_result_may_be_the_volumes_record_as_changed(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    change = jobs.VolumeChange(volume.id, {"size_bytes": 4096, "metadata": {"a": "b"}})
    ended = await bench.finish(one, result=None, change=change)
    assert ended.job.result == (await volumes.record(bench.store, volume.id))
    assert ended.job.result is not None
    assert (ended.job.result["size_bytes"], ended.job.result["metadata"]) == (4096, {"a": "b"})


async def test_the_last_event_of_a_volume_says_that_it_is_deleted(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    one = await bench.started(need(volume.id, known=True))
    ended = await bench.finish(one, change=jobs.VolumeChange(volume.id, drop=True))
    assert await volumes.find(bench.store, volume.id) is None
    assert ended.event is not None
    assert ended.event["volume"]["status"] == "deleted"
    assert ended.event["volume"]["id"] == str(volume.id)
    assert ended.event["seq"] > volume.seq
    (row,) = await bench.rows("SELECT volume_gone FROM outbox WHERE id = $1", ended.outbox_id)
    assert row["volume_gone"] is not None


async def test_secrets_in_an_error_are_masked_when_it_is_stored(bench: store_bench.Bench) -> None:
    one = await bench.started(need(uuid.uuid4()))
    error = errors.CommandFailed("failed", auth_password="hunter2", stderr="x")
    ended = await bench.finish(one, state=resources.JobState.FAILED, result=None, error=error)
    assert "hunter2" not in str(ended.job)


async def test_a_job_that_is_put_back_waits_with_its_error(bench: store_bench.Bench) -> None:
    one = await bench.started(need(uuid.uuid4()))
    back = await jobs.requeue(bench.store, one, delay=0, error=errors.TargetError("away"))
    assert (back.state, back.attempt, back.owner) == (resources.JobState.QUEUED, 1, None)
    assert back.first_failed_at is not None
    (again,) = await bench.claim()
    assert again.attempt == 2
    twice = await jobs.requeue(bench.store, again, delay=0, error=errors.TargetError("still"))
    assert twice.first_failed_at == back.first_failed_at


async def test_an_attempt_that_was_cut_short_by_a_drain_does_not_count(
    bench: store_bench.Bench,
) -> None:
    one = await bench.started(need(uuid.uuid4()))
    back = await jobs.requeue(bench.store, one, delay=0, error=None, counts=False)
    assert back.attempt == 0
    (again,) = await bench.claim()
    assert again.attempt == 1


async def test_progress_is_kept_and_counts_as_a_change(bench: store_bench.Bench) -> None:
    one = await bench.started(need(uuid.uuid4()))
    progress = resources.Progress(done_bytes=1, total_bytes=2, bytes_per_second=3)
    after = await jobs.set_progress(bench.store, one, progress)
    assert after.progress == progress.to_wire()
    assert after.version == one.version + 1
    assert after.to_wire()["progress"] == progress.to_wire()


# Fencing


async def everything(bench: store_bench.Bench) -> list[Any]:
    return [
        await bench.rows(f"SELECT * FROM {table} ORDER BY 1")
        for table in ("jobs", "job_locks", "volumes", "attachments", "connections", "outbox")
    ]


@pytest.mark.parametrize("how", ["taken over", "finished", "put back"])
async def test_a_worker_that_has_lost_a_job_changes_nothing_any_more(
    bench: store_bench.Bench, how: str
) -> None:
    volume = await bench.volume()
    lost = await bench.started(need(volume.id, known=True))
    match how:
        case "taken over":
            await bench.expire(lost)
            await bench.other().claim()
        case "finished":
            await bench.finish(lost)
        case _:
            await jobs.requeue(bench.store, lost, delay=0, error=None)
    before = await everything(bench)
    progress = resources.Progress(done_bytes=1, total_bytes=2, bytes_per_second=3)
    store = bench.store
    change = jobs.VolumeChange(volume.id, {"status": "error"})
    for attempt in (
        bench.finish(lost, change=change),
        bench.finish(lost, change=jobs.VolumeChange(volume.id, drop=True)),
        jobs.requeue(store, lost, delay=0, error=None),
        jobs.set_progress(store, lost, progress),
        volumes.begin(store, lost, acceptance.NewVolume(uuid.uuid4(), "v", 1, {})),
        volumes.take(
            store,
            lost,
            volume.id,
            allowed=[resources.VolumeStatus.AVAILABLE],
            status=resources.VolumeStatus.DELETING,
        ),
        volumes.set_export(store, lost, volume.id, volumes.Export.EXPLICIT),
        volumes.begin_attachment(
            store,
            lost,
            uuid.uuid4(),
            volume_id=volume.id,
            instance_uuid=None,
            host_name=None,
            mountpoint="/x",
            mode="rw",
        ),
        volumes.set_attachment(store, lost, uuid.uuid4(), volumes.AttachmentStatus.ATTACHED),
    ):
        with pytest.raises(database.LeaseLost):
            await attempt
    await volumes.end_attachments(store, lost, volume.id, None)
    assert await everything(bench) == before


async def test_a_token_is_not_worth_anything_for_another_job(bench: store_bench.Bench) -> None:
    first = await bench.started(need(uuid.uuid4()))
    second = await bench.started(need(uuid.uuid4()))
    with pytest.raises(database.LeaseLost):
        await bench.finish(dataclasses.replace(first, lease_token=second.lease_token))
    assert await bench.state_of(first.id) == "running"


# Many at once


async def test_two_claimers_never_get_the_same_job(bench: store_bench.Bench) -> None:
    waiting = [await bench.queued(need(uuid.uuid4())) for _ in range(40)]
    claimers = [bench.other() for _ in range(6)]
    rounds = await asyncio.gather(
        *(claimer.claim(free=slots(7)) for claimer in claimers for _ in range(3))
    )
    claimed = [one.id for batch in rounds for one in batch]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= {one.id for one in waiting}


async def test_two_claimers_never_get_jobs_that_conflict(bench: store_bench.Bench) -> None:
    for _ in range(30):
        volume_id = uuid.uuid4()
        first = await bench.queued(need(volume_id, R))
        second = await bench.queued(need(volume_id, X))
        rounds = await asyncio.gather(*(bench.other().claim() for _ in range(4)))
        claimed = [one.id for batch in rounds for one in batch]
        assert claimed == [first.id]
        await bench.finish(await jobs.get(bench.store, first.id))
        (left,) = await bench.claim()
        assert left.id == second.id
        await bench.finish(left)


async def test_an_acceptor_and_a_claimer_never_start_jobs_that_conflict(
    bench: store_bench.Bench,
) -> None:
    for _ in range(30):
        volume_id = uuid.uuid4()
        waiting = await bench.queued(need(volume_id, X))
        claimed, accepted = await asyncio.gather(
            bench.other().claim(), bench.verdicts(job(need(volume_id, X)))
        )
        assert accepted == ["queued"]
        assert {one.id for one in claimed} <= {waiting.id}
        for one in claimed or await bench.claim():
            await bench.finish(one)
        (last,) = await bench.claim()
        await bench.finish(last)


class History:
    """Who was running when, as a trigger wrote it down in the transactions themselves."""

    TRIGGER = """
        CREATE TABLE history (
            id bigint GENERATED ALWAYS AS IDENTITY, job_id uuid, was text, became text);
        CREATE FUNCTION write_history() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO history (job_id, was, became)
            VALUES (NEW.id, CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END, NEW.state);
            RETURN NULL;
        END $$;
        CREATE TRIGGER history AFTER INSERT OR UPDATE OF state ON jobs
            FOR EACH ROW EXECUTE FUNCTION write_history();
    """

    @classmethod
    async def begin(cls, bench: store_bench.Bench) -> None:
        connection = await asyncpg.connect(bench.site.database_url)
        await connection.execute(cls.TRIGGER)
        await connection.close()


@dataclasses.dataclass(frozen=True)
class Span:
    """One attempt, by the clock of the workers: from having it to giving it away."""

    job_id: uuid.UUID
    began: float
    ended: float


class Scene:
    """Workers that accept, claim, finish, put back and die, until every job has ended."""

    def __init__(self, bench: store_bench.Bench, *, count: int, volumes_count: int) -> None:
        self.bench = bench
        self.dice = random.Random(20)
        ids = [uuid.uuid4() for _ in range(volumes_count)]
        self.new = [self._job(ids) for _ in range(count)]
        self.waiting = collections.deque(self.new)
        self.spans: list[Span] = []
        self.ended: set[uuid.UUID] = set()
        self.conflicts = {
            (one.id, two.id)
            for one in self.new
            for two in self.new
            if one is not two and any(_conflict(a, b) for a in one.needs for b in two.needs)
        }

    def _job(self, ids: list[uuid.UUID]) -> acceptance.NewJob:
        dice = self.dice
        needs = [
            need(volume_id, dice.choice([X, C, C, R, R, R]))
            for volume_id in dice.sample(ids, dice.choice([1, 1, 1, 2]))
        ]
        slot = jobs.Slot.DATA if dice.random() < 0.3 else jobs.Slot.CONTROL
        return job(*needs, slot=slot)

    async def play(self, workers: int) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(self.bench.other(), group))

    async def _work(self, worker: store_bench.Bench, group: asyncio.TaskGroup) -> None:
        free = {jobs.Slot.CONTROL: 6, jobs.Slot.DATA: 2}

        def start(one: jobs.Job) -> None:
            free[one.slot] -= 1
            task = group.create_task(self._attempt(worker, one))
            task.add_done_callback(lambda _: free.update({one.slot: free[one.slot] + 1}))

        while len(self.ended) < len(self.new):
            size = min(len(self.waiting), self.dice.randint(1, 6))
            batch = [self.waiting.popleft() for _ in range(size)]
            accepted = await worker.accept(*batch, free=dict(free))
            for one in accepted:
                if one.verdict is acceptance.Verdict.RUNNING:
                    start(one.job)
            for claimed in await worker.claim(free=dict(free)):
                start(claimed)
            await asyncio.sleep(0.002)

    async def _attempt(self, worker: store_bench.Bench, one: jobs.Job) -> None:
        began = time.monotonic()
        await asyncio.sleep(self.dice.uniform(0, 0.02))
        self.spans.append(Span(one.id, began, time.monotonic()))
        fate = self.dice.random() if one.attempt < 4 else 1
        if fate < 0.05:
            # The worker dies: its lease runs out some time after it has stopped.
            await asyncio.sleep(0.02)
            await self.bench.expire(one)
        elif fate < 0.15:
            delay = self.dice.uniform(0, 0.05)
            await jobs.requeue(self.bench.store, one, delay=delay, error=None)
        else:
            await worker.finish(one)
            self.ended.add(one.id)

    def check_spans(self) -> None:
        """By the workers' clock, no two that conflict ran at the same time."""
        spans = sorted(self.spans, key=lambda span: span.began)
        for i, first in enumerate(spans):
            for second in spans[i + 1 :]:
                if second.began >= first.ended:
                    break
                assert (first.job_id, second.job_id) not in self.conflicts

    async def check_history(self) -> None:
        """By the database's record likewise; and who was accepted first had ended before."""
        rows = await self.bench.rows("SELECT id, seq FROM jobs")
        accepted = {row["id"]: row["seq"] for row in rows}
        running: set[uuid.UUID] = set()
        finished: set[uuid.UUID] = set()
        for row in await self.bench.rows("SELECT job_id, became FROM history ORDER BY id"):
            job_id = row["job_id"]
            if row["became"] == "running":
                rivals = {other for one, other in self.conflicts if one == job_id}
                assert not rivals & running
                assert {r for r in rivals if accepted[r] < accepted[job_id]} <= finished
                running.add(job_id)
            else:
                running.discard(job_id)
            if row["became"] == "succeeded":
                finished.add(job_id)
        assert finished == {one.id for one in self.new}


async def test_conflicting_jobs_never_run_at_once_and_each_volumes_order_is_kept(
    bench: store_bench.Bench,
) -> None:
    await History.begin(bench)
    scene = Scene(bench, count=200, volumes_count=5)
    await scene.play(workers=4)
    scene.check_spans()
    await scene.check_history()
    assert len(scene.spans) > len(scene.new)  # some were put back, some were lost


def _conflict(one: acceptance.Need, two: acceptance.Need) -> bool:
    return one.volume_id == two.volume_id and (
        X in (one.mode, two.mode) or (one.mode, two.mode) == (C, C)
    )


async def test_many_acceptors_of_one_request_make_one_job(bench: store_bench.Bench) -> None:
    new = job(need(uuid.uuid4()))
    verdicts = await asyncio.gather(*(bench.other().verdicts(new) for _ in range(8)))
    counted = collections.Counter(verdict for (verdict,) in verdicts)
    assert counted == {"running": 1, "repeated": 7}


async def test_batches_that_need_the_same_volumes_the_other_way_round_do_not_deadlock(
    bench: store_bench.Bench,
) -> None:
    ids = [uuid.uuid4() for _ in range(20)]
    batches = []
    for i in range(8):
        turned = ids if i % 2 else list(reversed(ids))
        batches.append([job(need(volume_id)) for volume_id in turned])
    await asyncio.gather(*(bench.other().accept(*batch) for batch in batches))
    assert len(await bench.rows("SELECT FROM jobs WHERE state = 'running'")) == len(ids)


async def test_a_job_whose_volumes_record_is_gone_does_not_end_well(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    one = await bench.started(need(volume_id))
    await volumes.begin(bench.store, one, acceptance.NewVolume(volume_id, "v", 1, {}))
    await bench.rows("DELETE FROM volumes WHERE id = $1", volume_id)
    change = jobs.VolumeChange(volume_id, {"status": "available"})
    with pytest.raises(database.LeaseLost):
        await bench.finish(one, result=None, change=change)
    assert await bench.state_of(one.id) == "running"
