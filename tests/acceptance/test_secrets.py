"""The CHAP secret is told to its connector, and nowhere else."""

import asyncio
import json
import pathlib
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.services import amqp, children, environment, volumes, workers
from tests.services import tgtd as tgtd_service
from tests.services.volumes import MIB

MASK = "***"


def _worker_options(daemon: tgtd_service.Tgtd) -> dict[str, Any]:
    backends = {
        "fast": workers.FAST,
        "iscsi": workers.iscsi(daemon),
        "sim": workers.SIM,
        "iser": {"driver": "fake_iser"},
        "tls": {**workers.FAST, "directory": "{}/tls", "target_tls": "psk"},
    }
    # Whatever is logged, at any level.
    return {"backends": backends, "env": dict(daemon.env), "arguments": ["--verbose"]}


async def _secrets(installation: environment.Installation) -> set[str]:
    """All secrets that the records hold now."""
    found: set[str] = set()
    for (credentials,) in await installation.rows(
        "SELECT credentials::text FROM connections WHERE credentials IS NOT NULL"
    ):
        tree = json.loads(credentials)
        found |= {
            value
            for part in tree.values()
            for name, value in part.items()
            if "password" in name or "psk_key" in name
        }
    return found


class Watch:
    """Everything that may show a secret, watched while a block runs."""

    def __init__(self, installation: environment.Installation) -> None:
        self._installation = installation
        self.secrets: set[str] = set()
        self.lasting: list[str] = []

    async def run(self) -> None:
        """Looks again and again: which secrets there are, and what any user can see."""
        before = ""
        while True:
            self.secrets |= await _secrets(self._installation)
            now = children.command_lines()
            # A line that was there at the last look too is that of a process that lasts.
            self.lasting += [line for line in now.splitlines() if line and line in before]
            before = now
            await asyncio.sleep(0.15)


@asynccontextmanager
async def _watching(installation: environment.Installation) -> AsyncIterator[Watch]:
    watch = Watch(installation)
    task = asyncio.create_task(watch.run())
    yield watch
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _assert_hidden(
    secrets: set[str],
    installation: environment.Installation,
    caller: amqp.Caller,
    events: amqp.Events,
    *running: workers.Worker,
) -> None:
    assert secrets
    tables = await installation.text_of_all_tables()
    tables.pop("connections.credentials")
    letters = await caller.letters()
    places = {
        **tables,
        "events": "\n".join(event.key + json.dumps(event.body) for event in events.all),
        "replies": "\n".join(
            json.dumps(reply.body)
            for reply in caller.replies
            if reply.body["method"] != "initialize_connection" or not reply.body.get("ok")
        ),
        "letters": "\n".join(f"{one.headers} {one.body!r}" for one in letters),
        **{f"log of {worker.host}": worker.log.read_text() for worker in running},
    }
    for name, text in places.items():
        for secret in secrets:
            assert secret not in text, name
    for worker in running:
        for path in worker.state_dir.rglob("*"):
            _assert_private(path, worker.state_dir, secrets)


def _assert_private(path: pathlib.Path, top: pathlib.Path, secrets: set[str]) -> None:
    if not path.is_file():
        return
    if not any(secret.encode() in path.read_bytes() for secret in secrets):
        return
    assert path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0, path
    assert any(
        folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0
        for folder in path.parents
        if folder == top or top in folder.parents
    )


