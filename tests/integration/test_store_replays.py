"""Jobs that are taken back from the dead, with their volumes, their place and their history."""

import asyncio
import datetime
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from messages import envelope, errors, requests
from messages.resources import JobState, VolumeStatus
from tests.integration import store_bench
from tests.integration.store_bench import HERE, C, X, job, need
from tests.services import environment
from worker import operations
from worker.store import acceptance, jobs, replays, volumes

FAULT = errors.TargetError("tgtd is away")
USABLE = [VolumeStatus.AVAILABLE, VolumeStatus.IN_USE]


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


async def die(
    bench: store_bench.Bench, one: jobs.Job, state: JobState = JobState.DEAD, **how: Any
) -> jobs.Job:
    """Ends a running job for good."""
    return (await bench.finish(one, state=state, result=None, error=FAULT, **how)).job


async def revive(
    bench: store_bench.Bench, one: jobs.Job, *needs: acceptance.Need, **changed: Any
) -> replays.Revival:
    values: dict[str, Any] = {
        "ending": one.endings,
        "body": None,
        "slot": jobs.Slot.CONTROL,
        "needs": needs,
        "dry_run": False,
    }
    return await replays.revive(bench.store, one, **{**values, **changed})


async def outcome_of(
    bench: store_bench.Bench, one: jobs.Job, *needs: acceptance.Need, **changed: Any
) -> str:
    return str((await revive(bench, one, *needs, **changed)).outcome)


# The job itself


