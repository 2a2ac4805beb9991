"""Whatever jobs do to volumes, and wherever they are cut short, no record is left out of order."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import stateful

from messages.resources import JobState
from tests.integration import machine_bench, machine_volume_steps
from tests.integration.machine_bench import pick
from tests.integration.machine_volume_steps import STEPS, Complete, Connect, Disconnect, Export
from tests.integration.machine_volumes import Kind
from tests.integration.store_bench import HERE, PLENTY
from tests.services import environment
from worker.store import jobs, volumes

numbers = st.integers(0, 11)
keys = st.sampled_from(["one", "two"])
bad_ends = st.sampled_from([JobState.FAILED, JobState.CANCELLED, JobState.DEAD])
sharing_steps = st.one_of(
    st.builds(Export, st.sampled_from(volumes.Export)),
    st.builds(Connect, keys, st.sampled_from(["rw", "rw", "ro"]), st.booleans()),
    st.builds(Complete, keys),
    st.builds(Disconnect, st.none() | keys, st.booleans()),
)


class VolumeMachine(machine_volume_steps.Actions):
    """Jobs that go through the steps of their methods, and end or are lost between any two."""

    @stateful.initialize()
    def make_volumes(self) -> None:
        for volume_id in self.volumes:
            self._carry_out(Kind.CREATE, volume_id, 1, None, is_lost=False)
        self._carry_out(Kind.ATTACH, self.volumes[0], 3, None, is_lost=False)

    @stateful.rule(
        kind=st.sampled_from(STEPS),
        which=numbers,
        steps=st.integers(0, 3),
        state=st.none() | bad_ends,
        is_lost=st.booleans(),
    )
    def carry_out(
        self, kind: Kind, which: int, steps: int, state: JobState | None, is_lost: bool
    ) -> None:
        self._carry_out(kind, self._fitting(kind, which), steps, state, is_lost=is_lost)

    @stateful.rule(steps=st.integers(0, 1), state=st.none() | bad_ends)
    def create_twice(self, steps: int, state: JobState | None) -> None:
        """Two want to create the same volume, and the second waits for the first."""
        volume_id = self._new_volume()
        self._request(Kind.CREATE, volume_id)
        first = self.model.jobs[-1]
        self._request(Kind.CREATE, volume_id)
        second = self.model.jobs[-1]
        if first.id in self.held:
            self._steps(first, steps)
            self._end(first, state, is_lost=False)
        self.check()
        self.claim()
        if second.id in self.held:
            self._steps(second, 2)

    @stateful.rule(
        which=numbers,
        steps=st.lists(sharing_steps, min_size=1, max_size=5),
        state=st.none() | bad_ends,
        is_lost=st.booleans(),
    )
    def share(
        self,
        which: int,
        steps: Sequence[machine_volume_steps.Step],
        state: JobState | None,
        is_lost: bool,
    ) -> None:
        self._request(Kind.SHARE, pick(self.volumes, which))
        job = self.model.jobs[-1]
        if job.id in self.held:
            self.check()
            self._share(job, steps)
            self._end(job, state, is_lost=is_lost)

    @stateful.rule(kind=st.sampled_from(Kind), which=numbers)
    def request(self, kind: Kind, which: int) -> None:
        self._request(kind, pick(self.volumes, which))

    @stateful.rule()
    def claim(self) -> None:
        claimed = self.ground.run(
            jobs.claim(
                self.store,
                owner=self.owner,
                lease=machine_volume_steps.LEASE,
                free=PLENTY,
                addresses=[HERE],
            )
        )
        expected = self.model.next_jobs()
        assert {one.id for one in claimed} == {job.id for job in expected}
        for job in expected:
            job.state = JobState.RUNNING
        self.held.update({one.id: one for one in claimed})

    @stateful.precondition(lambda self: self.held)
    @stateful.rule(which=numbers)
    def lose_its_worker(self, which: int) -> None:
        self._lose(pick(list(self.held.values()), which))

    @stateful.precondition(lambda self: self.held)
    @stateful.rule(which=numbers)
    def requeue(self, which: int) -> None:
        job = pick(list(self.held.values()), which)
        self.ground.run(jobs.requeue(self.store, job, delay=0, error=None))
        (expected,) = [one for one in self.model.jobs if one.id == job.id]
        expected.state = JobState.QUEUED
        self.lost.append(self.held.pop(job.id))

    @stateful.precondition(lambda self: self.running(*STEPS))
    @stateful.rule(which=numbers, steps=st.integers(1, 3))
    def go_on(self, which: int, steps: int) -> None:
        self._steps(pick(self.running(*STEPS), which), steps)

    @stateful.precondition(lambda self: self.holding(Kind.ATTACH))
    @stateful.rule(which=numbers)
    def undo_attaching(self, which: int) -> None:
        self._end_attachments(pick(self.holding(Kind.ATTACH), which))

    @stateful.precondition(lambda self: self.running(*STEPS))
    @stateful.rule(which=numbers)
    def start_over(self, which: int) -> None:
        job = pick(self.running(*STEPS), which)
        if job.kind is Kind.CREATE:
            self._begin_volume(job)
        else:
            self._take_volume(job)

    @stateful.precondition(lambda self: self.running(Kind.SHARE))
    @stateful.rule(which=numbers, steps=st.lists(sharing_steps, min_size=1, max_size=3))
    def go_on_sharing(self, which: int, steps: Sequence[machine_volume_steps.Step]) -> None:
        self._share(pick(self.running(Kind.SHARE), which), steps)

    @stateful.precondition(lambda self: self.held)
    @stateful.rule(which=numbers)
    def succeed(self, which: int) -> None:
        self._succeed(pick(self.running(*Kind), which))

    @stateful.precondition(lambda self: self.held)
    @stateful.rule(which=numbers, state=bad_ends, is_known=st.booleans())
    def fail(self, which: int, state: JobState, is_known: bool) -> None:
        self._fail(pick(self.running(*Kind), which), state, is_known=is_known)

    @stateful.precondition(lambda self: self.lost)
    @stateful.rule(which=numbers, volume=numbers, kind=st.sampled_from(Kind), state=bad_ends)
    def write_too_late(self, which: int, volume: int, kind: Kind, state: JobState) -> None:
        self._write_too_late(pick(self.lost, which), pick(self.volumes, volume), kind, state)

    @stateful.invariant()
    def rows_are_as_they_should_be(self) -> None:
        self.check()

    @stateful.invariant()
    def there_is_nothing_to_mend(self) -> None:
        misplaced, found = self.ground.run(self._to_mend())
        assert misplaced == []
        assert {one.volume_id for one in found} == {
            volume.id for volume in self.model.volumes.values() if self._is_left(volume)
        }


@pytest.mark.timeout(machine_bench.TIMEOUT)
def test_no_volume_is_left_where_no_job_takes_it_on(
    installation: environment.Installation,
) -> None:
    with machine_bench.opened(installation) as ground:

        class Machine(VolumeMachine):
            def __init__(self) -> None:
                super().__init__(ground)

        settings = machine_bench.settings(examples=40, steps=40)
        stateful.run_state_machine_as_test(Machine, settings=settings)


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_a_job_may_end_badly_after_any_of_its_steps(
    installation: environment.Installation, kind: Kind, is_lost: bool
) -> None:
    with machine_bench.opened(installation) as ground:
        for steps in range(4):
            machine = VolumeMachine(ground)
            machine.make_volumes()
            machine.carry_out(kind, 1, steps, JobState.DEAD, is_lost)
            machine.check()
            machine.there_is_nothing_to_mend()


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_job_leaves_of_a_connection_is_found_or_is_whole(
    installation: environment.Installation, is_lost: bool
) -> None:
    steps = [
        Export(volumes.Export.IMPLICIT),
        Connect("one", "rw", is_local=False),
        Complete("one"),
        Disconnect("one", is_cut_short=True),
        Connect("one", "rw", is_local=False),
        Disconnect(None, is_cut_short=False),
        Connect("one", "ro", is_local=True),
        Export(volumes.Export.NONE),
    ]
    with machine_bench.opened(installation) as ground:
        for count in range(1, len(steps) + 1):
            machine = VolumeMachine(ground)
            machine.make_volumes()
            machine.share(0, steps[:count], JobState.DEAD, is_lost)
            machine.check()
            machine.there_is_nothing_to_mend()
