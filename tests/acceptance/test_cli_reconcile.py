"""``volume-worker reconcile``: what is wrong is told; a repair removes that, and nothing else."""

import contextlib
import fcntl
import pathlib
import signal
from typing import Any

import pytest

from tests.services import (
    amqp,
    children,
    clients,
    command,
    environment,
    nbd_clients,
    reconciling,
    tgtd,
    workers,
)
from tests.services import volumes as volumes_service
from tests.services.volumes import MIB


@pytest.fixture
async def worker(start_worker: workers.Starter) -> workers.Worker:
    """A worker that mends nothing by itself."""
    return await start_worker(backends={"fast": workers.FAST}, reconcile_interval=reconciling.NEVER)


@pytest.mark.parametrize("backend", ["fast", "iscsi"])
async def test_without_a_worker_what_is_recorded_and_missing_is_served_again(
    start_worker: workers.Starter,
    volumes: volumes_service.Volumes,
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    backend: str,
) -> None:
    daemon: tgtd.Tgtd | None = request.getfixturevalue("tgtd") if backend == "iscsi" else None
    worker = await start_worker(
        backends={"fast": workers.FAST, **({"iscsi": workers.iscsi(daemon)} if daemon else {})},
        env=dict(daemon.env) if daemon else {},
        reconcile_interval=reconciling.NEVER,
        leaves_something=True,
    )
    (_, info), (_, second) = await reconciling.pair(volumes, worker.at(backend))
    await worker.terminate()
    if daemon is None:
        [server] = worker.leftovers()
        children.end(server.pid)
    else:
        iqn = info["data"]["target_iqn"]
        shown = daemon.targets().splitlines()
        tid = next(line.split()[1].strip(":") for line in shown if iqn in line)
        daemon.adm("--op", "delete", "--mode", "target", "--tid", tid, "--force")
    answer = await reconciling.reconcile(worker)
    assert answer.code == 1
    assert {one["kind"] for one in answer.findings} == {"missing_export"}
    assert (await reconciling.reconcile(worker, "--repair")).code == 0
    for one in (info, second):
        assert await clients.gets_in(one, tmp_path)
    async with clients.session(info, tmp_path) as session:
        assert await session.reads(5, 0, MIB)
    await worker.start()


async def test_without_a_worker_what_nobody_owns_is_removed(
    worker: workers.Worker, volumes: volumes_service.Volumes, tmp_path: pathlib.Path
) -> None:
    (volume, kept), _ = await reconciling.pair(volumes, worker.at("fast"))
    (tmp_path / "stray").write_bytes(bytes(MIB))
    worker.leaves_something = True
    await worker.terminate()
    async with reconciling.nbd_server(worker) as server:
        await server.add_node("stray", tmp_path / "stray")
        await server.add_export("stray-1", "stray", name="stray", writable=True)
    answer = await reconciling.reconcile(worker)
    assert answer.subjects() == {"stray-1": "unowned_export"}
    async with clients.session(kept, tmp_path) as neighbour:
        assert (await reconciling.reconcile(worker, "--repair")).code == 0
        assert "stray" not in await nbd_clients.names(str(kept["data"]["uri"]))
        assert await neighbour.reads(5, 0, MIB)
    await worker.start()
    assert await volumes.status(volume) == "available"


async def test_a_connection_that_no_job_ends_is_ended_by_one_once_there_is_a_worker(
    worker: workers.Worker,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
) -> None:
    (_, kept), (volume, left) = await reconciling.pair(volumes, worker.at("fast"))
    worker.leaves_something = True
    await worker.terminate()
    await installation.rows(
        "UPDATE connections SET state = 'ending' WHERE id = $1::uuid", left["connection_id"]
    )
    answer = await reconciling.reconcile(worker)
    assert answer.code == 1
    [one] = answer.of("left_connection")
    assert (one["subject"], one["volume_id"]) == (left["connection_id"], volume.id)
    assert (await reconciling.reconcile(worker, "--repair")).code == 0
    await worker.start()
    await reconciling.is_gone(caller, volume, "the connection that was left")
    assert await nbd_clients.names(str(kept["data"]["uri"])) == [kept["data"]["export"]]


