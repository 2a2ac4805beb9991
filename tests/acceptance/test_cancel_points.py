"""cancel_job at every stage of every method: the job stands still there while it is cancelled."""

import functools
import os
import pathlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pytest

from tests.faults import cases, points, world
from tests.faults.points import At, Point
from tests.services import amqp, environment, holding, settled, tgtd, workers

SAMPLE: Final = os.environ.get("CANCEL_SAMPLE", "16")
"""How many combinations are tried, or ``all``."""
SEED: Final = os.environ.get("CANCEL_SEED", "1")
PATIENCE: Final = 1.5
"""Seconds that a job is held after the cancel; where nothing can interrupt it, it goes on then."""


class Combination(NamedTuple):
    """A case and where its job stands when it is cancelled."""

    case: cases.Case
    at: At

    def __str__(self) -> str:
        return f"{self.case.name}-{self.at}"


def _combinations() -> list[Combination]:
    """Where a job can stand; all of them, or as many as a sample has room for."""
    before_or_after = {Point.REQUEUED, Point.CLAIMED, *cases.COMMON}
    every = [
        Combination(case, at)
        for case in cases.CASES
        for at in case.reaches
        if at.point not in before_or_after
    ]
    if SAMPLE == "all":
        return every
    return sorted(random.Random(SEED).sample(every, min(int(SAMPLE), len(every))), key=str)


class Hosts(NamedTuple):
    """The workers, and what makes them stand still."""

    site: environment.Installation
    start: workers.Starter
    daemon: tgtd.Tgtd | None
    workers: Mapping[str, workers.Worker]
    holders: Mapping[str, holding.Holder]


@pytest.fixture(scope="module")
def holding_hosts(
    databases: environment.Databases,
    machine_tgtd: tgtd.Tgtd | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Hosts]:
    """The workers host-a and host-b."""
    backends: dict[str, Mapping[str, Any]] = {"fast": workers.FAST, "sim": workers.SIM}
    env: Mapping[str, str] = {}
    if machine_tgtd is not None:
        backends["iscsi"], env = workers.iscsi(machine_tgtd), machine_tgtd.env
    with (
        databases.installation() as site,
        workers.starter(site, tmp_path_factory.mktemp("holding")) as start,
    ):
        made = {
            host: start.new(host, backends=backends, env=env, stats_interval=1.0)
            for host in ("host-a", "host-b")
        }
        holders = {host: holding.Holder(worker) for host, worker in made.items()}
        for worker in made.values():
            worker.spawn()
        for worker in made.values():
            worker.wait_until_ready()
        yield Hosts(site, start, machine_tgtd, made, holders)


@pytest.fixture
async def made(holding_hosts: Hosts, tmp_path: pathlib.Path) -> AsyncIterator[world.World]:
    """The workers as one test sees them; nothing is left in the end."""
    site, start, daemon, hosts, holders = holding_hosts
    async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
        one = world.World(site, start, caller, tmp_path, daemon)
        one.hosts = dict(hosts)
        yield one
        for holder in holders.values():
            holder.release()
        await one.volumes.clean()
    for worker in hosts.values():
        await amqp.eventually(functools.partial(_has_no_child, worker), what="no child process")
        for backend in ("fast", "iscsi"):
            folder = worker.folder / backend
            assert not folder.exists() or not list(folder.glob("volume-*"))
    assert daemon is None or "Target " not in daemon.targets()


@pytest.mark.parametrize("combination", _combinations(), ids=str)
async def test_a_job_is_cancelled_wherever_it_stands(
    combination: Combination, made: world.World, holding_hosts: Hosts
) -> None:
    case, at = combination
    if case.scene.needs_tgtd and made.daemon is None:
        pytest.skip("there is no tgtd")
    holder = holding_hosts.holders[case.scene.dies]
    request = await case.prepare(made, f"host-a@{case.scene.backend}")
    before = await _records(made)
    async with holder.at(at):
        sent = await made.send(case.method, request)
        await holder.held()
        cancelling = await made.caller.send(
            "cancel_job", "host-b@fast", {"job_id": sent.message_id}
        )
        reply = await _answer(made.caller, cancelling)
        if reply is None:
            holder.release()
        reply = await made.caller.result(cancelling)
        _assert_nothing_works_on(made)
    assert reply.body["ok"], reply.body
    job = reply.body["result"]
    assert (job["id"], job["state"]) == (sent.message_id, "cancelled")
    assert job["error"]["code"] == "Cancelled"
    assert (await made.caller.only_result(sent)).body["error"]["code"] == "Cancelled"
    await settled.wait(made.site)
    after = await _records(made)
    assert after == _expected(combination, request, before, after)
    _assert_sizes(made, after)


def _has_no_child(worker: workers.Worker) -> bool:
    return not worker.leftovers()


async def _answer(caller: amqp.Caller, sent: amqp.Sent) -> amqp.Reply | None:
    try:
        return await caller.result(sent, timeout=PATIENCE)
    except AssertionError:
        return None


async def _records(made: world.World) -> dict[str, dict[str, Any]]:
    """What must not change of any volume, by its id."""
    listed = await made.caller.call("list_volumes", "host-a@fast", {"all": True, "limit": 1000})
    return {
        record["id"]: {
            "status": record["status"],
            "attach_status": record["attach_status"],
            "exported": record["exported"],
            "size_bytes": record["size_bytes"],
            "address": record["address"],
            "connections": [one["id"] for one in record["connections"]],
            "attachments": [one["id"] for one in record["attachments"]],
        }
        for record in listed["volumes"]
    }


def _expected(
    combination: Combination,
    request: world.Request,
    before: Mapping[str, dict[str, Any]],
    after: Mapping[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """As before, but for what nothing brings back."""
    (case, at), (subject, *_) = combination, request.expected
    changed: dict[str, Any] = {}
    match case.method:
        case "delete_volume" if at.point is Point.DRIVER_DONE:
            # Nobody knows what is left of its data, and its export was removed before.
            changed = {"status": "error_deleting", "exported": False}
        case "extend_volume" if at.point is not Point.HOLDING and case.scene.backend != "sim":
            # Nothing shrinks a volume; one that is only simulated never grew.
            changed = {"size_bytes": subject.size_bytes}
        case "detach_volume" if at.point is Point.ATTACHMENT_ENDED:
            changed = {"status": "available", "attach_status": "detached", "attachments": []}
        case "terminate_connection":
            # Once begun it is carried to its end, by a job of its own.
            changed = {"connections": [], "exported": False}
    if not changed:
        return dict(before)
    assert subject.id is not None
    return {**before, subject.id: {**before[subject.id], **changed}}


def _assert_nothing_works_on(made: world.World) -> None:
    """When the answer comes, no process works for a job any more."""
    for worker in made.hosts.values():
        assert [one for one in worker.leftovers() if "nbd-server" not in one.command] == []


def _assert_sizes(made: world.World, records: Mapping[str, dict[str, Any]]) -> None:
    """Each record's size is that of its file, and no file is without a record."""
    for host, worker in made.hosts.items():
        for backend in ("fast", "iscsi"):
            folder = worker.folder / backend
            found = {path.name: path.stat().st_size for path in folder.glob("volume-*")}
            wanted = {
                f"volume-{volume_id}": record["size_bytes"]
                for volume_id, record in records.items()
                if record["address"] == f"{host}@{backend}" and record["status"] != "error_deleting"
            }
            assert found == wanted


def test_every_point_of_a_job_can_be_held() -> None:
    assert set(points.PLACES) == set(Point)