@pytest.mark.parametrize("state", [JobState.DEAD, JobState.FAILED])
async def test_a_revived_job_begins_as_a_new_one_and_remembers_its_life(
    bench: store_bench.Bench, state: JobState
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    one = await bench.started(wanted, deadline=store_bench.ago(-60), reply_to="q")
    dead = await die(bench, one, state)
    assert await outcome_of(bench, dead, wanted) == "revived"
    now = await jobs.get(bench.store, one.id)
    assert (now.state, now.attempt, now.deadline, now.finished_at) == ("queued", 0, None, None)
    assert (now.result, now.refusal, now.overdue, now.edited) == (None, None, False, False)
    assert (now.reply_to, now.correlation_id, now.body) == ("q", one.correlation_id, one.body)
    assert now.first_failed_at == dead.first_failed_at
    assert now.version > dead.version
    assert now.history is not None
    assert (now.history["replays"], now.history["attempts"]) == (1, 1)
    (life,) = now.history["lives"]
    assert (life["code"], life["message"], life["attempts"]) == ("TargetError", FAULT.message, 1)
    assert datetime.datetime.fromisoformat(life["finished_at"]) == dead.finished_at
    (claimed,) = await bench.claim()
    # It has nothing left of its first life.
    assert (claimed.id, claimed.attempt, claimed.resumed) == (one.id, 1, False)


async def test_a_revived_job_waits_behind_what_was_accepted_since(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, C, known=True)
    dead = await die(bench, await bench.started(wanted))
    since = await bench.queued(need(volume.id, X, known=True))
    assert await outcome_of(bench, dead, wanted) == "revived"
    later = await bench.queued(need(volume.id, X, known=True))
    order = []
    for _ in range(3):
        (claimed,) = await bench.claim()
        order.append(claimed.id)
        await bench.finish(claimed)
    assert order == [since.id, dead.id, later.id]


async def test_a_repeat_of_the_first_request_finds_the_job_that_was_edited(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    new = job(wanted)
    (accepted,) = await bench.accept(new)
    dead = await die(bench, accepted.job)
    body = b'{"method": "m", "version": "1.0", "args": {"edited": 1}}'
    assert await outcome_of(bench, dead, wanted, body=body) == "revived"
    now = await jobs.get(bench.store, new.id)
    assert (now.body, now.edited) == (body, True)
    assert await bench.verdicts(new) == ["repeated"]
    assert (await jobs.get(bench.store, new.id)).body == body
    assert await replays.fingerprint(bench.store, new.id) == new.fingerprint
    assert await replays.fingerprint(bench.store, uuid.uuid4()) is None


async def test_an_edit_may_mean_another_volume(bench: store_bench.Bench) -> None:
    first, second = await bench.volume(), await bench.volume()
    dead = await die(bench, await bench.started(need(first.id, X, known=True)))
    assert await outcome_of(bench, dead, need(second.id, X, known=True)) == "revived"
    assert await bench.rows("SELECT volume_id FROM job_locks") == [(second.id,)]
    (row,) = await bench.rows("SELECT volume_ids FROM jobs WHERE id = $1", dead.id)
    assert row["volume_ids"] == [second.id]


@pytest.mark.parametrize("end", ["queued", "running", "succeeded", "dead"])
async def test_a_letter_of_an_earlier_life_revives_nothing(
    bench: store_bench.Bench, end: str
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    dead = await die(bench, await bench.started(wanted))
    await revive(bench, dead, wanted)
    if end != "queued":
        (claimed,) = await bench.claim()
        if end == "succeeded":
            await bench.finish(claimed)
        elif end == "dead":
            await die(bench, claimed)
    before = await jobs.get(bench.store, dead.id)
    revival = await revive(bench, dead, wanted)
    assert (revival.outcome, revival.why) == ("stale", {"state": end})
    assert await jobs.get(bench.store, dead.id) == before


async def test_two_operators_at_once_revive_a_job_once(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    dead = await die(bench, await bench.started(wanted))
    outcomes = await asyncio.gather(*(outcome_of(bench, dead, wanted) for _ in range(5)))
    assert sorted(outcomes) == ["revived", *["stale"] * 4]


async def test_a_dry_run_finds_out_and_changes_nothing(bench: store_bench.Bench) -> None:
    volume_id = uuid.uuid4()
    wanted = need(volume_id, X)
    one = await bench.started(wanted, method="create_volume")
    await volumes.begin(bench.store, one, acceptance.NewVolume(volume_id, "v", 1, {}))
    dead = await die(bench, one)
    before = await bench.columns()
    assert await outcome_of(bench, dead, wanted, dry_run=True) == "revived"
    assert await outcome_of(bench, dead, need(volume_id, known=True), dry_run=True) == "revived"
    assert await outcome_of(bench, dead, need(uuid.uuid4(), known=True), dry_run=True) == "refused"
    assert await bench.columns() == before


async def test_however_often_it_is_replayed_a_job_keeps_its_newest_lives_only(
    bench: store_bench.Bench,
) -> None:
    wanted = need((await bench.volume()).id, X, known=True)
    dead = await die(bench, await bench.started(wanted))
    sizes = []
    for number in range(1, 31):
        assert await outcome_of(bench, dead, wanted) == "revived"
        (claimed,) = await bench.claim()
        assert claimed.history is not None
        assert (claimed.history["replays"], claimed.history["attempts"]) == (number, number)
        assert len(claimed.history["lives"]) == min(number, 10)
        sizes.append(len(str(claimed.history)))
        dead = await die(bench, claimed)
    assert sizes[9] + 4 > sizes[-1]
    assert claimed.history is not None
    ends = [life["finished_at"] for life in claimed.history["lives"]]
    assert ends == sorted(ends)


# What its volume has come to


async def test_a_job_is_refused_for_what_a_new_one_would_be(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    dead = await die(bench, await bench.started(need(volume.id, X, known=True)))
    before = await bench.columns()
    for wanted, code in (
        (need(uuid.uuid4(), X, known=True), "VolumeNotFound"),
        (need(volume.id, X), "VolumeExists"),
        (need(volume.id, X, known=True, statuses=[VolumeStatus.ERROR]), "InvalidVolumeStatus"),
    ):
        revival = await revive(bench, dead, wanted)
        assert (revival.outcome, revival.why["code"]) == ("refused", code)
    assert await bench.columns() == before


@pytest.mark.parametrize(
    "method",
    ["delete_volume", "create_volume", "extend_volume", "initialize_connection", "attach_volume"],
)
async def test_a_job_is_refused_once_a_later_one_has_changed_its_volume(
    bench: store_bench.Bench, method: str
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    dead = await die(bench, await bench.started(wanted, method="delete_volume"))
    later = await bench.started(need(volume.id, C, known=True), method=method)
    assert await outcome_of(bench, dead, wanted, dry_run=True) == "revived"
    await bench.finish(later)
    revival = await revive(bench, dead, wanted)
    assert revival.outcome is replays.Outcome.OVERTAKEN
    assert revival.why == {
        "volume_id": str(volume.id),
        "job_id": str(later.id),
        "method": method,
    }
    # What needs no volume for itself alone overwrites nothing.
    assert await outcome_of(bench, dead, need(volume.id, C, known=True)) == "revived"


async def test_what_changed_nothing_or_failed_or_came_before_does_not_stand_in_the_way(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    await bench.finish(await bench.started(wanted, method="extend_volume"))
    dead = await die(bench, await bench.started(wanted, method="delete_volume"))
    for method in ("terminate_connection", "detach_volume", "create_export"):
        await bench.finish(await bench.started(wanted, method=method))
    await die(bench, await bench.started(wanted, method="extend_volume"))
    assert await outcome_of(bench, dead, wanted) == "revived"


@pytest.mark.parametrize("is_destination", [True, False])
async def test_a_copy_changes_its_destination_alone(
    bench: store_bench.Bench, *, is_destination: bool
) -> None:
    volume, other = await bench.volume(), await bench.volume()
    dead = await die(bench, await bench.started(need(volume.id, X, known=True)))
    pair = (other.id, volume.id) if is_destination else (volume.id, other.id)
    # An id may be written in capitals.
    source, destination = (str(one).upper() for one in pair)
    args = {"source_volume_id": source, "destination_volume_id": destination}
    body = json.dumps({"method": "copy_volume_data", "version": "1.0", "args": args}).encode()
    copy = await bench.started(
        *(need(one, C, known=True) for one in pair), method="copy_volume_data", body=body
    )
    await bench.finish(copy)
    outcome = await outcome_of(bench, dead, need(volume.id, X, known=True))
    assert outcome == ("overtaken" if is_destination else "revived")


async def test_a_copy_is_told_from_others_whatever_its_body_looks_like(
    bench: store_bench.Bench,
) -> None:
    source, destination = await bench.volume(), await bench.volume()
    wanted = need(destination.id, X, known=True)
    dead = await die(bench, await bench.started(wanted))
    args = {"source_volume_id": str(source.id), "destination_volume_id": str(destination.id)}
    # The second one counts, and PostgreSQL takes the first for no text.
    body = (
        b'{"method": "copy_volume_data", "version": "1.0", "args": "\\u0000", "args": '
        + json.dumps(args).encode()
        + b"}"
    )
    request = envelope.read_body(body, len(body), HERE)
    copying = operations.OPERATIONS["copy_volume_data"]
    needs = copying.needs(uuid.uuid4(), request.args)
    await bench.finish(await bench.started(*needs, method="copy_volume_data", body=body))
    revival = await revive(bench, dead, wanted)
    assert (revival.outcome, revival.why["volume_id"]) == ("overtaken", str(destination.id))
    assert await outcome_of(bench, dead, need(source.id, X, known=True)) == "revived"


async def test_what_a_job_had_done_for_itself_does_not_stand_in_its_way(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True)
    copy = await bench.started(wanted, method="copy_volume_data")
    child = await bench.started(
        need(volume.id, C, known=True), method="initialize_connection", parent_job=copy.id
    )
    await bench.finish(child)
    dead = await die(bench, copy)
    assert await outcome_of(bench, dead, wanted) == "revived"


async def test_a_child_is_not_revived_after_its_parent_save_to_give_something_back(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, C, known=True)
    parent = await bench.started(need(volume.id, X, known=True))
    dead = []
    for method in ("initialize_connection", "terminate_connection"):
        child = await bench.started(wanted, method=method, parent_job=parent.id)
        dead.append(await die(bench, child))
    await bench.finish(parent)
    revival = await revive(bench, dead[0], wanted)
    assert (revival.outcome, revival.why) == ("orphaned", {"job_id": str(parent.id)})
    assert await outcome_of(bench, dead[1], wanted) == "revived"
    (claimed,) = await bench.claim()
    assert claimed.id == dead[1].id


# A volume that it left in an error itself


async def _failed_create(bench: store_bench.Bench) -> tuple[jobs.Job, acceptance.Need]:
    one = job(method="create_volume")
    args = requests.CreateVolume.model_validate({"volume": {"name": "v", "size_bytes": 1}})
    (wanted,) = operations.OPERATIONS["create_volume"].needs(one.id, args)
    started = await bench.started(wanted, id=one.id, method="create_volume")
    await volumes.begin(bench.store, started, acceptance.NewVolume(wanted.volume_id, "v", 1, {}))
    dead = await die(bench, started)
    assert (await volumes.get(bench.store, wanted.volume_id)).status == "error"
    return dead, wanted


async def test_a_create_goes_on_with_the_record_that_it_left_in_an_error(
    bench: store_bench.Bench,
) -> None:
    dead, wanted = await _failed_create(bench)
    before = await volumes.get(bench.store, wanted.volume_id)
    assert await outcome_of(bench, dead, wanted) == "revived"
    now = await volumes.get(bench.store, wanted.volume_id)
    assert (now.status, now.error, now.status_job) == ("creating", None, dead.id)
    assert now.seq > before.seq
    (claimed,) = await bench.claim()
    assert claimed.resumed
    made = await volumes.begin(
        bench.store, claimed, acceptance.NewVolume(wanted.volume_id, "edited", 2, {"a": "b"})
    )
    assert (made.name, made.size_bytes, made.metadata) == ("edited", 2, {"a": "b"})
    change = jobs.VolumeChange(made.id, {"status": VolumeStatus.AVAILABLE})
    await bench.finish(claimed, change=change, result=None)
    assert (await volumes.get(bench.store, made.id)).status == "available"


async def test_a_create_that_dies_again_leaves_the_error_again(bench: store_bench.Bench) -> None:
    dead, wanted = await _failed_create(bench)
    await revive(bench, dead, wanted)
    (claimed,) = await bench.claim()
    await die(bench, claimed)
    now = await volumes.get(bench.store, wanted.volume_id)
    assert (now.status, now.status_job) == ("error", None)
    assert now.error is not None


async def test_a_create_does_not_take_another_jobs_volume(bench: store_bench.Bench) -> None:
    _, wanted = await _failed_create(bench)
    other = await bench.started(need(uuid.uuid4()), method="create_volume")
    dead = await die(bench, other)
    revival = await revive(bench, dead, wanted)
    assert (revival.outcome, revival.why["code"]) == ("refused", "VolumeExists")


async def test_a_create_is_refused_after_its_volume_was_deleted(bench: store_bench.Bench) -> None:
    dead, wanted = await _failed_create(bench)
    deleting = await bench.started(need(wanted.volume_id, X, known=True), method="delete_volume")
    await bench.finish(deleting, change=jobs.VolumeChange(wanted.volume_id, drop=True))
    revival = await revive(bench, dead, wanted)
    assert (revival.outcome, revival.why["method"]) == ("overtaken", "delete_volume")


async def _failed_extend(bench: store_bench.Bench, volume: volumes.Volume) -> jobs.Job:
    one = await bench.started(need(volume.id, X, known=True), method="extend_volume")
    await volumes.take(bench.store, one, volume.id, allowed=USABLE, status=VolumeStatus.EXTENDING)
    dead = await die(bench, one)
    assert (await volumes.get(bench.store, volume.id)).status == "error_extending"
    return dead


async def test_an_extend_goes_on_with_the_volume_that_it_left_in_an_error(
    bench: store_bench.Bench,
) -> None:
    volume = await bench.volume()
    dead = await _failed_extend(bench, volume)
    wanted = need(volume.id, X, known=True, statuses=USABLE)
    assert await outcome_of(bench, dead, wanted) == "revived"
    (claimed,) = await bench.claim()
    taken = await volumes.take(
        bench.store, claimed, volume.id, allowed=USABLE, status=VolumeStatus.EXTENDING
    )
    assert taken.previous_status == "available"
    change = jobs.VolumeChange(volume.id, {"status": taken.previous_status, "size_bytes": 2048})
    await bench.finish(claimed, change=change, result=None)
    now = await volumes.get(bench.store, volume.id)
    assert (now.status, now.size_bytes, now.error) == ("available", 2048, None)


async def test_another_extend_is_refused_for_the_error(bench: store_bench.Bench) -> None:
    volume = await bench.volume()
    wanted = need(volume.id, X, known=True, statuses=USABLE)
    other = await bench.started(need(volume.id, X, known=True), method="extend_volume")
    refused = errors.InvalidVolumeStatus("it is extending")
    ended = await bench.finish(other, state=JobState.FAILED, result=None, error=refused)
    await _failed_extend(bench, volume)
    revival = await revive(bench, ended.job, wanted)
    assert (revival.outcome, revival.why["code"]) == ("refused", "InvalidVolumeStatus")


# One operator at a time


async def test_a_lock_has_one_holder_who_is_named_to_others(bench: store_bench.Bench) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()

    async def take(holder: uuid.UUID, who: str, lease: float = 60) -> replays.Holder | None:
        return await replays.take_lock(bench.store, "l", holder, who=who, lease=lease)

    assert await take(first, "anna") is None
    other = await take(second, "ben")
    assert other is not None
    assert other.who == "anna"
    assert datetime.timedelta() < other.until - datetime.datetime.now(datetime.UTC)
    # The answer to the statement may have been lost.
    assert await take(first, "anna") is None
    assert await replays.keep_lock(bench.store, "l", first, lease=60)
    await replays.drop_lock(bench.store, "l", second)
    assert await take(second, "ben") is not None
    await replays.drop_lock(bench.store, "l", first)
    assert await take(second, "ben") is None


async def test_a_lock_whose_lease_ran_out_is_anybodys(bench: store_bench.Bench) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    await replays.take_lock(bench.store, "l", first, who="anna", lease=60)
    await bench.rows("UPDATE operator_locks SET until = now() - interval '1 second'")
    assert await replays.take_lock(bench.store, "l", second, who="ben", lease=60) is None
    assert not await replays.keep_lock(bench.store, "l", first, lease=60)
