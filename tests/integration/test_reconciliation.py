"""Reconciliation by a worker: what nobody owns is found and removed, and nothing else."""

import asyncio
import pathlib
import uuid

import pytest

from tests.services import (
    amqp,
    clients,
    environment,
    nbd_clients,
    reconciling,
    tgtd,
    workers,
)
from tests.services import volumes as volumes_service
from tests.services.volumes import MIB

PREFIX = "iqn.2010-10.org.openstack:volume-"
STRANGER = "iqn.1993-08.org.debian:01:stranger"


@pytest.fixture
async def worker(start_worker: workers.Starter) -> workers.Worker:
    """A worker that mends nothing by itself."""
    return await start_worker(backends={"fast": workers.FAST}, reconcile_interval=reconciling.NEVER)


async def test_a_host_at_work_has_nothing_wrong(
    worker: workers.Worker, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    volume = await volumes.create(worker.at("fast"))
    await volumes.connect(volume)
    await volumes.connect(volume, connection_key="reader", mode="ro")
    await volumes.attach(volume)
    await caller.call("create_export", volume.address, (await volumes.create(volume.address)).at)
    assert (await reconciling.ask(caller, volume.address)).findings == []


async def test_an_nbd_export_that_nobody_owns_goes_and_its_neighbour_stays(
    worker: workers.Worker,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
    tmp_path: pathlib.Path,
) -> None:
    (_, kept), (volume, lost) = await reconciling.pair(volumes, worker.at("fast"))
    # An export that stays without a connection: nobody else sweeps it up meanwhile.
    await caller.call("create_export", volume.address, volume.at)
    async with clients.session(kept, tmp_path) as neighbour:
        await reconciling.forget(installation, lost["connection_id"])
        answer = await reconciling.ask(caller, worker.at("fast"))
        assert answer.code == 1
        found = {one["subject"]: one for one in answer.of("unowned_export")}
        one = found[f"rw-{lost['connection_id']}"]
        assert (one["address"], one["volume_id"]) == (volume.address, volume.id)
        assert one["action"]
        assert one["repaired"] is None
        assert lost["data"]["export"] in await nbd_clients.names(lost["data"]["uri"])
        await reconciling.mend(caller, worker.at("fast"))
        assert await nbd_clients.names(kept["data"]["uri"]) == [kept["data"]["export"]]
        assert await neighbour.reads(5, 0, MIB)
        assert await neighbour.writes(6, 0, 4096)


async def test_targets_of_tgtd_are_told_apart_and_only_our_own_are_touched(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    tgtd: tgtd.Tgtd,
    tmp_path: pathlib.Path,
) -> None:
    worker = await start_worker(
        backends={"iscsi": workers.iscsi(tgtd)},
        env=dict(tgtd.env),
        reconcile_interval=reconciling.NEVER,
    )
    (_, kept), (other, lost) = await reconciling.pair(volumes, worker.at("iscsi"))
    backing = tmp_path / "backing"
    backing.write_bytes(b"\7" * MIB)
    foreign = f"{PREFIX}{uuid.uuid4()}"
    smuggled = f"{PREFIX}{other.id}-{uuid.uuid4()}"
    tgtd.add_target(901, foreign, backing)
    tgtd.add_target(902, smuggled, backing)
    guarded = str(kept["data"]["target_iqn"])
    tid = next(
        line.split()[1].strip(":") for line in tgtd.targets().splitlines() if guarded in line
    )
    bind = ("--op", "bind", "--mode", "target", "--tid", tid)
    tgtd.adm(*bind, "--initiator-name", STRANGER)
    tgtd.adm(*bind, "--initiator-address", "ALL")
    try:
        async with (
            clients.session(kept, tmp_path) as neighbour,
            clients.session(kept, tmp_path, initiator=STRANGER),
        ):
            answer = await reconciling.ask(caller, worker.at("iscsi"))
            assert answer.code == 1
            assert answer.subjects() == dict.fromkeys(
                [smuggled, f"{guarded} {STRANGER}", f"{guarded} ALL"], "unowned_export"
            )
            await reconciling.mend(caller, worker.at("iscsi"))
            shown = tgtd.targets()
            assert smuggled not in shown
            assert foreign in shown
            # Neither among those let in, nor with a session: its client tries in vain.
            assert STRANGER not in shown
            assert await neighbour.reads(5, 0, MIB)
        assert not await clients.gets_in(kept, tmp_path, initiator=STRANGER)
        assert await clients.gets_in(lost, tmp_path)
    finally:
        tgtd.adm("--op", "delete", "--mode", "target", "--tid", "901", "--force")


async def test_statuses_that_no_job_accounts_for_are_settled_and_told(
    worker: workers.Worker,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
) -> None:
    belongs = {
        "creating": "error",
        "deleting": "error_deleting",
        "extending": "error_extending",
        "attaching": "available",
        "detaching": "available",
        "maintenance": "available",
        "in-use": "available",
    }
    made = {status: await volumes.create(worker.at("fast")) for status in belongs}
    attached = await volumes.create(worker.at("fast"))
    await volumes.attach(attached)
    for status, volume in made.items():
        await reconciling.set_volume(installation, volume, status=status)
    await reconciling.set_volume(installation, attached, status="available")
    answer = await reconciling.ask(caller, worker.at("fast"))
    assert answer.code == 1
    passing = {volume.id for status, volume in made.items() if status != "in-use"}
    assert {one["volume_id"] for one in answer.of("stuck_status")} == passing
    misplaced = {made["in-use"].id, attached.id}
    assert {one["volume_id"] for one in answer.of("wrong_status")} == misplaced
    async with caller.events("volume.#") as events:
        await reconciling.mend(caller, worker.at("fast"))
        for status, volume in made.items():
            await events.wait(f"volume.{volume.id}.{belongs[status]}")
    for status, volume in made.items():
        assert await volumes.status(volume) == belongs[status]
    assert (await volumes.record(attached))["attach_status"] == "attached"
    assert (await volumes.record(made["creating"]))["error"]["code"] == "WorkerLost"


async def test_storage_is_told_of_and_never_touched(
    worker: workers.Worker, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    missing = await volumes.create(worker.at("fast"))
    short = await volumes.create(worker.at("fast"))
    folder = worker.folder / "fast"
    (folder / f"volume-{missing.id}").unlink()
    with (folder / f"volume-{short.id}").open("r+b") as file:
        file.truncate(4096)
    stray = folder / f"volume-{uuid.uuid4()}"
    stray.write_bytes(b"precious")
    (folder / "lost+found").mkdir()
    for repair in (False, True):
        answer = await reconciling.ask(caller, worker.at("fast"), repair=repair)
        assert answer.subjects() == {
            missing.id: "missing_storage",
            short.id: "missing_storage",
            stray.name.removeprefix("volume-"): "unowned_storage",
        }
        assert all(one["action"] is one["repaired"] is None for one in answer.findings)
    assert stray.read_bytes() == b"precious"
    assert (await volumes.record(missing))["status"] == "available"


async def test_a_device_of_no_job_is_detached(
    worker: workers.Worker, caller: amqp.Caller, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "volume"
    path.write_bytes(bytes(MIB))
    await reconciling.attach(worker, "no-job-src", path)
    answer = await reconciling.ask(caller, worker.at("fast"))
    assert answer.code == 1
    [one] = answer.findings
    assert (one["kind"], one["address"]) == ("unowned_device", worker.host)
    await reconciling.mend(caller, worker.at("fast"))
    assert worker.leftovers() == []


async def test_the_device_of_a_copy_that_runs_is_left_alone(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    tgtd: tgtd.Tgtd,
) -> None:
    options = {
        "backends": {"iscsi": workers.iscsi(tgtd)},
        "env": dict(tgtd.env),
        "reconcile_interval": reconciling.NEVER,
    }
    a = await start_worker("host-a", **options)
    b = await start_worker("host-b", **options)
    source = await volumes.create(a.at("iscsi"), 4 * MIB)
    destination = await volumes.create(b.at("iscsi"), 4 * MIB)
    await volumes.write(source, {0: b"d" * source.size_bytes})
    sent = await caller.send(
        "copy_volume_data",
        b.at("iscsi"),
        {**volumes.pair(source, destination), "bytes_per_second": MIB},
        headers={"status-updates": True},
    )
    await amqp.eventually(lambda: caller.statuses(sent), what="progress")
    while not caller.results(sent):
        for worker in (a, b):
            answer = await reconciling.ask(caller, worker.at("iscsi"), repair=True)
            assert answer.findings == []
    assert caller.results(sent)[0].body["ok"]


async def test_jobs_that_run_are_no_findings(
    worker: workers.Worker, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    rounds = looks = 0
    done = asyncio.Event()

    async def churn() -> None:
        nonlocal rounds
        while not done.is_set():
            volume = await volumes.create(worker.at("fast"))
            info = await volumes.connect(volume)
            await volumes.disconnect(volume, info["connection_id"])
            await volumes.delete(volume)
            rounds += 1

    churning = [asyncio.create_task(churn()) for _ in range(6)]
    try:
        while rounds < 24 or looks < 8:
            answer = await reconciling.ask(caller, worker.at("fast"), repair=bool(looks % 2))
            assert answer.findings == []
            looks += 1
    finally:
        done.set()
        await asyncio.gather(*churning)
