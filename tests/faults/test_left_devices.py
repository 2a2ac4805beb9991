"""What a worker that died had attached goes with its job, though no attempt begins any more."""

import pathlib

import pytest

from tests.faults import world
from tests.services import amqp, environment, tgtd, workers
from tests.services.volumes import MIB

NEVER = 3600
"""Seconds until a round of reconciliation, which would remove it too."""


@pytest.mark.parametrize("backend", ["iscsi", "fast"])
async def test_a_copy_cancelled_while_its_worker_is_dead_leaves_no_attachment(
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
    tgtd: tgtd.Tgtd,
    backend: str,
) -> None:
    async with world.opened(installation, start_worker, tmp_path, tgtd) as made:
        for host in ("host-a", "host-b"):
            await made.add_host(host, reconcile_interval=NEVER)
        source = await made.volumes.create(f"host-b@{backend}", 4 * MIB)
        await made.volumes.write(source, {0: b"d" * 4 * MIB})
        destination = await made.volumes.create("host-a@fast", 4 * MIB)
        sent = await made.caller.send(
            "copy_volume_data",
            "host-a@fast",
            {**made.volumes.pair(source, destination), "bytes_per_second": MIB // 4},
            headers={"status-updates": True},
        )
        await amqp.eventually(
            lambda: any(status.body["progress"] for status in made.caller.statuses(sent)),
            what="progress",
        )
        await made.hosts["host-a"].kill()
        cancel = await made.caller.send("cancel_job", "host-b@fast", {"job_id": sent.message_id})
        await made.restart("host-a")
        assert (await made.caller.result(cancel)).body["result"]["state"] == "cancelled"
        assert (await made.caller.result(sent)).body["error"]["code"] == "Cancelled"
        kept = made.hosts["host-a"].state_dir / "connectors"
        assert [str(path) for kind in ("iscsi", "nbd") for path in (kept / kind).glob("*")] == []
        await made.volumes.clean()
        await made.stop()
