"""Workers that are stopped, killed and started again; daemons that die; what must outlive them."""

import asyncio
import contextlib
import datetime
import pathlib
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.services import amqp, children, clients, environment, volumes, workers
from tests.services import tgtd as tgtd_service
from tests.services.volumes import INITIATOR, MIB

SIZE = 4 * MIB
SLOW = {"bytes_per_second": 3 * MIB // 2}


async def _two_volumes(
    made: volumes.Volumes, source_at: str, destination_at: str
) -> tuple[volumes.Volume, volumes.Volume]:
    source = await made.create(source_at, SIZE)
    destination = await made.create(destination_at, SIZE)
    await made.write(source, {0: b"d" * SIZE})
    return source, destination


async def _start_copy(
    caller: amqp.Caller, at: str, source: volumes.Volume, destination: volumes.Volume
) -> amqp.Sent:
    """A copy that runs for some seconds, and has moved some bytes."""
    sent = await caller.send(
        "copy_volume_data",
        at,
        {**volumes.Volumes.pair(source, destination), **SLOW},
        headers={"status-updates": True},
    )

    def moving() -> bool:
        return any(
            (status.body["progress"] or {}).get("done_bytes", 0) > 0
            for status in caller.statuses(sent)
        )

    await amqp.eventually(moving, what="progress")
    return sent


async def _assert_as_before(
    made: volumes.Volumes, source: volumes.Volume, destination: volumes.Volume
) -> None:
    for volume in (source, destination):
        record = await made.record(volume)
        assert record["status"] == "available"
        assert record["connections"] == []
        assert record["exported"] is False
    assert await made.content(destination) == b"d" * SIZE


# SIGTERM


async def test_a_drain_lets_a_running_copy_finish(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a")
    b = await start_worker("host-b")
    source, destination = await _two_volumes(volumes, a.at("fast"), b.at("fast"))
    sent = await _start_copy(caller, b.at("fast"), source, destination)
    await b.terminate()
    assert (await caller.only_result(sent, timeout=1)).body["ok"]
    job = await caller.call("get_job", a.at("fast"), {"job_id": sent.message_id})
    assert (job["state"], job["attempt"]) == ("succeeded", 1)
    assert b.leftovers() == []
    await b.start()
    await _assert_as_before(volumes, source, destination)


async def test_a_drain_that_takes_too_long_puts_the_copy_back(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a")
    b = await start_worker("host-b", drain_timeout=0.2)
    source, destination = await _two_volumes(volumes, a.at("fast"), b.at("fast"))
    sent = await _start_copy(caller, b.at("fast"), source, destination)
    started = time.monotonic()
    await b.terminate()
    assert time.monotonic() - started < 10
    assert caller.results(sent) == []
    job = await caller.call("get_job", a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "queued"
    # The source's host was told to end the connection; the destination is held for the job.
    assert (await volumes.record(source))["connections"] == []
    assert await volumes.status(destination, at=a.at("fast")) == "maintenance"
    assert b.leftovers() == []
    await b.start()
    assert (await caller.only_result(sent)).body["ok"]
    await _assert_as_before(volumes, source, destination)


async def test_a_second_signal_hurries(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a")
    source, destination = await _two_volumes(volumes, a.at("fast"), a.at("fast"))
    sent = await _start_copy(caller, a.at("fast"), source, destination)
    a.signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    a.signal(signal.SIGTERM)
    assert await a.ended(5) == 0
    assert caller.results(sent) == []
    await a.start()
    assert (await caller.only_result(sent)).body["ok"]
    await _assert_as_before(volumes, source, destination)


async def test_every_request_sent_around_a_restart_is_answered_once(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a")
    new = {"volume": {"name": "v", "size_bytes": 4096}}
    stopping = asyncio.create_task(a.terminate())
    sent = [await caller.send("create_volume", a.at("fast"), new) for _ in range(40)]
    await stopping
    await a.start()
    for one in sent:
        reply = await caller.result(one)
        assert reply.body["ok"]
        volumes.adopt(reply.body["result"])
    await asyncio.sleep(amqp.QUIET)
    assert all(len(caller.results(one)) == 1 for one in sent)
    listed = await caller.call("list_volumes", a.at("fast"), {"limit": 1000})
    assert len(listed["volumes"]) == 40


# SIGKILL


@pytest.mark.parametrize("backend", ["fast", "iscsi"])
async def test_a_copy_whose_worker_was_killed_is_run_again_and_ends_well(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    request: pytest.FixtureRequest,
    backend: str,
) -> None:
    options: dict[str, Any] = {"lease": 3}
    if backend == "iscsi":
        daemon: tgtd_service.Tgtd = request.getfixturevalue("tgtd")
        options["backends"] = {"fast": workers.FAST, "iscsi": workers.iscsi(daemon)}
        options["env"] = dict(daemon.env)
    a = await start_worker("host-a", **options)
    b = await start_worker("host-b", **options)
    source, destination = await _two_volumes(volumes, a.at(backend), b.at(backend))
    async with caller.events(f"volume.{destination.id}.*") as events:
        sent = await _start_copy(caller, b.at("fast"), source, destination)
        await b.kill()
        # The copier and what it was attached by end with the worker, at the latest.
        assert await _children_gone(b)
        assert await volumes.status(destination, at=a.at("fast")) == "maintenance"
        await b.start()
        reply = await caller.result(sent)
        assert reply.body["ok"], reply.body
        await events.wait(f"volume.{destination.id}.available")
    job = await caller.call("get_job", a.at("fast"), {"job_id": sent.message_id})
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    await _assert_as_before(volumes, source, destination)
    assert len(caller.results(sent)) == 1
    assert a.leftovers() == b.leftovers() == []


async def test_a_worker_that_stood_still_for_longer_than_its_lease_runs_the_copy_again(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", lease=3)
    source, destination = await _two_volumes(volumes, a.at("fast"), a.at("fast"))
    sent = await _start_copy(caller, a.at("fast"), source, destination)
    a.signal(signal.SIGSTOP)
    await asyncio.sleep(5)
    a.signal(signal.SIGCONT)
    reply = await caller.result(sent)
    assert reply.body["ok"], reply.body
    assert a.is_running
    await _assert_as_before(volumes, source, destination)
    assert len(caller.results(sent)) == 1


async def _children_gone(worker: workers.Worker) -> bool:
    """Whether nothing of a killed worker is left but what serves its exports."""

    def left() -> list[children.Found]:
        return [one for one in worker.leftovers() if "nbd-server" not in one.command]

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return left() == []


async def test_a_copy_goes_on_while_its_sources_worker_is_killed(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", lease=3)
    b = await start_worker("host-b", lease=3)
    source, destination = await _two_volumes(volumes, a.at("fast"), b.at("fast"))
    sent = await _start_copy(caller, b.at("fast"), source, destination)
    await a.kill()
    await asyncio.sleep(0.5)
    await a.start()
    reply = await caller.result(sent)
    assert reply.body["ok"], reply.body
    await _assert_as_before(volumes, source, destination)
    assert a.leftovers() == b.leftovers() == []


async def test_a_job_that_kills_its_worker_each_time_is_dead_in_the_end(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", lease=3, max_attempts=2)
    source, destination = await _two_volumes(volumes, a.at("fast"), a.at("fast"))
    sent = await _start_copy(caller, a.at("fast"), source, destination)
    for attempt in (2, 3):
        await a.kill()
        await a.start()
        if attempt == 2:
            await amqp.eventually(
                lambda: any(
                    status.body["attempt"] == 2 and status.body["progress"]
                    for status in caller.statuses(sent)
                )
            )
    error = (await caller.result(sent)).body["error"]
    assert error["code"] == "WorkerLost"
    assert error["retryable"] is True
    letter = await caller.letter(sent)
    assert letter.headers["reason"] == "WorkerLost"
    assert letter.headers["job-id"] == sent.message_id
    job = await caller.call("get_job", a.at("fast"), {"job_id": sent.message_id})
    assert job["state"] == "dead"
    for volume in (source, destination):
        record = await volumes.record(volume)
        assert record["status"] == "available"
        assert record["connections"] == []


async def test_a_copy_whose_deadline_passed_while_its_worker_was_gone_is_undone(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", lease=3)
    b = await start_worker("host-b", lease=3)
    source, destination = await _two_volumes(volumes, a.at("fast"), b.at("fast"))
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    async with caller.events(f"volume.{destination.id}.*") as events:
        sent = await caller.send(
            "copy_volume_data",
            b.at("fast"),
            {**volumes.pair(source, destination), **SLOW},
            headers={"deadline": moment.isoformat()},
        )
        await events.wait(f"volume.{destination.id}.maintenance")
        await asyncio.sleep(1)
        await b.kill()
        await asyncio.sleep(1)
        await b.start()
        error = (await caller.result(sent)).body["error"]
    assert error["code"] == "DeadlineExceeded"
    for volume in (source, destination):
        record = await volumes.record(volume)
        assert record["status"] == "available"
        assert record["connections"] == []
        assert record["exported"] is False


async def test_no_request_is_lost_or_done_twice_when_the_worker_is_killed_among_many(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    a = await start_worker("host-a", lease=3)
    new = {"volume": {"name": "v", "size_bytes": 4096}}
    sent = []
    for number in range(60):
        sent.append(await caller.send("create_volume", a.at("fast"), new))
        if number == 40:
            await a.kill()
    await a.start()
    for one in sent:
        reply = await caller.result(one)
        assert reply.body["ok"], reply.body
        volumes.adopt(reply.body["result"])
    await asyncio.sleep(amqp.QUIET)
    for one in sent:
        # A copy of a result is known by its own id.
        assert len({reply.message_id for reply in caller.results(one)}) == 1
    listed = await caller.call("list_volumes", a.at("fast"), {"limit": 1000})
    assert len(listed["volumes"]) == 60
    files = list((a.folder / "fast").iterdir())
    assert len([path for path in files if path.name.startswith("volume-")]) == 60


async def test_two_workers_of_one_host_share_its_work(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    # Backends without a daemon: one process alone can drive that.
    one = await start_worker("host-a", backends={"sim": workers.SIM})
    two = workers.Worker(
        installation, "host-a", one.folder.parent / "second", backends={"sim": workers.SIM}
    )
    try:
        await two.start()
        made = [await volumes.create(one.at("sim")) for _ in range(20)]
        await one.terminate()
        for volume in made:
            await volumes.delete(volume)
        assert (await caller.call("list_volumes", one.at("sim")))["volumes"] == []
    finally:
        await one.start()
        two.close()


# Exports that outlive the worker


async def test_a_clients_session_outlives_restarts_of_the_worker(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    a = await start_worker("host-a", lease=3)
    volume = await volumes.create(a.at("fast"))
    await volumes.write(volume, {0: b"\x07" * MIB})
    info = await volumes.connect(volume)
    daemon = _nbd_daemon(a)
    async with clients.session(info, tmp_path) as session:
        assert await session.reads(7, 0, MIB)
        await a.kill()
        assert await session.reads(7, 0, MIB)
        await a.start()
        assert await session.reads(7, 0, MIB)
        await a.terminate()
        assert await session.writes(8, 0, 4096)
        await a.start()
        assert await session.reads(8, 0, 4096)
        assert _nbd_daemon(a) == daemon
        assert await volumes.connect(volume) == info
        other = await volumes.connect(volume, connection_key="new")
        assert await clients.gets_in(other, tmp_path)
        await volumes.disconnect(volume, other["connection_id"])
        assert await session.reads(8, 0, 4096)
    await volumes.disconnect(volume, info["connection_id"])
    assert a.leftovers() == []


async def test_exports_are_brought_back_where_the_daemon_died_with_the_worker(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    a = await start_worker("host-a", lease=3)
    volume = await volumes.create(a.at("fast"))
    await volumes.write(volume, {0: b"\x07" * MIB})
    writable = await volumes.connect(volume, connection_key="rw")
    readable = await volumes.connect(volume, connection_key="ro", mode="ro")
    await a.kill()
    children.end(_nbd_daemon(a).pid)
    assert not await clients.gets_in(writable, tmp_path)
    await a.start()
    async with clients.session(writable, tmp_path) as session:
        assert await session.reads(7, 0, MIB)
        assert await session.writes(8, 0, 4096)
    async with clients.session(readable, tmp_path, read_only=True) as session:
        assert await session.reads(8, 0, 4096)
    assert await volumes.connect(volume, connection_key="rw") == writable


async def test_exports_are_brought_back_where_the_daemon_alone_died(
    start_worker: workers.Starter,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    a = await start_worker("host-a")
    volume = await volumes.create(a.at("fast"))
    info = await volumes.connect(volume)
    children.end(_nbd_daemon(a).pid)
    for _ in range(60):
        if await clients.gets_in(info, tmp_path):
            break
        await asyncio.sleep(0.25)
    assert await clients.gets_in(info, tmp_path)


def _nbd_daemon(worker: workers.Worker) -> children.Found:
    """The daemon that serves: it is named by the configuration's port."""
    (found,) = [one for one in worker.leftovers() if f"port={worker.nbd_port}" in one.command]
    return found


async def test_iscsi_targets_are_made_again_when_tgtd_is_back(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    with tgtd_service.running() as own:
        a = await start_worker(
            "host-a",
            backends={"iscsi": workers.iscsi(own)},
            env=dict(own.env),
            max_attempts=1,
        )
        volume = await volumes.create(a.at("iscsi"))
        await volumes.write(volume, {0: b"\x07" * MIB})
        info = await volumes.connect(volume)
        assert await clients.gets_in(info, tmp_path)
        own.kill()
        own.start()
        for _ in range(60):
            if await clients.gets_in(info, tmp_path):
                break
            await asyncio.sleep(0.25)
        async with clients.session(info, tmp_path) as session:
            assert await session.reads(7, 0, MIB)
        record = await volumes.record(volume)
        assert [one["id"] for one in record["connections"]] == [info["connection_id"]]
        # The worker restarts, and what is served is untouched.
        async with clients.session(info, tmp_path) as session:
            await a.kill()
            await a.start()
            assert await session.reads(7, 0, MIB)
        await volumes.clean()
        assert "Target " not in own.targets()
        await a.terminate()


async def test_what_failed_while_tgtd_was_away_leaves_nothing_behind(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    with tgtd_service.running() as own:
        a = await start_worker(
            "host-a",
            backends={"iscsi": workers.iscsi(own)},
            env=dict(own.env),
            max_attempts=2,
        )
        volume = await volumes.create(a.at("iscsi"))
        own.kill()
        args = {**volume.at, "connector": {"host": "client", "initiator": INITIATOR}}
        error = await caller.fails("initialize_connection", volume.address, args)
        assert error.code == "TargetError"
        assert error.retryable is True
        own.start()
        # Undone when tgtd is found to be back, by a job of its own.
        deadline = time.monotonic() + 15
        left: object = None
        while left != ([], False) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            record = await volumes.record(volume)
            left = record["connections"], record["exported"]
        # Whatever the record says, all can be ended now that tgtd is back.
        await volumes.clean()
        assert "Target " not in own.targets()
        await a.terminate()
    assert left == ([], False)


# Services that go away


async def test_a_worker_whose_broker_connection_is_cut_comes_back(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    parts = installation.broker_url.partition("@")
    host, _, port = parts[2].rstrip("/").partition("/")[0].partition(":")
    async with _proxy(host, int(port)) as proxy:
        url = f"{parts[0]}@127.0.0.1:{proxy.port}/"
        a = await start_worker("host-a", broker_url=url)
        first = await volumes.create(a.at("fast"))
        await proxy.cut()
        assert not await a.is_ready()
        sent = await caller.send("delete_volume", a.at("fast"), first.at)
        proxy.let_through()
        assert (await caller.only_result(sent)).body["ok"]
        for _ in range(100):
            if await a.is_ready():
                break
            await asyncio.sleep(0.1)
        assert await a.is_ready()
        await volumes.clean()
        await a.terminate()


async def test_a_worker_whose_database_connection_is_cut_comes_back(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes.Volumes,
) -> None:
    a = await start_worker("host-a")
    for _ in range(3):
        await installation.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await volumes.delete(await volumes.create(a.at("fast")))
    assert await a.is_ready()


class Proxy:
    """Passes bytes on to a service, until it is told to cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = True
        self.port = 0

    async def cut(self) -> None:
        """Ends all connections and lets no new one through."""
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0.3)

    def let_through(self) -> None:
        """Lets connections through again."""
        self._open = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection."""
        if not self._open:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._to)
        self._writers |= {writer, there_writer}
        await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        self._writers -= {writer, there_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def _proxy(host: str, port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, family=socket.AF_INET)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy
        await proxy.cut()


# The environment


async def test_a_database_of_another_namespace_is_refused(
    installation: environment.Installation, start_worker: workers.Starter
) -> None:
    worker = start_worker.new("host-a", namespace=f"other-{uuid.uuid4().hex[:8]}")
    worker.spawn()
    assert await worker.ended() == 1
    assert "namespace" in worker.log.read_text()


@pytest.mark.parametrize("url", ["broker_url", "database_url"])
async def test_a_service_that_is_away_at_the_start_is_waited_for_or_told(
    installation: environment.Installation, start_worker: workers.Starter, url: str
) -> None:
    away: dict[str, Any] = {
        "broker_url": f"amqp://guest:guest@127.0.0.1:{tgtd_service.free_port()}/",
        "database_url": f"postgresql://postgres@127.0.0.1:{tgtd_service.free_port()}/x",
    }
    worker = start_worker.new("host-a", **{url: away[url]})
    worker.spawn()
    await asyncio.sleep(3)
    if worker.is_running:
        assert not await worker.is_ready()
        await worker.terminate()
    else:
        assert await worker.ended() == 3