@pytest.mark.parametrize("backend", ["iscsi", "sim", "iser"])
async def test_a_connections_secret_is_in_its_own_reply_and_nowhere_else(
    start_worker: workers.Starter,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    *,
    tgtd: tgtd_service.Tgtd,
    backend: str,
) -> None:
    worker = await start_worker(**_worker_options(tgtd))
    async with caller.events() as events, _watching(installation) as watch:
        volume = await volumes.create(worker.at(backend))
        args = {**volume.at, "connector": {"host": "c", "initiator": "iqn.2004-10.org.example:c"}}
        sent = await caller.send("initialize_connection", volume.address, args)
        first = (await caller.result(sent)).body["result"]
        secret = first["data"]["auth_password"]
        assert first["data"]["auth_method"] == "CHAP"
        assert len(secret) >= 12
        assert secret != MASK

        # A repeat is filled in again; what is stored is not.
        again = await caller.send(
            "initialize_connection", volume.address, args, message_id=sent.message_id
        )
        assert (await caller.result(again)).body["result"] == first
        job = await caller.call("get_job", volume.address, {"job_id": sent.message_id})
        assert job["result"]["data"]["auth_password"] == MASK
        listed = await caller.call("list_jobs", volume.address, {"volume_id": volume.id})
        assert secret not in json.dumps(listed)
        assert secret not in json.dumps(await volumes.record(volume))
        await asyncio.sleep(0.5)

        # A failure tells no secret, not even one of the caller's own.
        odd = {"host": "d", "initiator": "bad name", "auth_password": secret}
        error = await caller.fails(
            "initialize_connection", volume.address, {**volume.at, "connector": odd}
        )
        assert error.code == "InvalidConnector"
        assert secret not in str(error)

        await volumes.disconnect(volume, first["connection_id"])
        gone = await caller.send(
            "initialize_connection", volume.address, args, message_id=sent.message_id
        )
        body = (await caller.result(gone)).body
        assert body["error"]["code"] == "ConnectionNotFound"
        assert secret not in json.dumps(body)
        assert await _secrets(installation) == set()
        second = await volumes.connect(volume)
        assert second["data"]["auth_password"] != secret
        await volumes.disconnect_all(volume)
    secrets = watch.secrets | {secret}
    assert not [line for line in watch.lasting if any(one in line for one in secrets)]
    # The connector that the test put the secret into is a caller's own argument: it is kept with
    # the request, whose body is the one place that keeps what came as it came.
    await _assert_hidden_but_for_bodies(secrets, installation, caller, events, worker)


async def _assert_hidden_but_for_bodies(
    secrets: set[str],
    installation: environment.Installation,
    caller: amqp.Caller,
    events: amqp.Events,
    *running: workers.Worker,
) -> None:
    await installation.rows("UPDATE jobs SET body = ''")
    await _assert_hidden(secrets, installation, caller, events, *running)


@pytest.mark.parametrize("backend", ["iscsi", "tls"])
async def test_no_secret_of_a_copy_between_hosts_shows_while_it_runs(
    start_worker: workers.Starter,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    *,
    tgtd: tgtd_service.Tgtd,
    backend: str,
) -> None:
    a = await start_worker("host-a", **_worker_options(tgtd))
    b = await start_worker("host-b", **_worker_options(tgtd))
    source = await volumes.create(a.at(backend), 4 * MIB)
    destination = await volumes.create(a.at(backend), 4 * MIB)
    await volumes.write(source, {0: b"d" * 4 * MIB})
    async with caller.events() as events, _watching(installation) as watch:
        result = await volumes.copy(
            source, destination, b.at("fast"), remote="both", bytes_per_second=2 * MIB
        )
        assert result["copied_bytes"] == 4 * MIB
    assert len(watch.secrets) >= 2
    assert not [line for line in watch.lasting if any(one in line for one in watch.secrets)]
    await _assert_hidden(watch.secrets, installation, caller, events, a, b)


async def test_the_key_of_an_encrypted_connection_is_in_its_own_reply_and_nowhere_else(
    start_worker: workers.Starter,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tgtd: tgtd_service.Tgtd,
) -> None:
    worker = await start_worker(**_worker_options(tgtd))
    async with caller.events() as events:
        volume = await volumes.create(worker.at("tls"))
        args = {**volume.at, "connector": {"host": "c"}}
        sent = await caller.send("initialize_connection", volume.address, args)
        info = (await caller.result(sent)).body["result"]
        tls = info["data"]["tls"]
        assert tls["type"] == "psk"
        key = tls["psk_key"]
        assert len(key) >= 32
        assert info["data"]["uri"].startswith("nbds://")
        assert key not in info["data"]["uri"]
        job = await caller.call("get_job", volume.address, {"job_id": sent.message_id})
        assert job["result"]["data"]["tls"]["psk_key"] == MASK
        assert key not in children.command_lines()
        await _assert_hidden({key}, installation, caller, events, worker)
        await volumes.disconnect(volume, info["connection_id"])
    for path in worker.state_dir.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes()


async def test_the_passwords_of_the_services_are_in_no_log_and_on_no_command_line(
    start_worker: workers.Starter,
    installation: environment.Installation,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    worker = await start_worker(arguments=["--verbose"])
    await volumes.delete(await volumes.create(worker.at("fast")))
    await worker.terminate()
    lines = [line for line in children.command_lines().splitlines() if str(worker.folder) in line]
    shown = worker.log.read_text() + "\n".join(lines)
    for url in (installation.broker_url, installation.database_url):
        password = url.partition("@")[0].rpartition(":")[2]
        assert len(password) < 4 or password not in shown
