"""``volume-worker check``: what is wrong is told, and who works is left in peace."""

import pathlib
import uuid
from typing import Any

import aio_pika

from tests.acceptance.conftest import Hosts
from tests.services import command, environment, tgtd, workers


async def _check(
    config: pathlib.Path, env: dict[str, str] | None = None
) -> tuple[int, dict[str, dict[str, Any]]]:
    ended = await command.run("check", "--json", "--config", config, env=env)
    return ended.code, {one["check"]: one for one in ended.data["checks"]}


async def test_a_healthy_host_before_its_first_run(start_worker: workers.Starter) -> None:
    worker = start_worker.new(backends={"fast": workers.FAST})
    code, found = await _check(worker.config)
    assert code == 0, found
    assert found[f"queue {worker.settings['namespace']}.{worker.at('fast')}"]["state"] == "warn"
    assert not worker.state_dir.exists()


async def test_a_worker_at_work_is_not_disturbed(hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.volumes.connect(volume)
    queue = f"queue {hosts.installation.namespace}.{hosts.a.at('fast')}"
    env = {}
    if hosts.a._env:
        env = dict(hosts.a._env)
    before = hosts.a.log.stat().st_size
    code, found = await _check(hosts.a.config, env)
    assert code == 0, found
    assert found["worker"]["state"] == "ok"
    assert found[queue]["state"] == "ok"
    assert "own server" in found[f"{hosts.a.at('fast')} target_listen"]["message"]
    assert hosts.a.nbd_serves()
    assert hosts.a.log.stat().st_size == before
    await hosts.assert_at_work()


async def test_what_is_wrong_with_a_backend_is_told(
    start_worker: workers.Starter, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").touch()
    mount_point = tmp_path / "mnt"
    mount_point.mkdir()
    worker = start_worker.new(
        backends={
            "bad": {**workers.FAST, "directory": str(tmp_path / "file")},
            "unmounted": {**workers.FAST, "directory": str(mount_point)},
            "good": workers.SIM,
            "away": {**workers.FAST, "target": "tgt", "iscsi_port": 1},
        }
    )
    remembered = worker.state_dir / "backends" / "unmounted" / "storage-id"
    remembered.parent.mkdir(parents=True)
    remembered.write_text(f"{uuid.uuid4()}\n")
    code, found = await _check(worker.config, {"TGT_IPC_SOCKET": str(tmp_path / "none")})
    assert code == 1
    assert found[f"{worker.at('bad')} driver file"]["state"] == "fail"
    assert str(tmp_path / "file") in found[f"{worker.at('bad')} driver file"]["message"]
    unmounted = found[f"{worker.at('unmounted')} driver file"]
    assert unmounted["state"] == "fail"
    assert "mount the storage" in unmounted["message"]
    assert str(remembered) in unmounted["message"]
    assert not list(mount_point.iterdir())
    assert found[f"{worker.at('away')} target tgt"]["state"] == "fail"
    assert found[f"{worker.at('good')} driver fake_iscsi"]["state"] == "ok"
    ended = await command.run("check", "--config", worker.config)
    assert ended.code == 1
    assert "fail" in ended.stdout
    assert str(tmp_path / "file") in ended.stderr


async def test_missing_programs_are_told(
    start_worker: workers.Starter, tmp_path: pathlib.Path
) -> None:
    worker = start_worker.new(backends={"fast": workers.FAST})
    code, found = await _check(worker.config, {"PATH": str(tmp_path)})
    assert code == 1
    assert "qemu-storage-daemon" in found[f"{worker.at('fast')} target nbd"]["message"]
    assert found["attaching"]["state"] == "fail"


async def test_a_taken_port_is_told(start_worker: workers.Starter, hosts: Hosts) -> None:
    volume = await hosts.volumes.create(hosts.a.at("fast"))
    await hosts.volumes.connect(volume)
    taken = f"127.0.0.1:{hosts.a.nbd_port}"
    worker = start_worker.new(
        backends={"fast": {**workers.FAST, "target_listen": taken}}, http_listen=taken
    )
    code, found = await _check(worker.config)
    assert code == 1
    assert found[f"{worker.at('fast')} target_listen"]["state"] == "fail"
    assert found["http_listen"]["state"] == "fail"


async def test_a_missing_schema_and_another_namespace_are_told(
    start_worker: workers.Starter, installation: environment.Installation
) -> None:
    worker = start_worker.new(backends={"sim": workers.SIM})
    _, found = await _check(worker.config, {"VOLUME_WORKER_NAMESPACE": "other"})
    assert found["schema"]["state"] == "fail"
    assert "other" in found["schema"]["message"]
    await installation.rows("DROP TABLE schema_migrations")
    code, found = await _check(worker.config)
    assert code == 1
    assert "volume-worker migrate" in found["schema"]["message"]


async def test_a_queue_that_is_not_what_it_must_be_is_told_and_left(
    start_worker: workers.Starter, installation: environment.Installation
) -> None:
    worker = start_worker.new(backends={"sim": workers.SIM})
    name = f"{installation.namespace}.{worker.at('sim')}"
    async with await aio_pika.connect(installation.broker_url) as connection:
        queue = await (await connection.channel()).declare_queue(name, durable=True)
        code, found = await _check(worker.config)
        assert code == 1
        assert found[f"queue {name}"]["state"] == "fail"
        assert (await queue.delete()) is not None


async def test_both_services_away_are_told_beside_the_rest(
    start_worker: workers.Starter,
) -> None:
    port = tgtd.free_port()
    worker = start_worker.new(
        backends={"sim": workers.SIM},
        broker_url=f"amqp://guest:geheim@127.0.0.1:{port}/",
        database_url=f"postgresql://postgres:geheim@127.0.0.1:{port}/x",
    )
    code, found = await _check(worker.config)
    assert code == 3
    assert found["broker"]["state"] == found["database"]["state"] == "fail"
    assert found[f"{worker.at('sim')} driver fake_iscsi"]["state"] == "ok"