async def test_a_job_that_nobody_takes_over_is_told(
    worker: workers.Worker, caller: amqp.Caller, installation: environment.Installation
) -> None:
    await caller.call(
        "create_volume", worker.at("fast"), {"volume": {"name": "v", "size_bytes": 1}}
    )
    await worker.terminate()
    await installation.rows(
        "UPDATE jobs SET state = 'running', finished_at = NULL,"
        " lease_until = now() - interval '5 minutes'"
    )
    answer = await reconciling.reconcile(worker, "--repair")
    assert answer.code == 1
    [one] = answer.of("abandoned_job")
    assert one["action"] is None
    await installation.rows("UPDATE jobs SET state = 'succeeded', finished_at = now()")


async def test_a_server_of_a_backend_that_is_no_more_is_ended_once_it_has_no_volume(
    worker: workers.Worker,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
) -> None:
    await volumes.connect(await volumes.create(worker.at("fast")))
    worker.leaves_something = True
    await worker.terminate()
    [server] = worker.leftovers()
    text = worker.config.read_text()
    worker.config.write_text(text.replace("[backends.fast]", "[backends.slow]"))
    assert (await reconciling.reconcile(worker)).findings == []
    await installation.rows("DELETE FROM volumes")
    [one] = (await reconciling.reconcile(worker)).of("unowned_process")
    assert one["subject"] == f"fast/nbd {server.pid}"
    answer = await reconciling.reconcile(worker, "--repair")
    assert [one["repaired"] for one in answer.of("unowned_process")] == [True]
    assert worker.leftovers() == []


async def test_a_server_in_the_hands_of_another_process_is_told(
    worker: workers.Worker, volumes: volumes_service.Volumes
) -> None:
    await worker.terminate()
    with (worker.state_dir / "backends" / "fast" / "nbd.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = await reconciling.reconcile(worker, "--repair")
    assert answer.code == 1
    [one] = answer.of("backend_down")
    assert "nbd.lock is locked" in one["what"]


async def test_a_backend_that_cannot_be_set_up_is_told_beside_the_others(
    start_worker: workers.Starter, tmp_path: pathlib.Path
) -> None:
    worker = start_worker.new(
        backends={
            "bad": {**workers.FAST, "directory": str(tmp_path / "no" / "such")},
            "sim": workers.SIM,
        }
    )
    answer = await reconciling.reconcile(worker)
    assert answer.code == 1
    assert [one["address"] for one in answer.findings] == [worker.at("bad")]
    assert str(tmp_path / "no") in answer.findings[0]["what"]


async def test_wrong_usage_and_services_that_are_away_have_their_exit_codes(
    start_worker: workers.Starter, tmp_path: pathlib.Path
) -> None:
    port = tgtd.free_port()
    for key, scheme in (("broker_url", "amqp"), ("database_url", "postgresql")):
        away: dict[str, Any] = {key: f"{scheme}://x@127.0.0.1:{port}/"}
        worker = start_worker.new(f"host-{key[0]}", backends={"sim": workers.SIM}, **away)
        assert (await command.run("reconcile", "--config", worker.config)).code == 3
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert (await command.run("reconcile", "--config", empty)).code == 2


async def test_the_table_says_what_is_wrong_and_what_became_of_it(
    worker: workers.Worker,
    volumes: volumes_service.Volumes,
    installation: environment.Installation,
) -> None:
    volume = await volumes.create(worker.at("fast"))
    await volumes.connect(volume)
    ended = await command.run("reconcile", "--config", worker.config)
    assert (ended.code, ended.stdout, ended.stderr) == (
        0,
        f"nothing is wrong at {worker.at('fast')}\n",
        "",
    )
    await reconciling.set_volume(installation, volume, status="maintenance")
    ended = await command.run("reconcile", "--config", worker.config)
    assert ended.code == 1
    assert "stuck_status" in ended.stdout
    assert volume.id in ended.stdout
    assert "1 thing(s) need mending; --repair mends 1 of them" in ended.stderr
    ended = await command.run("reconcile", "--repair", "--config", worker.config)
    assert ended.code == 0
    assert "repaired" in ended.stdout


async def test_a_worker_that_stands_still_is_not_waited_for_for_ever(
    worker: workers.Worker,
) -> None:
    with contextlib.ExitStack() as stack:
        worker.signal(signal.SIGSTOP)
        stack.callback(worker.signal, signal.SIGCONT)
        ended = await command.run(
            "reconcile",
            "--json",
            "--timeout",
            "1",
            "--config",
            worker.config,
        )
    assert ended.code == 1
    assert "does not answer" in ended.stderr
    assert [one["kind"] for one in ended.data["findings"]] == ["backend_down"]
