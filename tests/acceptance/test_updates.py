"""What is told while work goes on: status messages, events, stats."""

import asyncio
import datetime
import time
from collections import defaultdict
from typing import Any

from tests.acceptance.conftest import Hosts
from tests.services import amqp, volumes, workers
from tests.services.volumes import MIB

UPDATES: dict[str, Any] = {"headers": {"status-updates": True}}


async def test_status_messages_come_before_one_result_at_most_twice_a_second(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 4 * MIB)
    destination = await hosts.volumes.create(hosts.b.at("fast"), 4 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 4 * MIB})
    async with hosts.caller.events("job.#") as events:
        started = time.monotonic()
        sent = await hosts.caller.send(
            "copy_volume_data",
            hosts.a.at("fast"),
            {**hosts.volumes.pair(source, destination), "bytes_per_second": 3 * MIB // 2},
            **UPDATES,
        )
        reply = await hosts.caller.only_result(sent)
        took = time.monotonic() - started
        await events.wait(f"job.{sent.message_id}.succeeded")
    assert reply.body["ok"]
    mine = [r for r in hosts.caller.replies if r.correlation_id == sent.correlation_id]
    assert mine[-1] is reply
    statuses = [status.body for status in mine[:-1]]
    assert {status.kind for status in mine[:-1]} == {"status"}
    for status in statuses:
        assert set(status) >= {"job_id", "method", "state", "attempt", "progress", "at"}
        assert status["job_id"] == sent.message_id
        assert status["method"] == "copy_volume_data"
        assert status["state"] in ("queued", "running")
        assert datetime.datetime.fromisoformat(status["at"]).tzinfo is not None
    assert statuses[0]["state"] == "running"
    assert statuses[0]["attempt"] == 1
    progress = [status["progress"] for status in statuses if status["progress"]]
    assert len(progress) >= 2
    assert len(progress) <= 2 * took + 2
    assert {one["total_bytes"] for one in progress} == {4 * MIB}
    done = [one["done_bytes"] for one in progress]
    assert done == sorted(done)
    assert all(0 <= one <= 4 * MIB for one in done)
    assert all(isinstance(one["bytes_per_second"], int) for one in progress)
    job_events = events.of(f"job.{sent.message_id}.")
    assert len(job_events) <= 2 * took + 5


async def test_without_the_header_there_is_a_result_and_nothing_else(hosts: Hosts) -> None:
    for headers in ({}, {"status-updates": False}):
        sent = await hosts.caller.send(
            "create_volume",
            hosts.a.at("fast"),
            {"volume": {"name": "v", "size_bytes": MIB}},
            headers=headers,
        )
        reply = await hosts.caller.only_result(sent)
        hosts.volumes.adopt(reply.body["result"])
        assert hosts.caller.statuses(sent) == []


async def test_a_failed_request_tells_its_updates_and_one_result(hosts: Hosts) -> None:
    args = {"volume": {"name": "v", "size_bytes": 2**60}}
    sent = await hosts.caller.send("create_volume", hosts.a.at("fast"), args, **UPDATES)
    reply = await hosts.caller.only_result(sent)
    assert reply.body["error"]["code"] == "InsufficientSpace"
    assert hosts.caller.replies[-1] is reply
    assert all(s.body["state"] in ("queued", "running") for s in hosts.caller.statuses(sent))


async def test_a_volumes_whole_life_is_told_in_order(hosts: Hosts) -> None:
    async with hosts.caller.events() as events:
        volume = await hosts.volumes.create(hosts.a.at("fast"))
        await events.wait(f"volume.{volume.id}.available")
        await hosts.volumes.attach(volume)
        await events.wait(f"volume.{volume.id}.in-use")
        events_so_far = len(events.of(f"volume.{volume.id}.available"))
        await hosts.volumes.detach(volume)
        await amqp.eventually(
            lambda: len(events.of(f"volume.{volume.id}.available")) > events_so_far
        )
        await hosts.caller.call(
            "extend_volume", volume.address, {**volume.at, "new_size_bytes": 2 * MIB}
        )
        await hosts.volumes.delete(volume)
        last = await events.wait(f"volume.{volume.id}.deleted")
        await asyncio.sleep(0.3)
    mine = events.of(f"volume.{volume.id}.")
    assert mine[-1] is last
    seqs = [event.body["seq"] for event in mine]
    assert seqs == sorted(set(seqs))
    for event in mine:
        assert set(event.body) >= {"at", "seq", "volume"}
        assert event.body["volume"]["status"] == event.status
        assert event.body["volume"]["id"] == volume.id
    order = [event.status for event in mine if event.status in ("in-use", "deleted")]
    assert order == ["in-use", "deleted"]


async def test_the_last_word_about_each_of_many_objects_is_told(hosts: Hosts) -> None:
    async with hosts.caller.events() as events:
        sent = [
            await hosts.caller.send(
                "create_volume",
                hosts.a.at("fast"),
                {"volume": {"name": "v", "size_bytes": 4096}},
            )
            for _ in range(40)
        ]
        for one in sent:
            hosts.volumes.adopt((await hosts.caller.result(one)).body["result"])
        for one in sent:
            await events.wait(f"job.{one.message_id}.succeeded")
        await asyncio.sleep(0.3)
    by_object: dict[str, list[amqp.Event]] = defaultdict(list)
    for event in events.all:
        by_object[event.key.rpartition(".")[0]].append(event)
    jobs = {name: told for name, told in by_object.items() if name.startswith("job.")}
    made = {name: told for name, told in by_object.items() if name.startswith("volume.")}
    assert len(jobs) == 40
    assert len(made) == 40
    for told in (*jobs.values(), *made.values()):
        seqs = [event.body["seq"] for event in told]
        assert seqs == sorted(set(seqs))
        assert told[-1].status in ("succeeded", "available")
    job = next(iter(jobs.values()))[-1].body["job"]
    assert job["state"] == "succeeded"
    assert job["finished_at"] is not None


async def test_reads_leave_no_events(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    async with hosts.caller.events("job.#", "volume.#") as events:
        await asyncio.sleep(0.3)
        events.all.clear()
        for method, args in (
            ("get_volume", volume.at),
            ("list_volumes", {}),
            ("list_jobs", {}),
            ("get_volume_stats", {}),
            ("validate_connector", {"connector": {"host": "x"}}),
        ):
            await hosts.caller.call(method, hosts.a.at("fast"), args)
        await asyncio.sleep(0.3)
        assert events.all == []


async def test_stats_come_at_their_interval_under_an_address_without_dots(
    start_worker: workers.Starter, caller: amqp.Caller
) -> None:
    worker = await start_worker("host.a.example", stats_interval=0.5)
    async with caller.events("backend.#") as events:
        await asyncio.sleep(3)
    told = [e for e in events.all if e.key == "backend.host_a_example@fast.stats"]
    assert 4 <= len(told) <= 8
    seqs = [event.body["seq"] for event in told]
    assert seqs == sorted(set(seqs))
    assert {event.key for event in events.all} == {
        "backend.host_a_example@fast.stats",
        "backend.host_a_example@sim.stats",
    }
    stats = told[-1].body["stats"]
    asked = await caller.call("get_volume_stats", worker.at("fast"))
    for one in (stats, asked):
        assert one["volume_backend_name"] == "fast"
        assert one["storage_protocol"] == "NBD"
        assert {"vendor_name", "driver_version", "reserved_percentage"} <= set(one)
        assert one["total_capacity_bytes"] >= one["free_capacity_bytes"] > 0
        assert abs(one["total_capacity_gb"] - one["total_capacity_bytes"] / 2**30) < 0.1
        assert abs(one["free_capacity_gb"] - one["free_capacity_bytes"] / 2**30) < 0.1
    fresh = await caller.call("get_volume_stats", worker.at("sim"), {"refresh": True})
    assert fresh["storage_protocol"] == "iSCSI"


async def test_stats_come_at_once_when_something_changes(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    worker = await start_worker("host-a", stats_interval=600)
    async with caller.events("backend.host-a@fast.stats") as events:

        def told(count: int) -> amqp.Event | None:
            found = [e for e in events.all if e.body["stats"].get("total_volumes") == count]
            return found[-1] if found else None

        volume = await volumes.create(worker.at("fast"), MIB)
        one = await amqp.eventually(lambda: told(1), timeout=10)
        await volumes.delete(volume)

        def told_none_again() -> amqp.Event | None:
            # The one before there was a volume may be among them, too.
            none = told(0)
            return none if none is not None and none.body["seq"] > one.body["seq"] else None

        none = await amqp.eventually(told_none_again, timeout=10)
    assert [one.body["stats"]["total_volumes"], none.body["stats"]["total_volumes"]] == [1, 0]
