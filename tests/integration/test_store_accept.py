"""Requests that are stored: in their order, once, and those that can start at once as running."""

import dataclasses
import datetime
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from messages import requests, resources
from messages.resources import VolumeStatus
from tests.integration import store_bench
from tests.integration.store_bench import HERE, NONE, C, R, X, job, need, slots
from tests.services import environment
from worker.store import acceptance, connections, jobs, volumes


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


async def refusal_of(bench: store_bench.Bench, new: acceptance.NewJob) -> Any:
    """Why a request is refused at once; None where it is not."""
    (accepted,) = await bench.accept(new)
    if accepted.job.refusal is not None:
        assert accepted.verdict is acceptance.Verdict.RUNNING  # so that it is answered at once
        assert not await bench.rows("SELECT FROM job_locks WHERE job_id = $1", new.id)
    return accepted.job.refusal


# Starting at once


async def test_a_job_whose_volume_is_free_is_stored_as_running(bench: store_bench.Bench) -> None:
    (accepted,) = await bench.accept(job(need(uuid.uuid4())), lease=20)
    assert accepted.verdict is acceptance.Verdict.RUNNING
    one = accepted.job
    assert one.state is resources.JobState.RUNNING
    assert (one.attempt, one.owner, one.overdue) == (1, bench.owner, False)
    assert one.started_at is not None
    (row,) = await bench.rows("SELECT lease_until - now() AS left FROM jobs")
    assert datetime.timedelta(15) > row["left"] > datetime.timedelta(seconds=15)
    # It needs no claim, and there is none to be had.
    assert await bench.claim() == []


async def test_each_running_job_has_a_fencing_token_of_its_own(bench: store_bench.Bench) -> None:
    accepted = await bench.accept(*(job(need(uuid.uuid4())) for _ in range(5)))
    tokens = [one.job.lease_token for one in accepted]
    assert tokens == sorted(set(tokens))


async def test_no_more_start_than_there_are_free_slots(bench: store_bench.Bench) -> None:
    new = [job(need(uuid.uuid4())) for _ in range(4)]
    assert await bench.verdicts(*new, free=slots(control=2)) == [
        "running",
        "running",
        "queued",
        "queued",
    ]


async def test_data_jobs_do_not_take_the_slots_of_control_jobs(bench: store_bench.Bench) -> None:
    data = [job(need(uuid.uuid4()), slot=jobs.Slot.DATA) for _ in range(3)]
    control = [job(need(uuid.uuid4())) for _ in range(3)]
    mixed = [one for pair in zip(data, control, strict=True) for one in pair]
    assert await bench.verdicts(*mixed, free=slots(control=3, data=1)) == [
        "running",
        "running",
        "queued",
        "running",
        "queued",
        "running",
    ]


async def test_a_job_that_is_refused_takes_no_slot(bench: store_bench.Bench) -> None:
    unknown = job(acceptance.Need(uuid.uuid4(), X))
    good = job(need(uuid.uuid4()))
    assert await bench.verdicts(unknown, good, free=slots(control=1)) == ["running", "running"]
    again = job(acceptance.Need(uuid.uuid4(), X))
    assert await bench.verdicts(again, free=NONE) == ["running"]


async def test_a_deadline_that_has_passed_is_noticed_by_the_databases_clock(
    bench: store_bench.Bench,
) -> None:
    late = job(need(uuid.uuid4()), deadline=store_bench.ago(1))
    early = job(need(uuid.uuid4()), deadline=store_bench.ago(-60))
    accepted = await bench.accept(late, early)
    assert [one.job.overdue for one in accepted] == [True, False]


async def test_a_job_that_needs_no_volume_starts_beside_anything(bench: store_bench.Bench) -> None:
    assert await bench.verdicts(job(), job(), job()) == ["running"] * 3


def creating(**changed: Any) -> acceptance.NewJob:
    """A request to create a volume."""
    volume_id = uuid.uuid4()
    new = acceptance.NewVolume(volume_id, "v", 7, {"a": "b"})
    return job(need(volume_id), creates=new, **changed)


async def records(bench: store_bench.Bench, new: acceptance.NewJob) -> int:
    """How many volumes there are of the one that a request is to create."""
    (wanted,) = new.needs
    return len(await bench.rows("SELECT FROM volumes WHERE id = $1", wanted.volume_id))


