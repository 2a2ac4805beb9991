"""Storage tools that misbehave, seen from the caller: the job ends rightly, and nothing is left."""

import pathlib
import sys
from typing import Any, Final

import pytest

from tests.services import amqp, children, misbehaving, volumes, workers
from tests.services.volumes import INITIATOR

HASTY: Final = (sys.executable, str(pathlib.Path(__file__).with_name("hasty_worker.py")))


async def _fails_to_connect(
    start: workers.Starter,
    caller: amqp.Caller,
    made: volumes.Volumes,
    env: dict[str, str],
) -> tuple[workers.Worker, amqp.Failed, dict[str, Any]]:
    """A connection that the tool cannot make: its error, and the job as it is stored."""
    a = start.new("host-a", backends={"iscsi": misbehaving.BACKEND}, env=env, max_attempts=1)
    a.command = HASTY
    await a.start()
    volume = await made.create(a.at("iscsi"))
    sent = await caller.send(
        "initialize_connection",
        a.at("iscsi"),
        {**volume.at, "connector": {"host": "client", "initiator": INITIATOR}},
    )
    body = (await caller.result(sent)).body
    assert not body["ok"]
    job = await caller.call("get_job", a.at("iscsi"), {"job_id": sent.message_id})
    record = await made.record(volume)
    assert record["status"] == "available"
    assert record["connections"] == []
    assert record["exported"] is False
    return a, amqp.Failed(body["error"]), job


async def test_a_tool_whose_child_holds_its_pipe_ends_the_job_as_a_timeout(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    env = misbehaving.tgtadm(tmp_path / "tools", misbehaving.NEW_TARGET, "sleep 300 & wait")
    a, error, job = await _fails_to_connect(start_worker, caller, volumes, env)
    assert error.code == "TargetError"
    assert "did not end within 1.5 s" in error.message
    assert error.retryable
    assert job["state"] == "dead"
    assert not [one for one in children.mentioning(str(a.state_dir)) if "sleep" in one.command]


async def test_five_mebibytes_on_stderr_hold_no_job_up(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    loud = "head -c 5242880 /dev/zero | tr '\\0' e >&2"
    env = misbehaving.tgtadm(tmp_path / "tools", "--op show --mode target", loud)
    a = await start_worker("host-a", backends={"iscsi": misbehaving.BACKEND}, env=env)
    volume = await volumes.create(a.at("iscsi"))
    info = await volumes.connect(volume)
    assert info["driver_volume_type"] == "iscsi"
    await volumes.disconnect(volume, info["connection_id"])


@pytest.mark.parametrize("words", [r"disk \377\376 is \000gone", r"\377\376\000"])
async def test_bytes_that_no_text_can_hold_reach_the_caller_as_the_tools_own_failure(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
    words: str,
) -> None:
    env = misbehaving.tgtadm(
        tmp_path / "tools", misbehaving.NEW_TARGET, f"printf '{words}' >&2; exit 22"
    )
    a, error, job = await _fails_to_connect(start_worker, caller, volumes, env)
    assert error.code == "TargetError"
    assert error.details["exit_code"] == 22
    assert "\ufffd\ufffd" in error.details["stderr"]
    assert "\0" not in f"{error.message}{error.details}"
    assert job["error"]["details"]["stderr"] == error.details["stderr"]
    [failed] = [line for line in a.log_lines() if line["event"] == "job.failed"]
    assert failed["code"] == "TargetError"
