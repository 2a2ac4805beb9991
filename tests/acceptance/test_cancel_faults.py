"""cancel_job where something is broken: tools that fail or hang, hosts and workers that are gone.

Whatever breaks, the job ends cancelled, and nothing of it stays.
"""

import asyncio
import contextlib
import os
import pathlib
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from tests.services import (
    amqp,
    cancels,
    children,
    clock,
    environment,
    holding,
    settled,
    tgtd,
    tools,
    volumes,
    workers,
)
from tests.services.volumes import INITIATOR, MIB
from worker import children as worker_children
from worker import process

SIZE: Final = 4 * MIB
CONNECTOR: Final = {"host": "client", "initiator": INITIATOR}
SLOW: Final = {"bytes_per_second": MIB // 4}
LONG: Final = 60.0
"""Seconds by which the clock is moved: longer than a lease."""


# Tools


class _Iscsi:
    """A worker with a backend on tgtd, and a tgtadm that does as it is told."""

    def __init__(self, worker: workers.Worker, tool: tools.Tool) -> None:
        self.worker = worker
        self.tool = tool
        self.at = worker.at("iscsi")

    def helpers(self) -> list[children.Found]:
        """The processes of tgtadm and of what stands before it."""
        return [one for one in self.worker.leftovers() if "nbd-server" not in one.command]


@pytest.fixture
async def iscsi(
    start_worker: workers.Starter, tgtd: tgtd.Tgtd, tmp_path: pathlib.Path
) -> AsyncIterator[_Iscsi]:
    """The worker host-a; all that it told tgtd to make is gone in the end."""
    tool = tools.Tool("tgtadm", tmp_path)
    worker = await start_worker(
        "host-a",
        backends={"iscsi": workers.iscsi(tgtd), "fast": workers.FAST},
        env={**tgtd.env, **tool.env},
        stats_interval=1.0,
    )
    yield _Iscsi(worker, tool)
    tool.mend()


async def test_every_method_is_cancelled_while_it_waits_to_be_tried_again(
    iscsi: _Iscsi,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tgtd: tgtd.Tgtd,
) -> None:
    at = iscsi.at
    plain, exported, doomed, connected = [await volumes.create(at, SIZE) for _ in range(4)]
    elsewhere = await volumes.create(iscsi.worker.at("fast"), SIZE)
    for one in (exported, doomed):
        await caller.call("create_export", at, one.at)
    await volumes.connect(connected)
    kept = (plain, exported, doomed, elsewhere)
    before = [await _state(volumes, one) for one in kept]
    for method, args in (
        ("create_export", plain.at),
        ("ensure_export", plain.at),
        ("initialize_connection", {**plain.at, "connector": CONNECTOR}),
    ):
        iscsi.tool.fail("*new*target*")
        sent = await caller.send(method, at, args)
        await _failed_once(caller, at, sent)
        job = await cancels.cancel(caller, iscsi.worker.at("fast"), sent)
        iscsi.tool.mend()
        assert job["started_at"] is not None, method
        assert [await _state(volumes, one) for one in kept] == before, method

    # All at once: a target that does not go is asked for some seconds.
    file = iscsi.worker.folder / "iscsi" / f"volume-{plain.id}"
    file.rename(file.with_name("away"))
    iscsi.tool.fail("*delete*target*")
    ending = [
        await caller.send(method, at, args)
        for method, args in (
            ("copy_volume_data", volumes.pair(plain, elsewhere)),
            ("remove_export", exported.at),
            ("delete_volume", doomed.at),
            ("terminate_connection", {**connected.at, "connector": CONNECTOR}),
        )
    ]
    for sent in ending:
        await _failed_once(caller, at, sent)
        await cancels.cancel(caller, iscsi.worker.at("fast"), sent)
    file.with_name("away").rename(file)
    iscsi.tool.mend()
    assert [await _state(volumes, one) for one in kept] == before
    # What ends a connection is carried to its end all the same.
    await settled.wait(installation)
    await cancels.assert_free(volumes, connected)
    await volumes.clean()
    assert "Target " not in tgtd.targets()


async def _failed_once(caller: amqp.Caller, at: str, sent: amqp.Sent) -> None:
    """Waits until an attempt has failed, and another one is to come."""
    await cancels.wait_until(caller, at, sent, lambda job: job["error"] is not None)


async def _state(made: volumes.Volumes, volume: volumes.Volume) -> tuple[Any, ...]:
    record = await made.record(volume)
    return record["status"], record["exported"], record["connections"]


@pytest.mark.parametrize("method", ["create_export", "initialize_connection"])
async def test_a_tool_that_hangs_is_killed_with_its_children_before_the_answer(
    iscsi: _Iscsi,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tgtd: tgtd.Tgtd,
    method: str,
) -> None:
    volume = await volumes.create(iscsi.at, SIZE)
    iscsi.tool.hang("*new*target*")
    args = volume.at if method == "create_export" else {**volume.at, "connector": CONNECTOR}
    sent = await caller.send(method, iscsi.at, args)
    await amqp.eventually(lambda: iscsi.tool.hits() and len(iscsi.helpers()) >= 2)
    iscsi.tool.mend()
    cancelling = await cancels.send(caller, iscsi.worker.at("fast"), sent)
    await caller.result(cancelling)
    assert iscsi.helpers() == []
    await cancels.check(caller, cancelling, sent)
    await cancels.assert_free(volumes, volume)
    await settled.wait(installation)
    assert "Target " not in tgtd.targets()


async def test_a_connection_is_cancelled_while_its_daemon_stands_still(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    worker = await start_worker("host-a")
    at = worker.at("fast")
    kept, volume = await volumes.create(at), await volumes.create(at)
    await volumes.connect(kept)
    (daemon,) = [one for one in worker.leftovers() if f"port={worker.nbd_port}" in one.command]
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        args = {**volume.at, "connector": CONNECTOR}
        sent = await caller.send("initialize_connection", at, args)
        await cancels.wait_for(caller, at, sent, state="running")
        cancelling = await cancels.send(caller, at, sent)
        await asyncio.sleep(1)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    await cancels.check(caller, cancelling, sent)
    await settled.wait(installation)
    await cancels.assert_free(volumes, volume)
    assert len((await volumes.record(kept))["connections"]) == 1


# Hosts that are gone


async def test_a_copy_that_waits_for_the_other_hosts_worker_is_cancelled(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a, b = await start_worker("host-a"), await start_worker("host-b")
    source, destination = await cancels.filled_pair(volumes, b.at("fast"), a.at("fast"), SIZE)
    await b.terminate()
    async with caller.events(f"volume.{destination.id}.*") as events:
        copy = await caller.send(
            "copy_volume_data", a.at("fast"), volumes.pair(source, destination)
        )
        await events.wait(f"volume.{destination.id}.maintenance")
    cancelling = await cancels.send(caller, a.at("sim"), copy)
    await asyncio.sleep(1)
    await b.start()
    await cancels.check(caller, cancelling, copy)
    await cancels.assert_free(volumes, source, destination)
    await settled.wait(installation)
    for worker in (a, b):
        assert worker.leftovers() == []
        assert not worker.nbd_serves()


async def test_what_waits_at_a_host_without_a_worker_is_cancelled_at_once_by_another(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a, b = await start_worker("host-a", data_slots=1, lease=3), await start_worker("host-b")
    source, destination = await cancels.filled_pair(volumes, a.at("fast"), a.at("fast"), SIZE)
    other = await volumes.create(a.at("fast"), SIZE)
    running = await cancels.start_copy(
        caller, a.at("fast"), **volumes.pair(source, destination), **SLOW
    )
    waiting = await caller.send("copy_volume_data", a.at("fast"), volumes.pair(source, other))
    await cancels.wait_for(caller, a.at("fast"), waiting, state="queued")
    await a.kill()
    await cancels.cancel(caller, b.at("fast"), waiting)
    # The one that ran is undone where it ran, by whoever comes next there.
    cancelling = await cancels.send(caller, b.at("fast"), running)
    await asyncio.sleep(amqp.QUIET)
    assert not caller.results(cancelling)
    await a.start()
    await cancels.check(caller, cancelling, running)
    await cancels.assert_free(volumes, source, destination, other)
    await settled.wait(installation)
    assert a.leftovers() == []


@pytest.mark.parametrize("point", ["connection_ending", "connection_cut", "finishing"])
async def test_a_worker_that_dies_while_it_undoes_leaves_the_job_to_be_cancelled(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    point: str,
) -> None:
    a = start_worker.new("host-a", lease=3)
    holder = holding.Holder(a)
    b = await start_worker("host-b")
    await a.start()
    volume = await volumes.create(a.at("fast"), SIZE)
    holder.set("connection_live", point)
    args = {**volume.at, "connector": CONNECTOR}
    sent = await caller.send("initialize_connection", a.at("fast"), args)
    await holder.held("connection_live")
    cancelling = await cancels.send(caller, b.at("fast"), sent)
    await holder.held(point)
    await a.kill()
    holder.release()
    await clock.advance(installation, LONG, host="host-a")
    await a.start()
    await cancels.check(caller, cancelling, sent)
    await cancels.assert_free(volumes, volume)
    await settled.wait(installation)
    assert a.leftovers() == []


async def test_a_cancel_whose_own_worker_dies_is_answered_by_the_next(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a = start_worker.new("host-a")
    holder = holding.Holder(a)
    await a.start()
    b = await start_worker("host-b", lease=3)
    volume = await volumes.create(a.at("fast"), SIZE)
    async with holder.at("half_made"):
        args = {**volume.at, "new_size_bytes": 2 * SIZE}
        sent = await caller.send("extend_volume", a.at("fast"), args)
        await holder.held()
        cancelling = await cancels.send(caller, b.at("fast"), sent)
        await cancels.wait_for(caller, a.at("fast"), cancelling, state="running")
        await asyncio.sleep(amqp.QUIET)
        await b.kill()
        await clock.advance(installation, LONG, host="host-b")
        await b.start()
    await cancels.check(caller, cancelling, sent)
    assert (await volumes.record(volume))["size_bytes"] == 2 * SIZE


async def test_whoever_takes_a_job_over_ends_what_its_last_worker_had_working_for_it(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a = await start_worker("host-a", lease=3)
    source, destination = await cancels.filled_pair(volumes, a.at("fast"), a.at("fast"), SIZE)
    copy = await cancels.start_copy(
        caller, a.at("fast"), **volumes.pair(source, destination), **SLOW
    )
    [(recorded,)] = await installation.rows(
        "SELECT children::text FROM jobs WHERE id = $1::text::uuid", copy.message_id
    )
    assert '"pid"' in recorded
    await a.kill()
    with _stranger() as (works_on, other):
        # One that outlived its worker, which the kernel sees to as a rule; and one whose pid is
        # that of a process from before.
        await installation.rows(
            "UPDATE jobs SET children = jsonb_build_array("
            " jsonb_build_object('pid', $2::int, 'started', $3::bigint, 'boot', $5::text),"
            " jsonb_build_object('pid', $4::int, 'started', 1, 'boot', $5::text))"
            " WHERE id = $1::text::uuid",
            copy.message_id,
            works_on.pid,
            process.start_time(works_on.pid),
            other.pid,
            worker_children.boot_id(),
        )
        await clock.advance(installation, LONG, host="host-a")
        await a.start()
        await cancels.cancel(caller, a.at("fast"), copy)
        assert works_on.poll() == -signal.SIGTERM
        assert other.poll() is None
    await cancels.assert_free(volumes, source, destination)


@contextlib.contextmanager
def _stranger() -> Any:
    both = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        yield both
    finally:
        for one in both:
            one.kill()
            one.wait()


# Many at once


@pytest.mark.parametrize("seed", [1])
async def test_a_storm_of_cancels_leaves_nothing_behind(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    seed: int,
) -> None:
    dice = random.Random(int(os.environ.get("CANCEL_SEED", seed)))
    hosts = [await start_worker(host, stats_interval=1.0) for host in ("host-a", "host-b")]
    made = [await volumes.create(host.at("fast"), MIB) for host in hosts for _ in range(5)]
    sent: list[amqp.Sent] = []
    storm: list[amqp.Sent] = []
    for _ in range(50):
        sent.append(await _anything(dice, caller, made))
        for _ in range(4):
            await asyncio.sleep(dice.random() * 0.02)
            target, at = dice.choice(sent), dice.choice(hosts).at("fast")
            storm.append(await cancels.send(caller, at, target))
    for one in storm:
        body = (await caller.result(one, timeout=60)).body
        # One may come before the job that it means has been stored.
        assert body["ok"] or body["error"]["code"] == "JobNotFound", body
        if body["ok"]:
            assert body["result"]["finished_at"] is not None
    for one in sent:
        await caller.result(one, timeout=60)
    await settled.wait(installation)
    for host in hosts:
        listed = await caller.call("list_volumes", host.at("fast"), {"limit": 1000})
        files = {path.name for path in (host.folder / "fast").glob("volume-*")}
        alive = [one for one in listed["volumes"] if one["status"] != "error_deleting"]
        assert {f"volume-{one['id']}" for one in alive} <= files
        for one in listed["volumes"]:
            assert one["status"] in ("available", "in-use", "error_deleting")
            assert (one["status"] == "in-use") is bool(one["attachments"])
            volumes.adopt(one)
        assert files <= {f"volume-{one['id']}" for one in listed["volumes"]}
        working = [one for one in host.leftovers() if "nbd-server" not in one.command]
        assert working == []
    await volumes.clean()
    for host in hosts:
        assert host.leftovers() == []
    assert await caller.letters() == []


async def _anything(
    dice: random.Random, caller: amqp.Caller, made: list[volumes.Volume]
) -> amqp.Sent:
    """Sends a request of some method about some volume."""
    volume, other = dice.sample(made, 2)
    connector = {**CONNECTOR, "connection_key": str(dice.randrange(3))}
    choices: list[tuple[str, dict[str, Any]]] = [
        ("create_volume", {"volume": {"name": "v", "size_bytes": MIB}}),
        ("delete_volume", volume.at),
        ("extend_volume", {**volume.at, "new_size_bytes": volume.size_bytes * 2}),
        ("create_export", volume.at),
        ("remove_export", volume.at),
        ("initialize_connection", {**volume.at, "connector": connector}),
        ("terminate_connection", {**volume.at, "connector": connector}),
        ("attach_volume", {**volume.at, "mountpoint": "/dev/vdb"}),
        ("detach_volume", volume.at),
        ("copy_volume_data", {**volumes.Volumes.pair(other, volume), **SLOW}),
        ("copy_volume_data", {**volumes.Volumes.pair(other, volume), **SLOW}),
    ]
    method, args = dice.choice(choices)
    return await caller.send(method, volume.address, args)
