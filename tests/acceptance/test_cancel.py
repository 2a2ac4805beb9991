"""cancel_job: jobs that wait, jobs that run, and whoever else is concerned."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, cancels, environment, holding, settled, volumes, workers
from tests.services.volumes import INITIATOR, MIB

SIZE: Final = 4 * MIB
CONNECTOR: Final = {"host": "client", "initiator": INITIATOR}
SLOW: Final = {"bytes_per_second": MIB // 4}


def _about(volume: volumes.Volume, other: volumes.Volume) -> dict[str, dict[str, Any]]:
    """Each method that needs a volume, with arguments about one."""
    return {
        "delete_volume": volume.at,
        "extend_volume": {**volume.at, "new_size_bytes": 2 * SIZE},
        "create_export": volume.at,
        "ensure_export": volume.at,
        "remove_export": volume.at,
        "initialize_connection": {**volume.at, "connector": CONNECTOR},
        "terminate_connection": {**volume.at, "connector": CONNECTOR},
        "attach_volume": {**volume.at, "mountpoint": "/dev/vdb"},
        "detach_volume": volume.at,
        "copy_volume_data": volumes.Volumes.pair(other, volume),
    }


async def _start_copy(
    caller: amqp.Caller, source: volumes.Volume, destination: volumes.Volume, at: str
) -> amqp.Sent:
    pair = volumes.Volumes.pair(source, destination)
    return await cancels.start_copy(caller, at, **pair, **SLOW)


# Jobs that wait


async def test_every_method_is_cancelled_while_it_waits_for_its_volume(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    worker = start_worker.new("host-a")
    holder = holding.Holder(worker)
    await worker.start()
    at = worker.at("fast")
    volume, other = await volumes.create(at, SIZE), await volumes.create(at, SIZE)
    async with holder.at("holding"):
        before = await caller.send("extend_volume", at, {**volume.at, "new_size_bytes": 3 * SIZE})
        await holder.held()
        for method, args in _about(volume, other).items():
            sent = await caller.send(method, at, args)
            await cancels.wait_for(caller, at, sent, state="queued")
            job = await cancels.cancel(caller, worker.at("sim"), sent)
            assert (job["attempt"], job["started_at"]) == (0, None), method
        behind = await caller.send("create_export", at, volume.at)
        assert (await cancels.state(caller, at, before))["state"] == "running"
    for sent in (before, behind):
        assert (await caller.result(sent)).body["ok"]
    record = await volumes.record(volume)
    assert (record["status"], record["size_bytes"]) == ("available", 3 * SIZE)
    await settled.wait(installation)
    assert await caller.letters() == []


async def test_every_method_is_cancelled_while_it_waits_for_a_slot(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    worker = start_worker.new("host-a", control_slots=1, data_slots=1)
    holder = holding.Holder(worker)
    await worker.start()
    at = worker.at("fast")
    source, destination = await cancels.filled_pair(volumes, at, at, SIZE)
    volume, other = await volumes.create(at, SIZE), await volumes.create(at, SIZE)
    copy = await _start_copy(caller, source, destination, at)
    new = str(uuid.uuid4())
    methods: Mapping[str, dict[str, Any]] = {
        "create_volume": {"volume": {"id": new, "name": "v", "size_bytes": SIZE}},
        "get_volume_stats": {"refresh": True},
        **_about(volume, other),
    }
    async with holder.at("holding"):
        blocker = await caller.send(
            "create_volume", at, {"volume": {"name": "first", "size_bytes": SIZE}}
        )
        await holder.held()
        for method, args in methods.items():
            sent = await caller.send(method, at, args)
            await cancels.wait_for(caller, at, sent, state="queued")
            job = await cancels.cancel(caller, at, sent)
            assert (job["attempt"], job["started_at"]) == (0, None), method
        assert (await caller.fails("get_volume", at, {"volume_id": new})).code == "VolumeNotFound"
    volumes.adopt((await caller.result(blocker)).body["result"])
    await cancels.cancel(caller, at, copy)
    await cancels.assert_free(volumes, source, destination, volume, other)
    await settled.wait(installation)
    files = {path.name for path in (worker.folder / "fast").glob("volume-*")}
    assert len(files) == 5
    assert f"volume-{new}" not in files


async def test_what_waits_behind_a_cancelled_job_goes_on_at_once(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.b.at("fast"), SIZE
    )
    copy = await _start_copy(hosts.caller, source, destination, hosts.a.at("fast"))
    waiting = [
        await hosts.caller.send(
            "extend_volume", source.address, {**source.at, "new_size_bytes": 2 * SIZE}
        ),
        await hosts.caller.send("create_export", source.address, source.at),
    ]
    await cancels.wait_for(hosts.caller, source.address, waiting[0], state="queued")
    first = await cancels.cancel(hosts.caller, hosts.c.at("fast"), waiting[0])
    assert first["attempt"] == 0
    # Not behind the extend any more, and beside the copy, which only reads.
    assert (await hosts.caller.result(waiting[1])).body["ok"]
    behind = await hosts.caller.send(
        "extend_volume", source.address, {**source.at, "new_size_bytes": 3 * SIZE}
    )
    await cancels.wait_for(hosts.caller, source.address, behind, state="queued")
    await cancels.cancel(hosts.caller, hosts.c.at("fast"), copy)
    assert (await hosts.caller.result(behind)).body["ok"]
    await hosts.caller.call("remove_export", source.address, source.at)
    await cancels.assert_free(hosts.volumes, source, destination)


# Jobs that run


@pytest.mark.parametrize("copying", ["a", "b", "c"])
async def test_a_copy_between_hosts_is_cancelled_and_both_volumes_are_as_before(
    hosts: Hosts, copying: str
) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.b.at("fast"), SIZE
    )
    await hosts.volumes.attach(source)
    at = getattr(hosts, copying).at("fast")
    copy = await _start_copy(hosts.caller, source, destination, at)
    job = await cancels.cancel(hosts.caller, hosts.b.at("sim"), copy)
    for worker in (hosts.a, hosts.b, hosts.c):
        assert worker.leftovers() == []
    assert job["progress"]["done_bytes"] < SIZE
    assert (await hosts.volumes.record(source))["status"] == "in-use"
    await hosts.volumes.detach(source)
    await cancels.assert_free(hosts.volumes, source, destination)
    await settled.wait(hosts.installation)
    # It can be done all the same.
    await hosts.volumes.copy(source, destination, at)
    assert await hosts.volumes.content(destination) == b"d" * SIZE


async def test_many_cancels_of_one_job_from_everywhere_have_one_answer(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.a.at("fast"), SIZE
    )
    copy = await _start_copy(hosts.caller, source, destination, hosts.a.at("fast"))
    cancelling = [
        await cancels.send(hosts.caller, worker.at("fast"), copy)
        for worker in (hosts.a, hosts.b, hosts.c) * 2
    ]
    records = [await cancels.check(hosts.caller, one, copy) for one in cancelling]
    assert all(record == records[0] for record in records)
    assert len(hosts.caller.results(copy)) == 1


async def test_a_cancelled_request_sent_again_gets_the_stored_error(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.a.at("fast"), SIZE
    )
    copy = await _start_copy(hosts.caller, source, destination, hosts.a.at("fast"))
    await cancels.cancel(hosts.caller, hosts.a.at("fast"), copy)
    again = await hosts.caller.send(
        "copy_volume_data",
        hosts.a.at("fast"),
        {**volumes.Volumes.pair(source, destination), **SLOW},
        message_id=copy.message_id,
    )
    body = (await hosts.caller.only_result(again)).body
    assert body["error"]["code"] == "Cancelled"
    assert (await cancels.state(hosts.caller, hosts.a.at("fast"), copy))["state"] == "cancelled"


async def test_the_events_of_a_cancelled_job_end_with_cancelled(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.a.at("fast"), SIZE
    )
    async with hosts.caller.events() as events:
        copy = await _start_copy(hosts.caller, source, destination, hosts.a.at("fast"))
        await cancels.cancel(hosts.caller, hosts.b.at("fast"), copy)
        await events.wait(f"job.{copy.message_id}.cancelled")
        await events.wait(f"volume.{destination.id}.available")
    assert events.of(f"job.{copy.message_id}.")[-1].status == "cancelled"
    assert events.of(f"volume.{destination.id}.")[-1].status == "available"


async def test_a_cancelled_cast_leaves_no_dead_letter(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.a.at("fast"), SIZE
    )
    cast: dict[str, Any] = {"reply_to": None, "correlation_id": None}
    pair = {**volumes.Volumes.pair(source, destination), **SLOW}
    running = await hosts.caller.send("copy_volume_data", hosts.a.at("fast"), pair, **cast)
    await cancels.wait_for(hosts.caller, hosts.a.at("fast"), running, state="running")
    larger = {**source.at, "new_size_bytes": 2 * SIZE}
    waiting = await hosts.caller.send("extend_volume", source.address, larger, **cast)
    await cancels.wait_for(hosts.caller, hosts.a.at("fast"), waiting, state="queued")
    for sent in (waiting, running):
        job = await hosts.caller.call("cancel_job", hosts.b.at("fast"), {"job_id": sent.message_id})
        assert job["state"] == "cancelled"
    await settled.wait(hosts.installation)
    letters = {letter.message_id for letter in await hosts.caller.letters()}
    assert not letters & {running.message_id, waiting.message_id}


# What cannot be cancelled


async def test_an_unknown_job_is_not_found(hosts: Hosts) -> None:
    error = await hosts.caller.fails(
        "cancel_job", hosts.a.at("fast"), {"job_id": str(uuid.uuid4())}
    )
    assert error.code == "JobNotFound"
    assert error.retryable is False


@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_finished_job_comes_back_unchanged(hosts: Hosts, succeeds: bool) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    args = volume.at if succeeds else {"volume_id": str(uuid.uuid4())}
    sent = await hosts.caller.send("create_export", volume.address, args)
    assert (await hosts.caller.result(sent)).body["ok"] is succeeds
    before = await cancels.state(hosts.caller, volume.address, sent)
    job = await hosts.caller.call("cancel_job", hosts.b.at("fast"), {"job_id": sent.message_id})
    assert job == before
    assert await cancels.state(hosts.caller, volume.address, sent) == before
    assert len(hosts.caller.results(sent)) == 1


async def test_a_job_cannot_cancel_itself(hosts: Hosts) -> None:
    own = str(uuid.uuid4())
    error = await hosts.caller.fails(
        "cancel_job", hosts.a.at("fast"), {"job_id": own}, message_id=own
    )
    assert error.code == "InvalidRequest"


async def test_a_cancel_is_carried_out_despite_its_deadline(hosts: Hosts) -> None:
    source, destination = await cancels.filled_pair(
        hosts.volumes, hosts.a.at("fast"), hosts.a.at("fast"), SIZE
    )
    copy = await _start_copy(hosts.caller, source, destination, hosts.a.at("fast"))
    cancelling = await hosts.caller.send(
        "cancel_job",
        hosts.a.at("fast"),
        {"job_id": copy.message_id},
        headers={"deadline": "2020-01-01T00:00:00Z"},
    )
    await cancels.check(hosts.caller, cancelling, copy)


async def test_cancels_that_cancel_each_other_end(hosts: Hosts) -> None:
    ids = [str(uuid.uuid4()) for _ in range(2)]
    both = [
        await hosts.caller.send("cancel_job", hosts.a.at("fast"), {"job_id": other}, message_id=own)
        for own, other in (ids, reversed(ids))
    ]
    for sent in both:
        body = (await hosts.caller.result(sent)).body
        assert body["ok"] or body["error"]["code"] in ("Cancelled", "JobNotFound")
    await settled.wait(hosts.installation)


# Whoever else is concerned


async def test_what_a_cancelled_copy_called_for_is_cancelled_and_what_cleans_up_is_not(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a, b = start_worker.new("host-a"), start_worker.new("host-b")
    holder = holding.Holder(b)
    for worker in (a, b):
        await worker.start()
    source, destination = await cancels.filled_pair(volumes, b.at("fast"), a.at("fast"), SIZE)
    async with holder.at("connection_recorded"):
        copy = await caller.send(
            "copy_volume_data", a.at("fast"), volumes.pair(source, destination)
        )
        await holder.held()
        await cancels.cancel(caller, a.at("fast"), copy)
    await settled.wait(installation)
    listed = await caller.call("list_jobs", b.at("fast"), {"all": True, "limit": 1000})
    children = {
        job["method"]: job["state"]
        for job in listed["jobs"]
        if job["parent_job"] == copy.message_id
    }
    assert children == {
        "initialize_connection": "cancelled",
        "terminate_connection": "succeeded",
    }
    await cancels.assert_free(volumes, source, destination)


@pytest.mark.parametrize("by", ["connector", "all"])
async def test_a_terminate_cancels_what_waits_to_make_that_connection_and_nothing_else(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes, by: str
) -> None:
    worker = start_worker.new("host-a")
    holder = holding.Holder(worker)
    await worker.start()
    at = worker.at("fast")
    volume = await volumes.create(at, SIZE)
    others = {**CONNECTOR, "host": "other"}
    async with holder.at("exported"):
        first = await caller.send("create_export", at, volume.at)
        await holder.held()
        wanted = await caller.send(
            "initialize_connection", at, {**volume.at, "connector": CONNECTOR}
        )
        other = await caller.send("initialize_connection", at, {**volume.at, "connector": others})
        named = {"connector": CONNECTOR} if by == "connector" else {"connector": None}
        ending = await caller.send(
            "terminate_connection", at, {**volume.at, **named, "force": by == "all"}
        )
        assert (await caller.result(wanted)).body["error"]["code"] == "Cancelled"
        if by == "all":
            assert (await caller.result(other)).body["error"]["code"] == "Cancelled"
        later = await caller.send("initialize_connection", at, {**volume.at, "connector": others})
        await asyncio.sleep(amqp.QUIET)
        assert not caller.results(later)
        assert not caller.results(ending)
    for sent in (first, ending, later):
        assert (await caller.result(sent)).body["ok"]
    if by == "connector":
        assert (await caller.result(other)).body["ok"]
    record = await volumes.record(volume)
    assert [one["connector_host"] for one in record["connections"]] == ["other"]
