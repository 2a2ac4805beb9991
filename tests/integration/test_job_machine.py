"""Whatever is done to jobs, in whatever order and by however many workers, they stay in order."""

import dataclasses
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import stateful

from messages import errors
from messages.resources import JobState, Progress
from tests.integration import machine_bench, machine_job_rows, machine_jobs, store_bench
from tests.integration.machine_bench import pick
from tests.integration.store_bench import ELSEWHERE, HERE
from tests.services import environment
from worker.store import acceptance, database, jobs, outbox, replays
from worker.store.acceptance import LockMode, Verdict
from worker.store.jobs import Slot

LEASE = 3600.0
LIMITS = {Slot.CONTROL: 2, Slot.DATA: 1}
"""Each worker's slots."""
VOLUMES = 3
"""How many volumes there are to need; only the first of them exists."""

numbers = st.integers(0, 11)
is_sound = st.sampled_from([True] * 9 + [False])
"""Seldom not."""
needs = st.lists(
    st.tuples(st.integers(0, VOLUMES - 1), st.sampled_from(LockMode), is_sound),
    max_size=2,
    unique_by=lambda need: need[0],
)
requests = st.fixed_dictionaries(
    {
        "needs": needs,
        "slot": st.sampled_from([Slot.CONTROL, Slot.CONTROL, Slot.DATA, Slot.WAITING]),
        "parent": st.none() | st.tuples(numbers, is_sound),
        "method": st.sampled_from(["m", "initialize_connection", "terminate_connection"]),
    }
)
ENDS: dict[JobState, errors.VolumeWorkerError | None] = {
    JobState.SUCCEEDED: None,
    JobState.FAILED: errors.InvalidRequest("no"),
    JobState.CANCELLED: errors.Cancelled("enough"),
    JobState.DEAD: errors.TargetError("away"),
}


@dataclasses.dataclass
class Worker:
    """A process: what it holds, and what it once held and might still write to."""

    address: str
    owner: uuid.UUID
    held: dict[uuid.UUID, jobs.Job] = dataclasses.field(default_factory=dict)
    lost: list[jobs.Job] = dataclasses.field(default_factory=list)

    def free(self) -> dict[Slot, int]:
        """Its free slots, as a runner counts them."""
        taken = [job.slot for job in self.held.values() if job.refusal is None]
        return {slot: most - taken.count(slot) for slot, most in LIMITS.items()}

    def drop(self, job_id: uuid.UUID) -> None:
        """It has no job of that id any more."""
        if (old := self.held.pop(job_id, None)) is not None:
            self.lost.append(old)