async def test_a_create_that_starts_at_once_is_stored_with_its_volume(
    bench: store_bench.Bench,
) -> None:
    new = creating()
    (accepted,) = await bench.accept(new)
    assert new.creates is not None
    there = await volumes.get(bench.store, new.creates.id)
    # What its attempt is told is what it would find, and what it would have made.
    begun = await volumes.begin(bench.store, accepted.job, new.creates, begun=accepted.begun)
    assert begun == there
    assert begun.event() == there.event()
    assert (there.status, there.size_bytes, there.metadata) == ("creating", 7, {"a": "b"})
    assert there.created_by == there.status_job == accepted.job.id


async def test_a_volume_made_with_its_job_is_that_of_the_next_attempt(
    bench: store_bench.Bench,
) -> None:
    new = creating()
    (accepted,) = await bench.accept(new)
    await jobs.requeue(bench.store, accepted.job, delay=0, error=None)
    (again,) = await bench.claim()
    assert new.creates is not None
    volume = await volumes.begin(bench.store, again, new.creates)
    assert (volume.status, volume.status_job) == ("creating", again.id)


@pytest.mark.parametrize(
    ("changed", "free"),
    [({}, NONE), ({"deadline": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)}, slots())],
    ids=["it waits for a slot", "its deadline has passed"],
)
async def test_a_create_that_does_not_begin_makes_no_record(
    bench: store_bench.Bench, changed: Any, free: Any
) -> None:
    new = creating(**changed)
    (accepted,) = await bench.accept(new, free=free)
    assert accepted.begun is None
    assert await records(bench, new) == 0


async def test_a_create_that_is_refused_or_repeated_leaves_the_record_as_it_was(
    bench: store_bench.Bench,
) -> None:
    new = creating()
    (first,) = await bench.accept(new)
    again, other = await bench.accept(new, dataclasses.replace(new, id=uuid.uuid4()))
    assert (again.verdict, again.begun) == (acceptance.Verdict.REPEATED, None)
    assert other.job.refusal is not None
    assert other.begun is None
    (volume,) = await bench.rows("SELECT created_by, seq FROM volumes")
    assert (volume["created_by"], volume["seq"]) == (first.job.id, 1)


# Repeats


async def test_a_repeat_while_it_runs_changes_only_who_gets_the_answer(
    bench: store_bench.Bench,
) -> None:
    first = job(need(uuid.uuid4()), reply_to="a", correlation_id="1")
    (ran,) = await bench.accept(first)
    later = store_bench.ago(-60)
    second = dataclasses.replace(
        first, reply_to="b", correlation_id="2", status_updates=True, deadline=later
    )
    (again,) = await bench.other().accept(second)
    assert again.verdict is acceptance.Verdict.REPEATED
    one = again.job
    assert (one.reply_to, one.correlation_id, one.status_updates) == ("b", "2", True)
    assert one.deadline == later
    assert (one.lease_token, one.owner, one.attempt) == (
        ran.job.lease_token,
        bench.owner,
        1,
    )
    ended = await bench.finish(ran.job)
    assert (ended.job.reply_to, ended.job.correlation_id) == ("b", "2")


