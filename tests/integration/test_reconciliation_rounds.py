"""The rounds of reconciliation, and a start with records and files that are bad."""

import pathlib
import uuid
from typing import Any

from tests.services import (
    amqp,
    children,
    clients,
    environment,
    nbd_clients,
    reconciling,
    tgtd,
    workers,
)
from tests.services import volumes as volumes_service
from tests.services.volumes import MIB


def _logged(worker: workers.Worker, event: str) -> list[dict[str, Any]]:
    return [line for line in worker.log_lines() if line["event"] == f"reconciliation.{event}"]


async def test_the_rounds_mend_what_is_safe_and_log_each_finding_once(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
    tmp_path: pathlib.Path,
) -> None:
    # Two backends, each of which finds what is wrong with their host.
    worker = await start_worker(reconcile_interval=0.2)
    (_, kept), (volume, lost) = await reconciling.pair(volumes, worker.at("fast"))
    await caller.call("create_export", volume.address, volume.at)
    stray = worker.folder / "fast" / f"volume-{uuid.uuid4()}"
    stray.write_bytes(b"precious")
    (tmp_path / "device").write_bytes(bytes(MIB))
    await reconciling.attach(worker, "no-job-dst", tmp_path / "device")
    async with clients.session(kept, tmp_path) as neighbour:
        await reconciling.forget(installation, lost["connection_id"])
        await amqp.eventually(
            lambda: (
                {"unowned_export", "unowned_device"}
                <= {line["kind"] for line in _logged(worker, "repaired")}
            ),
            what="the repair",
        )
        assert await nbd_clients.names(kept["data"]["uri"]) == [kept["data"]["export"]]
        assert await neighbour.reads(5, 0, MIB)
    stray_id = stray.name.removeprefix("volume-")
    await amqp.eventually(lambda: _logged(worker, "found"), what="the stray")
    stray.unlink()
    await amqp.eventually(lambda: _logged(worker, "gone"), what="the stray's end")
    assert [line["subject"] for line in _logged(worker, "found")] == [stray_id]
    assert [line["subject"] for line in _logged(worker, "gone")] == [stray_id]
    repaired = [line["subject"] for line in _logged(worker, "repaired")]
    assert len(set(repaired)) == len(repaired)


async def test_no_bad_volume_and_no_bad_record_keeps_a_worker_from_starting(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
    tgtd: tgtd.Tgtd,
    tmp_path: pathlib.Path,
) -> None:
    worker = await start_worker(
        backends={"fast": workers.FAST, "iscsi": workers.iscsi(tgtd)},
        env=dict(tgtd.env),
        reconcile_interval=reconciling.NEVER,
        leaves_something=True,
    )
    good, bad = {}, {}
    for backend, folder in (("fast", "fast"), ("iscsi", "iscsi")):
        (_, good[backend]), (bad[backend], _) = await reconciling.pair(volumes, worker.at(backend))
        (worker.folder / folder / f"volume-{bad[backend].id}").unlink()
    odd = await volumes.create(worker.at("fast"))
    await caller.call("create_export", odd.address, odd.at)
    await worker.kill()
    for one in worker.leftovers():
        if "qemu-storage-daemon" in one.command:
            children.end(one.pid)
    state = worker.state_dir / "backends"
    (state / "fast" / "nbd" / "daemon.json").write_bytes(b"\xff{")
    for path in (state / "iscsi" / "tgt").iterdir():
        if bad["iscsi"].id in path.name:
            path.write_bytes(b"{")
    await reconciling.set_volume(installation, odd, status="of-the-future")
    await installation.rows(
        "INSERT INTO volumes (id, name, address, size_bytes, status, created_by, export)"
        " VALUES ($1, 'v', 'host-a@gone', 1, 'available', $1, 'explicit')",
        uuid.uuid4(),
    )
    await worker.start()
    for info in good.values():
        async with clients.session(info, tmp_path) as session:
            assert await session.reads(5, 0, MIB)
    found = (await reconciling.ask(caller, worker.at("fast"))).findings
    assert {(one["kind"], one["volume_id"]) for one in found} >= {
        ("missing_storage", bad["fast"].id),
        ("missing_export", bad["fast"].id),
        ("unreadable_record", odd.id),
    }
    repaired = await reconciling.ask(caller, worker.at("fast"), repair=True)
    [missing] = [one for one in repaired.of("missing_export") if one["volume_id"] == bad["fast"].id]
    assert missing["repaired"] is False
    assert "No such file" in missing["error"]
    await reconciling.set_volume(installation, odd, status="available")
    await installation.rows("DELETE FROM volumes WHERE address = 'host-a@gone'")


async def test_a_server_whose_record_cannot_be_read_is_found_and_replaced(
    start_worker: workers.Starter,
    volumes: volumes_service.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    worker = await start_worker(
        backends={"fast": workers.FAST}, reconcile_interval=reconciling.NEVER
    )
    (_, info), _ = await reconciling.pair(volumes, worker.at("fast"))
    worker.leaves_something = True
    await worker.kill()
    (worker.state_dir / "backends" / "fast" / "nbd" / "daemon.json").write_text("")
    await worker.start()
    async with clients.session(info, tmp_path) as session:
        assert await session.reads(5, 0, MIB)
    worker.leaves_something = False
