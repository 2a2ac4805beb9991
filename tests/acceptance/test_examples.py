"""The examples work as their README says."""

import asyncio
import json
import os
import pathlib
import sys
from typing import Any

from tests.acceptance.conftest import Hosts
from tests.services import workers

SCHEDULER = pathlib.Path(__file__).parents[2] / "examples" / "scheduler.py"


async def _schedule(worker: workers.Worker, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCHEDULER),
        *arguments,
        env={
            **os.environ,
            "VOLUME_WORKER_BROKER_URL": worker.settings["broker_url"],
            "VOLUME_WORKER_NAMESPACE": worker.settings["namespace"],
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert b"Traceback" not in err, err.decode()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_scheduler_listens_and_places_a_volume(hosts: Hosts) -> None:
    code, out, err = await _schedule(hosts.a, "--name", "placed", "--size-gib", "0.001")
    assert code == 0, err
    volume: dict[str, Any] = json.loads(out)
    hosts.volumes.adopt(volume)
    assert volume["name"] == "placed"
    assert volume["status"] == "available"
    # The fake backends have more to give than any disk.
    assert volume["address"].partition("@")[0] in ("host-a", "host-b", "host-c")


async def test_a_scheduler_asks_the_backends_that_it_is_given(hosts: Hosts) -> None:
    addresses = ("--address", hosts.b.at("fast"), "--address", "host-z@fast")
    code, out, err = await _schedule(hosts.a, "--name", "placed", "--size-gib", "0.001", *addresses)
    assert code == 0, err
    hosts.volumes.adopt(json.loads(out))
    assert json.loads(out)["address"] == hosts.b.at("fast")
    assert "host-z@fast" in err


async def test_a_scheduler_without_space_says_so(hosts: Hosts) -> None:
    code, out, err = await _schedule(
        hosts.a, "--name", "placed", "--size-gib", "1e9", "--address", hosts.b.at("fast")
    )
    assert (code, out) == (1, "")
    assert "none of 1 backends" in err
