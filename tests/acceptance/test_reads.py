"""Reads: pages, filters, from everywhere; never in the way, and leaving nothing."""

import asyncio
import uuid

import aio_pika
import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, volumes, workers
from tests.services.volumes import MIB


async def test_volumes_are_listed_in_pages_by_id_of_one_address_or_of_all(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker()
    here = sorted([(await volumes.create(a.at("fast"))).id for _ in range(5)])
    there = [(await volumes.create(a.at("sim"))).id for _ in range(2)]

    async def ids(**args: object) -> list[str]:
        return [
            volume["id"]
            for volume in (await caller.call("list_volumes", a.at("fast"), args))["volumes"]
        ]

    assert await ids() == here
    assert await ids(all=False) == here
    assert await ids(all=True) == sorted(here + there)
    assert await ids(limit=2) == here[:2]
    assert await ids(limit=2, after=here[1]) == here[2:4]
    assert await ids(limit=2, after=here[3]) == here[4:]
    assert await ids(after=here[4]) == []
    assert await ids(after=None) == here
    assert await ids(limit=1000) == here
    assert await ids(status="available") == here
    assert await ids(status="error") == []
    # An id between two that are there, or that is gone, is a place to go on from too.
    between = str(uuid.UUID(int=uuid.UUID(here[2]).int + 1))
    assert await ids(after=between) == here[3:]
    page, seen = await ids(limit=3, all=True), []
    while page:
        seen += page
        page = await ids(limit=3, all=True, after=page[-1])
    assert seen == sorted(here + there)
    records = await caller.call("list_volumes", a.at("fast"))
    for record in records["volumes"]:
        assert record == await caller.call("get_volume", a.at("sim"), {"volume_id": record["id"]})


async def test_jobs_are_listed_in_pages_by_acceptance_with_filters(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker()
    sent = []
    for _ in range(3):
        one = await caller.send(
            "create_volume", a.at("fast"), {"volume": {"name": "v", "size_bytes": MIB}}
        )
        volume = volumes.adopt((await caller.result(one)).body["result"])
        sent.append(one.message_id)
    failed = await caller.send(
        "delete_volume", a.at("fast"), {"volume_id": str(uuid.UUID(int=1, version=4))}
    )
    await caller.result(failed)
    elsewhere = await caller.send("get_volume_stats", a.at("sim"), {"refresh": True})
    await caller.result(elsewhere)
    mine = [*sent, failed.message_id]

    async def ids(**args: object) -> list[str]:
        return [job["id"] for job in (await caller.call("list_jobs", a.at("fast"), args))["jobs"]]

    assert await ids() == mine
    assert await ids(all=True) == [*mine, elsewhere.message_id]
    assert await ids(state="failed") == [failed.message_id]
    assert await ids(state="succeeded") == sent
    assert await ids(state="running") == []
    assert await ids(volume_id=volume.id) == [sent[2]]
    assert await ids(limit=2) == mine[:2]
    assert await ids(limit=2, after=mine[1]) == mine[2:]
    assert await ids(after=mine[-1]) == []
    job = await caller.call("get_job", a.at("sim"), {"job_id": sent[0]})
    assert job == (await caller.call("list_jobs", a.at("fast"), {"limit": 1}))["jobs"][0]
    assert {
        "id", "method", "address", "state", "attempt", "args", "result", "error", "progress",
        "parent_job", "edited", "created_at", "started_at", "finished_at",
    } <= set(job)  # fmt: skip
    assert job["method"] == "create_volume"
    assert job["address"] == a.at("fast")
    assert job["args"] == {"volume": {"name": "v", "size_bytes": MIB}}
    assert job["edited"] is False
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]


@pytest.mark.parametrize("at", ["a", "b", "c"])
@pytest.mark.parametrize("backend", ["fast", "sim"])
async def test_a_volume_is_read_from_any_address(hosts: Hosts, at: str, backend: str) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    address = getattr(hosts, at).at(backend)
    record = await hosts.caller.call("get_volume", address, volume.at)
    assert record == await hosts.volumes.record(volume)
    listed = await hosts.caller.call("list_volumes", address, {"all": True, "limit": 1000})
    assert record in listed["volumes"]


async def test_reads_leave_no_job_and_do_not_wait_for_one(hosts: Hosts) -> None:
    source = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    destination = await hosts.volumes.create(hosts.a.at("fast"), 2 * MIB)
    await hosts.volumes.write(source, {0: b"d" * 2 * MIB})
    copy = await hosts.caller.send(
        "copy_volume_data",
        hosts.a.at("fast"),
        {**hosts.volumes.pair(source, destination), "bytes_per_second": MIB},
    )
    await asyncio.sleep(0.3)
    reads = [
        await hosts.caller.send(method, hosts.a.at("fast"), args)
        for method, args in (
            ("get_volume", destination.at),
            ("list_volumes", {}),
            ("list_jobs", {"volume_id": destination.id}),
            ("get_volume_stats", {}),
            ("get_job", {"job_id": copy.message_id}),
        )
    ]
    for read in reads:
        assert (await hosts.caller.result(read)).body["ok"]
    assert hosts.caller.results(copy) == []
    for read in reads:
        error = await hosts.caller.fails("get_job", hosts.a.at("fast"), {"job_id": read.message_id})
        assert error.code == "JobNotFound"
    assert (await hosts.caller.result(copy)).body["ok"]


async def test_a_hundred_reads_at_once_are_answered(hosts: Hosts) -> None:
    sent = [await hosts.caller.send("list_volumes", hosts.a.at("fast")) for _ in range(100)]
    for one in sent:
        assert (await hosts.caller.result(one)).body["ok"]


async def test_a_read_under_status_updates_gets_its_result(hosts: Hosts) -> None:
    sent = await hosts.caller.send(
        "list_volumes", hosts.a.at("fast"), headers={"status-updates": True}
    )
    assert (await hosts.caller.only_result(sent)).body["ok"]


async def test_answers_that_nobody_has_room_for_keep_no_request_from_being_taken(
    hosts: Hosts,
) -> None:
    at = hosts.a.at("sim")
    connection = await aio_pika.connect(hosts.installation.broker_url)
    async with connection:
        channel = await connection.channel()
        full = await channel.declare_queue(
            exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        # More than a worker takes in at a time.
        for _ in range(150):
            await hosts.caller.send(
                "get_volume", at, {"volume_id": str(uuid.uuid4())}, reply_to=full.name
            )
            await hosts.caller.send("get_volume", at, {"volume_id": "x"}, reply_to=full.name)
        page = await hosts.caller.call("list_volumes", at, {"limit": 1})
    assert "volumes" in page


async def test_reads_do_not_wait_for_reconciliations(hosts: Hosts) -> None:
    stray = hosts.a.folder / "fast" / f"volume-{uuid.uuid4()}"
    stray.write_bytes(b"x")  # Whatever is found is looked at twice.
    try:
        for _ in range(300):
            await hosts.caller.send("reconcile", hosts.a.at("fast"), reply_to=None)
        for backend in ("sim", "fast"):
            await hosts.caller.call("list_volumes", hosts.a.at(backend), {"limit": 1}, timeout=5)
        sent = await hosts.caller.send("reconcile", hosts.a.at("fast"))
        assert (await hosts.caller.result(sent)).body["ok"]
    finally:
        stray.unlink()