async def test_a_repeat_of_a_queued_job_does_not_change_its_place(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    first, second = job(need(volume_id)), job(need(volume_id))
    await bench.accept(first, second, free=NONE)
    assert await bench.verdicts(first) == ["repeated"]
    assert [one.id for one in await bench.claim()] == [first.id]


async def test_a_repeat_within_one_batch_is_the_same_job(bench: store_bench.Bench) -> None:
    new = job(need(uuid.uuid4()))
    assert await bench.verdicts(new, new, new) == ["running", "repeated", "repeated"]
    assert len(await bench.rows("SELECT FROM jobs")) == 1


@pytest.mark.parametrize("state", ["succeeded", "failed", "dead", "cancelled"])
async def test_a_repeat_after_the_end_is_answered_from_what_is_stored(
    bench: store_bench.Bench, state: str
) -> None:
    new = job(need(uuid.uuid4()), reply_to="a")
    (ran,) = await bench.accept(new)
    await bench.finish(ran.job, state=resources.JobState(state), result={"kept": True})
    (again,) = await bench.accept(dataclasses.replace(new, reply_to="b", correlation_id="2"))
    assert again.verdict is acceptance.Verdict.FINISHED
    assert again.job.state == state
    assert again.job.result == {"kept": True}
    assert (again.job.reply_to, again.job.correlation_id) == ("b", "2")
    (row,) = await bench.rows("SELECT * FROM outbox WHERE id = $1", again.outbox_id)
    assert row["reply_only"]
    assert row["job_id"] == new.id
    assert len(await bench.rows("SELECT FROM jobs")) == 1


async def test_the_same_id_for_another_request_leaves_the_job_untouched(
    bench: store_bench.Bench,
) -> None:
    new = job(need(uuid.uuid4()), reply_to="a")
    await bench.accept(new)
    before = await bench.rows("SELECT * FROM jobs")
    thief = dataclasses.replace(new, fingerprint=b"other", reply_to="b", correlation_id="2")
    (reused,) = await bench.accept(thief)
    assert reused.verdict is acceptance.Verdict.REUSED
    assert reused.outbox_id is None
    assert await bench.rows("SELECT * FROM jobs") == before


# What is refused at once


async def test_a_volume_that_nobody_knows_is_refused(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    assert await refusal_of(bench, job(acceptance.Need(volume_id, C))) == {
        "code": "VolumeNotFound",
        "volume_id": str(volume_id),
    }


async def test_a_volume_that_is_about_to_be_made_is_waited_for(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    await bench.accept(job(need(volume_id)))
    assert await bench.verdicts(job(acceptance.Need(volume_id, C))) == ["queued"]


async def test_a_volume_that_is_there_already_cannot_be_made(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    assert await refusal_of(bench, job(need(volume.id))) == {
        "code": "VolumeExists",
        "volume_id": str(volume.id),
    }


async def test_a_volume_of_another_address_is_refused_with_the_right_one(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume(address=store_bench.ELSEWHERE)
    assert await refusal_of(bench, job(acceptance.Need(volume.id, C))) == {
        "code": "WrongAddress",
        "volume_id": str(volume.id),
        "address": store_bench.ELSEWHERE,
    }
    assert await refusal_of(bench, job(acceptance.Need(volume.id, C, at_home=False))) is None


@pytest.mark.parametrize("status", ["error", "maintenance", "deleting", "error_deleting"])
async def test_a_visible_status_that_conflicts_is_refused(
    bench: store_bench.Bench, status: str
) -> None:
    volume = await bench.volume(status=status)
    wanted = acceptance.Need(volume.id, X, statuses=[VolumeStatus.AVAILABLE])
    assert await refusal_of(bench, job(wanted)) == {
        "code": "InvalidVolumeStatus",
        "volume_id": str(volume.id),
        "status": status,
    }


@pytest.mark.parametrize("status", ["creating", "attaching", "detaching", "extending"])
async def test_a_status_that_passes_by_itself_is_waited_for(
    bench: store_bench.Bench, status: str
) -> None:
    volume = await bench.volume(status=status)
    wanted = acceptance.Need(volume.id, X, statuses=[VolumeStatus.AVAILABLE])
    assert await refusal_of(bench, job(wanted)) is None


async def connect(bench: store_bench.Bench, volume: volumes.Volume, **connector: Any) -> Any:
    one = await bench.started(need(volume.id, C, known=True))
    made = await connections.begin(
        bench.store,
        one,
        volume.id,
        requests.Connector(**connector),
        is_local=False,
        credentials={"auth_password": "hunter2"},
    )
    await bench.finish(one)
    return made


async def test_a_volume_with_a_connection_is_busy(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    made = await connect(bench, volume, host="b", initiator="iqn.1994-05.com.example:b")
    idle = acceptance.Need(volume.id, X, idle=True)
    assert await refusal_of(bench, job(idle)) == {
        "code": "VolumeIsBusy",
        "volume_id": str(volume.id),
    }
    one = await bench.started(need(volume.id, C, known=True))
    await connections.ended(bench.store, one, made)
    await bench.finish(one)
    assert await refusal_of(bench, job(idle)) is None


async def test_a_volume_whose_last_connection_may_be_ending_is_waited_for(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    await connect(bench, volume, host="b", initiator="iqn.1994-05.com.example:b")
    await bench.started(need(volume.id, C, known=True))  # a terminate_connection, say
    assert await bench.verdicts(job(acceptance.Need(volume.id, X, idle=True))) == ["queued"]


async def test_of_several_needs_the_first_refusal_is_told(bench: store_bench.Bench) -> None:
    volume = await bench.volume(status="error")
    unknown = uuid.uuid4()
    both = job(
        acceptance.Need(volume.id, R, statuses=[VolumeStatus.AVAILABLE]),
        acceptance.Need(unknown, X),
    )
    refusal = await refusal_of(bench, both)
    assert refusal["code"] == "InvalidVolumeStatus"


# Order and locks


@pytest.mark.parametrize(("held", "wanted"), list(itertools.product([X, C, R], repeat=2)))
async def test_what_conflicts_waits_and_what_does_not_runs_beside(
    bench: store_bench.Bench, held: acceptance.LockMode, wanted: acceptance.LockMode
) -> None:
    beside = {(R, R), (R, C), (C, R)}
    volume_id = uuid.uuid4()
    first = await bench.started(need(volume_id, held))
    verdict = await bench.verdicts(job(need(volume_id, wanted)))
    assert verdict == ["running" if (held, wanted) in beside else "queued"]
    await bench.finish(first)
    assert len(await bench.claim()) == (0 if (held, wanted) in beside else 1)


async def test_jobs_on_one_volume_start_in_the_order_of_acceptance(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    reader = await bench.started(need(volume_id, R))
    writer = job(need(volume_id, X))
    second_reader = job(need(volume_id, R))
    # The second reader could run beside the first, but not past the writer before it.
    assert await bench.verdicts(writer, second_reader) == ["queued", "queued"]
    await bench.finish(reader)
    (claimed,) = await bench.claim()
    assert claimed.id == writer.id
    await bench.finish(claimed)
    (claimed,) = await bench.claim()
    assert claimed.id == second_reader.id


async def test_several_requests_of_one_batch_about_one_volume_keep_their_order(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    batch = [job(need(volume_id, mode)) for mode in (C, R, R, X, C, R)]
    assert await bench.verdicts(*batch) == [
        "running",
        "running",
        "running",
        "queued",
        "queued",
        "queued",
    ]
    for one in batch[:3]:
        await bench.finish(await jobs.get(bench.store, one.id))
    assert [one.id for one in await bench.claim()] == [batch[3].id]
    await bench.finish(await jobs.get(bench.store, batch[3].id))
    assert [one.id for one in await bench.claim()] == [batch[4].id, batch[5].id]


async def test_a_job_that_was_put_back_keeps_its_place(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    first = await bench.started(need(volume_id))
    second = job(need(volume_id))
    assert await bench.verdicts(second) == ["queued"]
    await jobs.requeue(bench.store, first, delay=60, error=None)
    # The first waits for its time; the second may not use it to go first.
    assert await bench.claim() == []
    assert await bench.verdicts(job(need(volume_id))) == ["queued"]


async def test_a_job_that_needs_two_volumes_waits_for_both(bench: store_bench.Bench) -> None:
    first_volume, second_volume = uuid.uuid4(), uuid.uuid4()
    first = await bench.started(need(first_volume))
    second = await bench.started(need(second_volume))
    both = job(need(first_volume, R), need(second_volume))
    assert await bench.verdicts(both) == ["queued"]
    await bench.finish(first)
    assert await bench.claim() == []
    await bench.finish(second)
    assert [one.id for one in await bench.claim()] == [both.id]


# Children of a job


async def test_a_child_passes_its_parents_locks(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    child = job(need(volume_id, C), parent_job=parent.id)
    assert await bench.verdicts(child) == ["running"]


async def test_a_child_passes_what_waits_behind_its_parent(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, R))
    writer = job(need(volume_id, X))
    assert await bench.verdicts(writer) == ["queued"]
    assert await bench.verdicts(job(need(volume_id, C), parent_job=parent.id)) == ["running"]


async def test_a_child_does_not_pass_what_runs_beside_its_parent(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, R))
    beside = await bench.started(need(volume_id, C))
    child = job(need(volume_id, C), parent_job=parent.id)
    assert await bench.verdicts(child) == ["queued"]
    await bench.finish(beside)
    assert [one.id for one in await bench.claim()] == [child.id]


async def test_a_child_does_not_pass_a_running_sibling(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    sibling = await bench.started(need(volume_id, C), parent_job=parent.id)
    child = job(need(volume_id, C), parent_job=parent.id)
    assert await bench.verdicts(child) == ["queued"]
    await bench.finish(sibling)
    assert [one.id for one in await bench.claim()] == [child.id]


async def test_children_of_one_parent_start_in_the_order_of_acceptance(
    bench: store_bench.Bench,
) -> None:
    """A terminate_connection sent to compensate must not pass the initialize_connection."""
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    initialize = await bench.queued(need(volume_id, C), parent_job=parent.id)
    terminate = job(need(volume_id, C), parent_job=parent.id)
    assert await bench.verdicts(terminate) == ["queued"]
    assert [one.id for one in await bench.claim()] == [initialize.id]


async def test_a_child_does_not_pass_a_sibling_that_waits_to_be_tried_again(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    initialize = await bench.started(need(volume_id, C), parent_job=parent.id)
    await jobs.requeue(bench.store, initialize, delay=60, error=None)
    terminate = job(need(volume_id, C), parent_job=parent.id)
    assert await bench.verdicts(terminate) == ["queued"]
    assert await bench.claim() == []


async def test_what_the_parent_does_not_hold_is_not_passed(bench: store_bench.Bench) -> None:
    volume_id, other = uuid.uuid4(), uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    assert await refusal_of(bench, job(need(other, C), parent_job=parent.id)) == {
        "code": "InvalidRequest",
        "member": "parent-job",
    }


@pytest.mark.parametrize("end", ["finished", "put back", "unknown"])
async def test_a_parent_that_does_not_run_is_refused(bench: store_bench.Bench, end: str) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    parent_id = parent.id
    match end:
        case "finished":
            await bench.finish(parent)
        case "put back":
            await jobs.requeue(bench.store, parent, delay=60, error=None)
        case _:
            parent_id = uuid.uuid4()
    refusal = await refusal_of(bench, job(need(volume_id, C), parent_job=parent_id))
    assert refusal == {"code": "InvalidRequest", "member": "parent-job"}


async def test_a_child_whose_parent_has_ended_passes_nobody_any_more(
    bench: store_bench.Bench,
) -> None:
    volume_id = uuid.uuid4()
    parent = await bench.started(need(volume_id, X))
    before = await bench.queued(need(volume_id, X))
    await bench.queued(need(volume_id, C), parent_job=parent.id)
    await bench.finish(parent)
    (claimed,) = await bench.claim()
    assert claimed.id == before.id
    await jobs.requeue(bench.store, claimed, delay=60, error=None)
    assert await bench.claim() == []


# What is kept


async def test_a_job_is_kept_as_it_came(bench: store_bench.Bench) -> None:
    deadline = datetime.datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)
    new = job(
        need(uuid.uuid4()),
        body=b'{"method": "m", "version": "1.0", "args": {"a": "\xc3\xbc"}}',
        properties={"headers": {"h": {"$bytes": "AAE="}}, "priority": 3},
        deadline=deadline,
        reply_to="q",
        correlation_id="ü",
        status_updates=True,
    )
    await bench.accept(new)
    one = await jobs.get(bench.store, new.id)
    assert one.body == new.body
    assert one.args == {"a": "ü"}
    assert one.properties == new.properties
    assert (one.deadline, one.reply_to, one.correlation_id) == (deadline, "q", "ü")
    assert one.address == HERE
    assert one.to_wire()["args"] == {"a": "ü"}
    assert resources.Job.model_validate(one.to_wire()).to_wire() == one.to_wire()


async def test_jobs_are_listed_by_acceptance_page_by_page(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    new = [job(need(volume_id if i % 2 else uuid.uuid4())) for i in range(6)]
    await bench.accept(*new)

    async def listed(**wanted: Any) -> list[uuid.UUID]:
        values = {"address": None, "state": None, "volume_id": None, "after": None, "limit": 100}
        return [one.id for one in await jobs.list_(bench.store, **{**values, **wanted})]

    ids = [one.id for one in new]
    assert await listed() == ids
    assert await listed(limit=2) == ids[:2]
    assert await listed(limit=2, after=ids[1]) == ids[2:4]
    assert await listed(after=ids[-1]) == []
    assert await listed(address="host-b@fast") == []
    assert await listed(address=HERE, volume_id=volume_id) == ids[1::2]
    assert await listed(state="queued") == [ids[3], ids[5]]