class JobMachine(stateful.RuleBasedStateMachine):
    """Three workers, two of them at one address."""

    def __init__(self, ground: machine_bench.Ground) -> None:
        super().__init__()
        ground.clear()
        self.ground = ground
        self.store = ground.store
        self.ids = machine_bench.ids()
        self.volumes = [next(self.ids) for _ in range(VOLUMES)]
        ground.execute(
            "INSERT INTO volumes (id, name, address, size_bytes, status, created_by)"
            " VALUES ($1, 'v', $2, 1, 'available', $1)",
            self.volumes[0],
            HERE,
        )
        self.model = machine_jobs.Model(self.volumes[:1])
        self.workers = [Worker(at, next(self.ids)) for at in (HERE, HERE, ELSEWHERE)]
        self.told: dict[int, tuple[uuid.UUID, bool]] = {}
        self.rows = machine_job_rows.read(ground)

    # What there is to choose from

    def held(self) -> list[tuple[Worker, jobs.Job]]:
        """Workers with what they hold."""
        return [(worker, job) for worker in self.workers for job in worker.held.values()]

    def lost(self) -> list[jobs.Job]:
        """What workers once held."""
        return [job for worker in self.workers for job in worker.lost]

    # Acceptance

    @stateful.initialize(batch=st.lists(requests, min_size=2, max_size=5))
    def accept_the_first(self, batch: Sequence[dict[str, Any]]) -> None:
        self.accept(0, batch)

    @stateful.rule(which=numbers, batch=st.lists(requests, min_size=1, max_size=3))
    def accept(self, which: int, batch: Sequence[dict[str, Any]]) -> None:
        worker = pick(self.workers, which)
        expected = [self._job(worker.address, **one) for one in batch]
        accepted = self.ground.run(self._accept(worker, [_request(job) for job in expected]))
        free = worker.free()
        for stored, job in zip(accepted, expected, strict=True):
            self.model.accept(job, worker.owner, free)
            assert stored.verdict == str(job.state), (stored, job)
            assert stored.outbox_id is None
            if stored.verdict is Verdict.RUNNING:
                worker.held[stored.job.id] = stored.job

    def _job(
        self,
        address: str,
        needs: Sequence[tuple[int, LockMode, bool]],
        slot: Slot,
        parent: tuple[int, bool] | None,
        method: str,
    ) -> machine_jobs.Job:
        volumes, parent_id = self.volumes, None
        if parent is not None:
            which, is_sound = parent
            there = [
                job for job in self.model.in_order() if (job.holds and job.needs) or not is_sound
            ]
            if there:
                works_for = pick(there, which)
                parent_id = works_for.id
                volumes = [need.volume_id for need in works_for.needs] or volumes
        wanted = {pick(volumes, one): (mode, is_sound) for one, mode, is_sound in needs}
        return machine_jobs.Job(
            id=next(self.ids),
            order=self.model.next_order(),
            address=address,
            method=method,
            slot=slot,
            own_slot=slot,
            needs=[
                machine_jobs.Need(one, mode, known=(one in self.model.volumes) == is_sound)
                for one, (mode, is_sound) in wanted.items()
            ],
            parent=parent_id,
        )

    async def _accept(
        self, worker: Worker, new: Sequence[acceptance.NewJob]
    ) -> Sequence[acceptance.Accepted]:
        return await acceptance.accept(
            self.store, new, owner=worker.owner, lease=LEASE, free=worker.free()
        )

    @stateful.precondition(lambda self: self.held())
    @stateful.rule(
        which=numbers,
        worker=numbers,
        batch=st.lists(requests, min_size=1, max_size=3),
        becomes=st.none() | st.sampled_from(JobState),
    )
    def call(
        self, which: int, worker: int, batch: Sequence[dict[str, Any]], becomes: JobState | None
    ) -> None:
        """A job asks for others; then perhaps it ends, is put back, or is cancelled meanwhile."""
        holder, job = pick(self.held(), which)
        place = [one for one in self.model.in_order() if one.holds and one.needs]
        if self.model.jobs[job.id] in place:
            parent = place.index(self.model.jobs[job.id]), True
            self.accept(worker, [{**one, "parent": parent} for one in batch])
            self.rows_are_as_they_should_be()
        match becomes:
            case JobState.CANCELLED:
                self._cancel(self.model.jobs[job.id], holder)
            case JobState.QUEUED:
                self._requeue(holder, job, is_due=True, counts=True)
            case JobState.SUCCEEDED | JobState.FAILED | JobState.DEAD:
                self._finish(holder, job, becomes)

    @stateful.precondition(lambda self: self.model.jobs)
    @stateful.rule(which=numbers, worker=numbers, is_same=st.booleans())
    def repeat(self, which: int, worker: int, is_same: bool) -> None:
        job = pick(self.model.in_order(), which)
        request = _request(job, reply_to=f"q{which}")
        if not is_same:
            request = dataclasses.replace(request, fingerprint=b"another")
        (stored,) = self.ground.run(self._accept(pick(self.workers, worker), [request]))
        assert stored.job.id == job.id
        if not is_same:
            assert stored.verdict is Verdict.REUSED
        elif not job.has_ended:
            assert stored.verdict is Verdict.REPEATED
        else:
            assert stored.verdict is Verdict.FINISHED
            assert stored.outbox_id is not None
            self.told[stored.outbox_id] = job.id, True
        if is_same:
            assert stored.job.reply_to == request.reply_to

    # Turns

    @stateful.rule(which=numbers)
    def claim(self, which: int) -> None:
        worker = pick(self.workers, which)
        addresses = [worker.address]
        while True:
            free = worker.free()
            claimed = self.ground.run(self._claim(worker))
            for one in claimed:
                self._check_turn(one, addresses, free)
                self._start(worker, one, free)
            if not claimed:
                break
        left = [
            job
            for job in self.model.unfinished()
            if self.model.can_claim(job, addresses, worker.free())
        ]
        assert not left, "they might have been claimed"

    def _check_turn(self, one: jobs.Job, addresses: Sequence[str], free: dict[Slot, int]) -> None:
        job = self.model.jobs[one.id]
        if job.state is JobState.QUEUED:
            claimable = [
                other
                for other in self.model.where(JobState.QUEUED)
                if other.slot == job.slot and self.model.can_claim(other, addresses, free)
            ]
            assert job in claimable, "it has to wait"
            assert claimable[0] is job, "an older one's turn has come too"

    def _start(self, worker: Worker, one: jobs.Job, free: dict[Slot, int]) -> None:
        job = self.model.jobs[one.id]
        assert self.model.can_claim(job, [worker.address], free), (one, job)
        self.model.claim(job, worker.owner, free)
        for other in self.workers:
            other.drop(one.id)
        worker.held[one.id] = one

    async def _claim(self, worker: Worker) -> list[jobs.Job]:
        return await jobs.claim(
            self.store,
            owner=worker.owner,
            lease=LEASE,
            free=worker.free(),
            addresses=[worker.address],
        )

    # Leases

    @stateful.precondition(lambda self: self.model.where(JobState.RUNNING))
    @stateful.rule(which=numbers)
    def let_a_lease_run_out(self, which: int) -> None:
        job = pick(self.model.where(JobState.RUNNING), which)
        self.ground.execute(
            "UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = $1", job.id
        )
        job.is_expired = True

    @stateful.rule(which=numbers)
    def renew(self, which: int) -> None:
        worker = pick(self.workers, which)
        asked = [*worker.held.values(), *worker.lost]
        kept = self.ground.run(jobs.renew(self.store, asked, lease=LEASE))
        assert kept == set(worker.held)
        for job_id in kept:
            self.model.jobs[job_id].is_expired = False

    # What its worker does with a job

    @stateful.precondition(lambda self: self.held())
    @stateful.rule(which=numbers, state=st.sampled_from(list(ENDS)))
    def finish(self, which: int, state: JobState) -> None:
        self._finish(*pick(self.held(), which), state)

    @stateful.rule(which=numbers, states=st.lists(st.sampled_from(list(ENDS)), max_size=3))
    def carry_out(self, which: int, states: Sequence[JobState]) -> None:
        worker = pick(self.workers, which)
        for state in states:
            if worker.held:
                self._finish(worker, next(iter(worker.held.values())), state)
                self.rows_are_as_they_should_be()
        self.claim(which)

    def _finish(self, worker: Worker, job: jobs.Job, state: JobState) -> None:
        ended = self.ground.run(jobs.finish(self.store, _ending(job, state)))
        self.model.finish(self.model.jobs[job.id], state)
        self.told[ended.outbox_id] = job.id, False
        worker.drop(job.id)
        queued = [one for one in self.model.where(JobState.QUEUED) if one.address == job.address]
        assert ended.is_more == bool(queued)

    @stateful.precondition(lambda self: self.held())
    @stateful.rule(which=numbers, is_due=st.booleans(), counts=st.booleans())
    def requeue(self, which: int, is_due: bool, counts: bool) -> None:
        self._requeue(*pick(self.held(), which), is_due=is_due, counts=counts)

    def _requeue(self, worker: Worker, job: jobs.Job, *, is_due: bool, counts: bool) -> None:
        error = errors.TargetError("away") if counts else None
        delay = 0 if is_due else LEASE
        self.ground.run(jobs.requeue(self.store, job, delay=delay, error=error, counts=counts))
        self.model.requeue(self.model.jobs[job.id], is_due=is_due, counts=counts)
        worker.drop(job.id)

    @stateful.precondition(lambda self: self.held())
    @stateful.rule(which=numbers)
    def tell_progress(self, which: int) -> None:
        _, job = pick(self.held(), which)
        self.ground.run(jobs.set_progress(self.store, job, _progress()))
        self.ground.run(jobs.set_children(self.store, job, [{"pid": 1, "started": 1}]))

    @stateful.precondition(lambda self: self.lost())
    @stateful.rule(which=numbers, state=st.sampled_from(list(ENDS)))
    def write_too_late(self, which: int, state: JobState) -> None:
        job = pick(self.lost(), which)
        for write in (
            lambda: jobs.finish(self.store, _ending(job, state)),
            lambda: jobs.requeue(self.store, job, delay=0, error=ENDS[state], counts=True),
            lambda: jobs.set_progress(self.store, job, _progress()),
            lambda: jobs.set_children(self.store, job, [{"pid": 1, "started": 1}]),
        ):
            with pytest.raises(database.LeaseLost):
                self.ground.run(write())
        assert self.ground.run(jobs.renew(self.store, [job], lease=LEASE)) == set()
        assert machine_job_rows.read(self.ground) == self.rows

    # What others do with it

    @stateful.precondition(lambda self: self.model.jobs)
    @stateful.rule(which=numbers, canceller=numbers)
    def cancel(self, which: int, canceller: int) -> None:
        self._cancel(pick(self.model.in_order(), which), pick(self.workers, canceller))

    def _cancel(self, job: machine_jobs.Job, worker: Worker) -> None:
        mine = self.ground.run(
            jobs.cancel(
                self.store,
                job.id,
                owner=worker.owner,
                lease=LEASE,
                cleanups=machine_jobs.CLEANUPS,
            )
        )
        expected = self.model.cancel(job, worker.owner)
        assert {one.id for one in mine} == {one.id for one in expected}
        for one in mine:
            worker.held[one.id] = one
        assert self.ground.run(jobs.to_cancel(self.store, worker.owner)) == {
            one.id
            for one in self.model.where(JobState.RUNNING)
            if one.is_cancelled and one.owner == worker.owner
        }

    @stateful.precondition(lambda self: self.model.where(JobState.QUEUED))
    @stateful.rule(which=numbers)
    def let_its_time_come(self, which: int) -> None:
        job = pick(self.model.where(JobState.QUEUED), which)
        self.ground.execute("UPDATE jobs SET run_at = least(run_at, now()) WHERE id = $1", job.id)
        job.is_due = True

    @stateful.precondition(lambda self: any(job.has_ended for job in self.model.jobs.values()))
    @stateful.rule(which=numbers, dry_run=st.booleans(), is_newest=is_sound)
    def replay(self, which: int, dry_run: bool, is_newest: bool) -> None:
        ended = [job for job in self.model.in_order() if job.has_ended]
        self._replay(pick(ended, which), dry_run=dry_run, is_newest=is_newest)

    @stateful.precondition(lambda self: self.held())
    @stateful.rule(which=numbers, times=st.integers(1, 2), is_overtaken=st.booleans())
    def die_and_come_back(self, which: int, times: int, is_overtaken: bool) -> None:
        worker, job = pick(self.held(), which)
        expected = self.model.jobs[job.id]
        for _ in range(times):
            self._finish(worker, job, JobState.DEAD)
            self.rows_are_as_they_should_be()
            if is_overtaken and expected.needs:
                self._connect_meanwhile(worker, expected.needs[0].volume_id)
            self._replay(expected, dry_run=False, is_newest=True)
            self.rows_are_as_they_should_be()
            self.claim(self.workers.index(worker))
            if job.id not in worker.held:
                break
            job = worker.held[job.id]

    def _connect_meanwhile(self, worker: Worker, volume_id: uuid.UUID) -> None:
        request = {
            "needs": [(self.volumes.index(volume_id), LockMode.CONTROL, True)],
            "slot": Slot.WAITING,
            "parent": None,
            "method": "initialize_connection",
        }
        self.accept(self.workers.index(worker), [request])
        self.rows_are_as_they_should_be()
        new = self.model.in_order()[-1]
        if new.id in worker.held:
            self._finish(worker, worker.held[new.id], JobState.SUCCEEDED)
            self.rows_are_as_they_should_be()

    def _replay(self, job: machine_jobs.Job, *, dry_run: bool, is_newest: bool) -> None:
        ending = job.endings if is_newest else job.endings - 1
        revival = self.ground.run(
            replays.revive(
                self.store,
                self.ground.run(jobs.get(self.store, job.id)),
                ending=ending,
                body=None,
                slot=job.own_slot,
                needs=_needs(job),
                dry_run=dry_run,
            )
        )
        assert str(revival.outcome) == self.model.revival(job, ending)
        if revival.outcome is replays.Outcome.REVIVED and not dry_run:
            self.model.revive(job)

    @stateful.rule(worker=numbers, limit=st.integers(1, 3))
    def publish(self, worker: int, limit: int) -> None:
        addresses = [pick(self.workers, worker).address]
        entries = self.ground.run(
            outbox.adopt(self.store, addresses=addresses, older_than=0, limit=limit)
        )
        here = [
            outbox_id
            for outbox_id, (job_id, _) in sorted(self.told.items())
            if self.model.jobs[job_id].address in addresses
        ]
        assert [entry.id for entry in entries] == here[:limit]
        for entry in entries:
            assert entry.job is not None
            assert (entry.job.id, entry.reply_only) == self.told.pop(entry.id)
        ids = [entry.id for entry in entries]
        # Who has taken them over is left alone with them for a while.
        again = outbox.adopt(self.store, addresses=addresses, older_than=LEASE, limit=100)
        assert self.ground.run(again) == []
        self.ground.run(outbox.delete(self.store, ids))

    @stateful.rule(limit=st.integers(1, 3))
    def prune(self, limit: int) -> None:
        untold = {job_id for job_id, _ in self.told.values()}
        ended = sorted(
            (job for job in self.model.jobs.values() if job.has_ended and job.id not in untold),
            key=lambda job: job.ended_at,
        )[:limit]
        assert self.ground.run(jobs.prune(self.store, retention=0, limit=limit)) == len(ended)
        for job in ended:
            del self.model.jobs[job.id]

    # What is always so

    @stateful.invariant()
    def rows_are_as_they_should_be(self) -> None:
        before, self.rows = self.rows, machine_job_rows.read(self.ground)
        machine_job_rows.check_alone(self.rows, LIMITS)
        machine_job_rows.check_step(before, self.rows)
        machine_job_rows.check_model(self.rows, self.model, self.told)

    @stateful.invariant()
    def somebody_can_go_on(self) -> None:
        unfinished = self.model.unfinished()
        assert not unfinished or any(
            job.state is JobState.RUNNING or not self.model.must_wait(job) for job in unfinished
        )


