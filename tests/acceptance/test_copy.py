"""The main job: volumes made, attached, written, copied between hosts, ended, deleted."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, cancels, volumes, workers
from tests.services import tgtd as tgtd_service
from tests.services.volumes import MIB

SIZE = 24 * MIB + 512


@pytest.mark.parametrize("backend", ["fast", "iscsi"])
@pytest.mark.parametrize("remote", [None, "src", "dest", "both"])
async def test_a_volume_is_made_attached_written_copied_disconnected_and_deleted(
    hosts: Hosts, backend: str, remote: str | None, request: pytest.FixtureRequest
) -> None:
    if backend == "iscsi":
        request.getfixturevalue("tgtd")
    source_host, destination_host, copying_host = {
        None: (hosts.a, hosts.a, hosts.a),
        "src": (hosts.a, hosts.b, hosts.b),
        "dest": (hosts.a, hosts.b, hosts.a),
        "both": (hosts.a, hosts.b, hosts.c),
    }[remote]
    source = await hosts.volumes.create(source_host.at(backend), SIZE, name="source")
    destination = await hosts.volumes.create(destination_host.at(backend), SIZE, name="dest")
    attachment = await hosts.volumes.attach(source)
    assert attachment["status"] == "attached"
    await hosts.volumes.fill(source, seed=1)
    written = await hosts.volumes.content(source)
    assert written.strip(b"\0")

    sent = await hosts.caller.send(
        "copy_volume_data",
        copying_host.at(backend),
        {**hosts.volumes.pair(source, destination), "remote": remote},
    )
    reply = await hosts.caller.only_result(sent)

    assert reply.body["ok"], reply.body
    assert reply.body["job_id"] == sent.message_id
    result = reply.body["result"]
    assert result["total_bytes"] == SIZE
    assert result["copied_bytes"] + result["zeroed_bytes"] == SIZE
    assert result["resumed_from_bytes"] == 0
    assert volumes.matches(result["digest"], written)
    assert await hosts.volumes.content(destination) == written
    # Holes are kept: a quarter of the bytes is data, in pieces.
    assert await hosts.volumes.allocated(destination) < SIZE // 2
    for volume, status in ((source, "in-use"), (destination, "available")):
        record = await hosts.volumes.record(volume)
        assert record["status"] == status
        assert record["connections"] == []
        assert record["exported"] is False

    await hosts.volumes.detach(source)
    await hosts.volumes.delete(source)
    await hosts.volumes.delete(destination)
    for worker in (hosts.a, hosts.b, hosts.c):
        assert worker.leftovers() == []
        assert not worker.nbd_serves()


@pytest.mark.parametrize("source_backend", ["fast", "iscsi"])
async def test_a_copy_goes_from_one_protocol_to_the_other(
    hosts: Hosts, tgtd: tgtd_service.Tgtd, source_backend: str
) -> None:
    other = {"fast": "iscsi", "iscsi": "fast"}[source_backend]
    source = await hosts.volumes.create(hosts.a.at(source_backend), 8 * MIB)
    destination = await hosts.volumes.create(hosts.b.at(other), 8 * MIB)
    await hosts.volumes.fill(source, seed=2)
    await hosts.volumes.copy(source, destination, hosts.c.at("fast"), remote="both")
    assert await hosts.volumes.content(destination) == await hosts.volumes.content(source)
    assert "Target " not in tgtd.targets()


@pytest.mark.parametrize("to", ["a", "b"])
async def test_old_data_is_gone_where_the_source_has_a_hole_and_stays_beyond_its_end(
    hosts: Hosts, to: str
) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    destination = await hosts.volumes.create(getattr(hosts, to).at("fast"), 6 * MIB)
    await hosts.volumes.write(source, {MIB + 100: b"new"})
    await hosts.volumes.write(destination, {0: b"\xaa" * destination.size_bytes})
    result = await hosts.volumes.copy(source, destination, hosts.a.at("fast"))
    after = await hosts.volumes.content(destination)
    assert after[: 4 * MIB] == await hosts.volumes.content(source)
    assert after[4 * MIB :] == b"\xaa" * 2 * MIB
    assert volumes.matches(result["digest"], after[: 4 * MIB])


async def test_without_verification_there_is_no_digest(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"))
    destination = await hosts.volumes.create(hosts.a.at("fast"))
    result = await hosts.volumes.copy(source, destination, hosts.a.at("fast"), verify=False)
    assert result["digest"] is None


async def test_a_smaller_destination_is_refused_before_a_byte_moves(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), MIB + 512)
    destination = await hosts.volumes.create(hosts.b.at("fast"), MIB)
    await hosts.volumes.write(source, {0: b"x" * source.size_bytes})
    error = await hosts.caller.fails(
        "copy_volume_data", hosts.a.at("fast"), hosts.volumes.pair(source, destination)
    )
    assert error.code == "InvalidRequest"
    assert await hosts.volumes.content(destination) == bytes(MIB)
    assert await hosts.volumes.status(destination) == "available"


@pytest.mark.parametrize(
    ("at", "remote"),
    [("a", "src"), ("a", "both"), ("b", "dest"), ("b", "both"), ("c", "src"), ("c", "dest")],
)
async def test_a_remote_that_contradicts_the_records_is_refused(
    hosts: Hosts, at: str, remote: str
) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"))
    destination = await hosts.volumes.create(hosts.b.at("fast"))
    error = await hosts.caller.fails(
        "copy_volume_data",
        getattr(hosts, at).at("fast"),
        {**hosts.volumes.pair(source, destination), "remote": remote},
    )
    assert error.code == "InvalidRequest"
    assert "remote" in error.message
    assert await hosts.volumes.status(destination) == "available"


async def test_a_volume_is_not_copied_onto_itself(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    error = await hosts.caller.fails(
        "copy_volume_data", hosts.a.at("fast"), hosts.volumes.pair(volume, volume)
    )
    assert error.code == "InvalidRequest"
    assert await hosts.volumes.status(volume) == "available"


@pytest.mark.parametrize("missing", ["source_volume_id", "destination_volume_id"])
async def test_a_copy_of_what_is_not_there_is_not_found(hosts: Hosts, missing: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    pair = {
        **hosts.volumes.pair(volume, volume),
        missing: "00000000-0000-4000-8000-000000000000",
    }
    error = await hosts.caller.fails("copy_volume_data", hosts.a.at("fast"), pair)
    assert error.code == "VolumeNotFound"
    assert await hosts.volumes.status(volume) == "available"


async def test_a_destination_with_a_connection_or_an_attachment_is_busy(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"))
    destination = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.volumes.connect(destination)
    pair = hosts.volumes.pair(source, destination)
    error = await hosts.caller.fails("copy_volume_data", hosts.a.at("fast"), pair)
    assert error.code == "VolumeIsBusy"
    await hosts.volumes.disconnect_all(destination)
    await hosts.volumes.attach(destination)
    error = await hosts.caller.fails("copy_volume_data", hosts.a.at("fast"), pair)
    assert error.code in ("VolumeIsBusy", "InvalidVolumeStatus")
    assert await hosts.volumes.status(destination) == "in-use"


async def test_the_destination_shows_maintenance_and_the_events_come_in_order(
    hosts: Hosts,
) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    destination = await hosts.volumes.create(hosts.b.at("fast"), 4 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 4 * MIB})
    async with hosts.caller.events() as events:
        sent = await hosts.caller.send(
            "copy_volume_data",
            hosts.a.at("fast"),
            {**hosts.volumes.pair(source, destination), "bytes_per_second": 3 * MIB},
        )
        await events.wait(f"volume.{destination.id}.maintenance")
        assert await hosts.volumes.status(destination) == "maintenance"
        assert await hosts.volumes.status(source) == "available"
        for method in ("delete_volume", "create_export"):
            error = await hosts.caller.fails(method, destination.address, destination.at)
            assert error.code in ("InvalidVolumeStatus", "VolumeIsBusy")
        assert (await hosts.caller.result(sent)).body["ok"]
        await events.wait(f"job.{sent.message_id}.succeeded")
        await events.wait(f"volume.{destination.id}.available")
    seen = events.of(f"volume.{destination.id}.")
    assert [event.status for event in seen if event.status == "maintenance"]
    assert seen[-1].status == "available"
    assert {event.status for event in seen} <= {"maintenance", "available"}
    for prefix in (f"volume.{destination.id}.", f"volume.{source.id}.", f"job.{sent.message_id}."):
        seqs = [event.body["seq"] for event in events.of(prefix)]
        assert seqs == sorted(set(seqs))
    states = [event.status for event in events.of(f"job.{sent.message_id}.")]
    assert states[-1] == "succeeded"
    assert set(states) <= {"queued", "running", "succeeded"}


async def test_a_failed_copy_leaves_both_volumes_as_they_were(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("sim"), MIB)
    destination = await hosts.volumes.create(hosts.b.at("fast"), MIB)
    await hosts.volumes.write(destination, {5: b"kept"})
    # Nobody listens where sim says that it serves.
    sent = await hosts.caller.send(
        "copy_volume_data", hosts.b.at("fast"), hosts.volumes.pair(source, destination)
    )
    reply = await hosts.caller.only_result(sent, timeout=60)
    assert not reply.body["ok"]
    job = await hosts.caller.call("get_job", hosts.a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] in ("failed", "dead")
    for volume in (source, destination):
        record = await hosts.volumes.record(volume)
        assert record["status"] == "available"
        assert record["connections"] == []
        assert record["exported"] is False
    assert (await hosts.volumes.content(destination))[5:9] == b"kept"


async def test_connects_and_attaches_share_the_source_with_copies(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    first = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    second = await hosts.volumes.create(hosts.b.at("fast"), 4 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 4 * MIB})
    copies = [
        await hosts.caller.send(
            "copy_volume_data",
            hosts.a.at("fast"),
            {**hosts.volumes.pair(source, destination), "bytes_per_second": 2 * MIB},
        )
        for destination in (first, second)
    ]
    info = await hosts.volumes.connect(source)
    await hosts.volumes.attach(source)
    await hosts.volumes.detach(source)
    await hosts.volumes.disconnect(source, info["connection_id"])
    extended = await hosts.caller.send(
        "extend_volume", source.address, {**source.at, "new_size_bytes": 5 * MIB}
    )
    assert not any(hosts.caller.results(copy) for copy in copies)
    for copy in copies:
        assert (await hosts.caller.only_result(copy)).body["ok"]
    reply = await hosts.caller.result(extended)
    assert reply.body["ok"]
    orders = [hosts.caller.replies.index(hosts.caller.results(copy)[0]) for copy in copies]
    assert hosts.caller.replies.index(reply) > max(orders)


async def test_two_hosts_copy_to_each_other_with_every_data_slot_taken(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", data_slots=1)
    b = await start_worker("host-b", data_slots=1)
    made = [await volumes.create(worker.at("fast"), 4 * MIB) for worker in (a, b) for _ in range(2)]
    a_from, a_to, b_from, b_to = made
    for volume in (a_from, b_from):
        await volumes.fill(volume, seed=3)
    pace = {"bytes_per_second": MIB}
    both = [
        await caller.send("copy_volume_data", at, {**volumes.pair(*pair), "remote": "dest", **pace})
        for at, pair in ((a.at("fast"), (a_from, b_to)), (b.at("fast"), (b_from, a_to)))
    ]
    for sent in both:
        assert (await caller.only_result(sent)).body["ok"]
    assert await volumes.content(b_to) == await volumes.content(a_from)
    assert await volumes.content(a_to) == await volumes.content(b_from)

    # Two copies queued on one slot: one after the other, and short work beside them.
    started = time.monotonic()
    queued = [
        await caller.send("copy_volume_data", a.at("fast"), {**volumes.pair(*pair), **pace})
        for pair in ((a_from, a_to), (b_from, b_to))
    ]
    await volumes.delete(await volumes.create(a.at("fast")))
    assert not any(caller.results(sent) for sent in queued)
    for sent in queued:
        assert (await caller.only_result(sent)).body["ok"]
    assert time.monotonic() - started < 30
    jobs = [await caller.call("get_job", a.at("fast"), {"job_id": s.message_id}) for s in queued]
    assert jobs[0]["finished_at"] <= jobs[1]["started_at"]


async def test_a_throttled_copy_keeps_to_its_rate(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    destination = await hosts.volumes.create(hosts.b.at("fast"), 4 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 4 * MIB})
    result = await hosts.volumes.copy(
        source, destination, hosts.a.at("fast"), bytes_per_second=2 * MIB
    )
    assert result["copied_bytes"] == 4 * MIB
    assert 1.2 < result["seconds"] < 8


async def test_calls_for_a_running_job_pass_its_locks_and_no_others(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    destination = await hosts.volumes.create(hosts.b.at("fast"), 4 * MIB)
    other = await hosts.volumes.create(hosts.b.at("fast"), MIB)
    await hosts.volumes.write(source, {0: b"d" * 4 * MIB})
    async with hosts.caller.events() as events:
        copy = await hosts.caller.send(
            "copy_volume_data",
            hosts.a.at("fast"),
            {**hosts.volumes.pair(source, destination), "bytes_per_second": 2 * MIB},
        )
        await events.wait(f"volume.{destination.id}.maintenance")
        parent: dict[str, Any] = {"headers": {"parent-job": copy.message_id}}
        connector = {"connector": {"host": "x", "connection_key": "nested"}}
        info = await hosts.caller.call(
            "initialize_connection", destination.address, {**destination.at, **connector}, **parent
        )
        await hosts.caller.call(
            "terminate_connection",
            destination.address,
            {**destination.at, "connection_id": info["connection_id"]},
            **parent,
        )
        assert not hosts.caller.results(copy)
        error = await hosts.caller.fails(
            "initialize_connection", other.address, {**other.at, **connector}, **parent
        )
        assert error.code == "InvalidRequest"
        error = await hosts.caller.fails("create_export", source.address, source.at, **parent)
        assert error.code == "InvalidRequest"
        assert (await hosts.caller.result(copy)).body["ok"]
    error = await hosts.caller.fails(
        "initialize_connection", destination.address, {**destination.at, **connector}, **parent
    )
    assert error.code == "InvalidRequest"
    assert (await hosts.volumes.record(destination))["connections"] == []


async def test_a_copy_between_two_backends_of_one_host_needs_no_remote(
    hosts: Hosts, tgtd: tgtd_service.Tgtd
) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("iscsi"), 2 * MIB)
    await hosts.volumes.fill(source, seed=4)
    await asyncio.gather(
        hosts.volumes.copy(source, destination, hosts.a.at("fast"), remote=None),
        hosts.volumes.status(source),
    )
    assert await hosts.volumes.content(destination) == await hosts.volumes.content(source)
    assert json.dumps(await hosts.volumes.record(destination)).count("maintenance") == 0
    assert "Target " not in tgtd.targets()


async def test_a_copy_whose_worker_was_killed_goes_on_from_where_it_came(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    size, rate = 1024 * MIB, 160 * MIB
    worker = await start_worker("host-a", lease=3)
    at = worker.at("fast")
    source, destination = await cancels.filled_pair(volumes, at, at, size)
    pair = {**volumes.pair(source, destination), "bytes_per_second": rate}
    copy = await cancels.start_copy(caller, at, **pair)
    await cancels.wait_until(
        caller, at, copy, lambda job: (job["progress"] or {}).get("done_bytes", 0) >= size * 0.5
    )
    await worker.kill()
    await worker.start()
    result = (await caller.result(copy, timeout=60)).body["result"]
    assert result["resumed_from_bytes"] >= size * 0.45
    assert (
        result["copied_bytes"] + result["zeroed_bytes"] + result["resumed_from_bytes"]
        == result["total_bytes"]
        == size
    )
    job = await caller.call("get_job", at, {"job_id": copy.message_id})
    assert job["attempt"] == 2
    assert await volumes.content(destination) == b"d" * size