def _needs(job: machine_jobs.Job) -> list[acceptance.Need]:
    return [
        acceptance.Need(need.volume_id, need.mode, known=need.known, at_home=False)
        for need in job.needs
    ]


def _request(job: machine_jobs.Job, **changed: Any) -> acceptance.NewJob:
    return store_bench.job(
        *_needs(job),
        id=job.id,
        method=job.method,
        address=job.address,
        slot=job.own_slot,
        parent_job=job.parent,
        fingerprint=hashlib.sha256(job.id.bytes).digest(),
        **changed,
    )


def _ending(job: jobs.Job, state: JobState) -> jobs.Ending:
    error = ENDS[state]
    return jobs.Ending(job, state, result={} if error is None else None, error=error)


def _progress() -> Progress:
    return Progress(done_bytes=1, total_bytes=2, bytes_per_second=3)


@pytest.mark.timeout(machine_bench.TIMEOUT)
def test_jobs_keep_their_order_their_owner_and_their_volumes(
    installation: environment.Installation,
) -> None:
    with machine_bench.opened(installation) as ground:

        class Machine(JobMachine):
            def __init__(self) -> None:
                super().__init__(ground)

        settings = machine_bench.settings(examples=80, steps=40)
        stateful.run_state_machine_as_test(Machine, settings=settings)
