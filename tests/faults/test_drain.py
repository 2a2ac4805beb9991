"""Workers that are told to end while something hangs, and whatever their process is to others."""

import asyncio
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import aio_pika
import pytest

from tests.services import amqp, children, environment, misbehaving, stalling, tgtd, workers
from tests.services import volumes as volumes_service
from tests.services.volumes import INITIATOR, MIB

SIZE: Final = 4 * MIB
PATIENCE: Final = 40.0
"""Seconds for a worker to end, on a slow machine; what hangs does so for minutes."""
HASTY: Final = (sys.executable, str(pathlib.Path(__file__).with_name("hasty_worker.py")))
IN_A_PID_NAMESPACE: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy that runs for some seconds."""

    sent: amqp.Sent
    source: volumes_service.Volume
    destination: volumes_service.Volume


async def start_copy(
    caller: amqp.Caller,
    made: volumes_service.Volumes,
    at: str,
    *,
    serving: str | None = None,
    seconds: float = 2.5,
) -> Copy:
    """Has the worker at an address copy between two volumes of ``serving``; it moves already."""
    source = await made.create(serving or at, SIZE)
    destination = await made.create(serving or at, SIZE)
    await made.write(source, {0: b"d" * SIZE})
    sent = await caller.send(
        "copy_volume_data",
        at,
        {**made.pair(source, destination), "bytes_per_second": int(SIZE / seconds)},
        headers={"status-updates": True},
    )
    await amqp.eventually(lambda: has_progress(caller, sent), what="progress")
    return Copy(sent, source, destination)


def has_progress(caller: amqp.Caller, sent: amqp.Sent) -> bool:
    """Whether a copy has moved bytes."""
    return any(
        (status.body["progress"] or {}).get("done_bytes", 0) > 0 for status in caller.statuses(sent)
    )


async def stored(site: environment.Installation, sent: amqp.Sent) -> tuple[str, int]:
    """A job's state and attempts, as they stand in the table."""
    [row] = await site.rows("SELECT state, attempt FROM jobs WHERE id = $1::uuid", sent.message_id)
    return str(row["state"]), int(row["attempt"])


async def assert_copied(
    caller: amqp.Caller, made: volumes_service.Volumes, copy: Copy, *, timeout: float = 60
) -> None:
    """The copy ends well, is answered once, and leaves nothing."""
    assert (await caller.result(copy.sent, timeout=timeout)).body["ok"]
    assert await made.content(copy.destination) == b"d" * SIZE
    for volume in (copy.source, copy.destination):
        record = await made.record(volume)
        assert record["status"] == "available"
        assert record["connections"] == []
    assert len(caller.results(copy.sent)) == 1


def events(worker: workers.Worker, name: str) -> list[dict[str, Any]]:
    """The lines of its log so far with this event."""
    return [line for line in worker.log_lines() if line["event"] == name]


def copiers(worker: workers.Worker) -> list[children.Found]:
    """The processes that copy for a worker."""
    return [one for one in worker.leftovers() if "worker.transfer.copier" in one.command]


# Signals


async def test_more_signals_than_two_put_a_job_back_and_do_no_harm(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    a = await start_worker("host-a", max_attempts=1)
    copy = await start_copy(caller, volumes, a.at("fast"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        a.signal(number)
        await asyncio.sleep(0.05)
    assert await a.ended(PATIENCE) == 0
    assert await stored(installation, copy.sent) == ("queued", 0)
    assert a.log_lines()[-1]["event"] == "service.stopped"
    await a.start()
    await assert_copied(caller, volumes, copy)


async def test_a_signal_to_the_whole_process_group_ends_no_job_and_no_export(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    a = await start_worker("host-a")
    served = await volumes.create(a.at("fast"))
    await volumes.connect(served)
    copy = await start_copy(caller, volumes, a.at("fast"))
    [copier] = copiers(a)
    assert os.getpgid(copier.pid) != os.getpgid(a.pid) == a.pid
    os.killpg(a.pid, signal.SIGTERM)
    assert await a.ended(PATIENCE) == 0
    assert (await caller.result(copy.sent, timeout=1)).body["ok"]
    assert a.nbd_serves()
    await a.start()
    await assert_copied(caller, volumes, copy)


async def test_a_worker_that_drains_is_not_ready_and_takes_no_request(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    a = await start_worker("host-a")
    copy = await start_copy(caller, volumes, a.at("fast"), seconds=4)
    a.signal(signal.SIGTERM)
    await amqp.eventually(lambda: a.readyz()[0] == 503, what="/readyz saying no")
    new = {"volume": {"name": "v", "size_bytes": MIB}}
    sent = await caller.send("create_volume", a.at("fast"), new)
    assert await a.ended(PATIENCE) == 0
    assert (await caller.result(copy.sent, timeout=1)).body["ok"]
    [(count,)] = await installation.rows(
        "SELECT count(*) FROM jobs WHERE id = $1::uuid AND state <> 'queued'", sent.message_id
    )
    assert count == 0
    await a.start()
    volumes.adopt((await caller.result(sent)).body["result"])


# What hangs


async def start_hasty(start: workers.Starter, **options: Any) -> workers.Worker:
    """Starts a worker that has less patience with what hangs than it would have."""
    made = start.new("host-a", **options)
    made.command = HASTY
    await made.start()
    return made


async def test_tools_that_hang_do_not_hold_up_the_end(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    hangs = tmp_path / "hangs"
    hang = "trap '' TERM; sleep 300 & wait"
    env = misbehaving.tgtadm(
        tmp_path / "tools",
        misbehaving.NEW_TARGET,
        f"touch {hangs}; {hang}",
        always=f"[ -e {hangs} ] && {{ {hang}; }}",
    )
    a = await start_hasty(
        start_worker,
        backends={"iscsi": misbehaving.BACKEND},
        env=env,
        drain_timeout=0.2,
        max_attempts=1,
    )
    volume = await volumes.create(a.at("iscsi"))
    connector = {"host": "client", "initiator": INITIATOR}
    sent = await caller.send(
        "initialize_connection", a.at("iscsi"), {**volume.at, "connector": connector}
    )
    await amqp.eventually(hangs.exists, what="a tool that hangs")
    a.signal(signal.SIGTERM)
    assert await a.ended(PATIENCE) == 0
    assert await stored(installation, sent) == ("queued", 0)
    assert a.leftovers() == []
    hangs.unlink()
    misbehaving.tgtadm(tmp_path / "tools", "no such operation", ":")
    await a.start()
    assert (await caller.result(sent)).body["ok"]


async def test_a_storage_daemon_that_hangs_does_not_hold_up_the_end(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes_service.Volumes
) -> None:
    a = await start_hasty(start_worker, drain_timeout=0.2, lease=3)
    volume = await volumes.create(a.at("fast"))
    await volumes.connect(volume)
    [server] = [one for one in a.leftovers() if "nbd-server" in one.command]
    os.kill(server.pid, signal.SIGSTOP)
    try:
        connector = {"host": "other", "initiator": INITIATOR}
        sent = await caller.send(
            "initialize_connection",
            a.at("fast"),
            {**volume.at, "connector": connector},
            headers={"status-updates": True},
        )
        await amqp.eventually(lambda: caller.statuses(sent) or None, what="the job's start")
        a.signal(signal.SIGTERM)
        assert await a.ended(PATIENCE) == 0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await a.start()
    assert (await caller.only_result(sent, timeout=60)).body["ok"]


async def test_a_broker_that_answers_nothing_does_not_hold_up_the_end(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    with stalling.before(installation.broker_url) as way:
        a = await start_hasty(start_worker, broker_url=way.url, drain_timeout=0.2)
        copy = await start_copy(caller, volumes, a.at("fast"))
        way.stall()
        a.signal(signal.SIGTERM)
        assert await a.ended(PATIENCE) == 0
        assert await stored(installation, copy.sent) == ("queued", 0)
        way.go_on()
        await a.start()
        await assert_copied(caller, volumes, copy)
        await volumes.clean()
        await a.terminate()


async def test_a_database_that_answers_nothing_does_not_hold_up_the_end(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    with stalling.before(installation.database_url) as way:
        a = await start_hasty(start_worker, database_url=way.url, drain_timeout=0.2, lease=3)
        copy = await start_copy(caller, volumes, a.at("fast"))
        way.stall()
        # A claim is on its way by then: it is looked for jobs each second.
        await asyncio.sleep(1.5)
        a.signal(signal.SIGTERM)
        assert await a.ended(PATIENCE) == 0
        assert a.leftovers() == [] or all("nbd-server" in one.command for one in a.leftovers())
        way.go_on()
        await a.start()
        await assert_copied(caller, volumes, copy)
        await volumes.clean()
        await a.terminate()


# A part that dies


async def test_a_part_that_dies_ends_the_worker_with_an_error_and_loses_no_job(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    a = await start_worker("host-a", max_attempts=1)
    copy = await start_copy(caller, volumes, a.at("fast"))
    queue = f"{installation.namespace}.{a.at('fast')}"
    async with await aio_pika.connect(installation.broker_url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(queue)
        # No worker can use a queue with other arguments than it must have.
        await channel.declare_queue(queue, durable=True, arguments={"x-max-length": 7})
        assert await a.ended(PATIENCE) == 1
        await channel.queue_delete(queue)
    *lines, last = a.log.read_text().splitlines()
    assert last.startswith("volume-worker: the worker ends: its broker link failed")
    assert len([line for line in lines if "service.part_died" in line]) == 1
    assert await stored(installation, copy.sent) == ("queued", 0)
    a.log.write_text("")
    await a.start()
    await assert_copied(caller, volumes, copy)


# PID 1


def _inside(worker: workers.Worker) -> int:
    """The pid, seen from here, of the worker that is PID 1 in a namespace of its own."""
    found = subprocess.run(
        ["pgrep", "--parent", str(worker.pid)], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def _of_parent(pid: int) -> Iterator[str]:
    """The names of all children of a process, zombies too."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(after.split()[1]) == pid:
            yield before.partition("(")[2]


async def test_a_worker_that_is_pid_1_reaps_what_it_inherits_and_drains(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
    tmp_path: pathlib.Path,
) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*IN_A_PID_NAMESPACE, "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this machine lets nobody make a PID namespace")
    orphan = f"setsid sleep 0.2 </dev/null >/dev/null 2>&1 & echo >>{tmp_path}/orphans"
    env = misbehaving.tgtadm(tmp_path / "tools", "no such operation", ":", always=orphan)
    backends = {"fast": workers.FAST, "iscsi": misbehaving.BACKEND}
    a = start_worker.new("host-a", backends=backends, env=env)
    a.command = (*IN_A_PID_NAMESPACE, workers.COMMAND)
    await a.start()
    inside = _inside(a)
    volume = await volumes.create(a.at("iscsi"))
    info = await volumes.connect(volume)
    await volumes.disconnect(volume, info["connection_id"])
    assert len((tmp_path / "orphans").read_text()) > 3
    await amqp.eventually(lambda: "sleep" not in _of_parent(inside), what="the end of the orphans")
    copy = await start_copy(caller, volumes, a.at("fast"))
    await volumes.delete(volume)
    os.kill(inside, signal.SIGTERM)
    assert await a.ended(PATIENCE) == 0
    assert (await caller.result(copy.sent, timeout=1)).body["ok"]
    assert events(a, "service.draining")
    a.command = (workers.COMMAND,)
    await a.start()
    await assert_copied(caller, volumes, copy)


# systemd


class Systemd:
    """The other end of the protocol of sd_notify(3)."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(30)
        self._socket.bind(str(folder / "notify"))
        self.env = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1000000"}

    async def hear(self, *lines: str) -> list[str]:
        """Waits for a message with these lines; returns all lines that came until then."""
        heard = []
        while True:
            message = (await asyncio.to_thread(self._socket.recv, 4096)).decode().splitlines()
            heard += message
            if set(lines) <= set(message):
                return heard

    def close(self) -> None:
        """Hears no more."""
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: pathlib.Path) -> Iterator[Systemd]:
    """Listens for what a worker started with its ``env`` tells."""
    made = Systemd(tmp_path)
    yield made
    made.close()


async def test_systemd_is_told_that_a_worker_is_ready_when_it_takes_requests(
    start_worker: workers.Starter, systemd: Systemd
) -> None:
    broker_url = f"amqp://127.0.0.1:{tgtd.free_port()}/"
    a = start_worker.new("host-a", env=systemd.env, broker_url=broker_url)
    a.spawn()
    waits = ["STATUS=waiting for the broker", "EXTEND_TIMEOUT_USEC=30000000"]
    assert "READY=1" not in await systemd.hear(*waits)
    await a.terminate()
    assert "READY=1" not in await systemd.hear("STOPPING=1")


async def test_systemd_is_told_of_the_start_the_watchdog_and_the_end_by_the_worker_alone(
    start_worker: workers.Starter, volumes: volumes_service.Volumes, systemd: Systemd
) -> None:
    a = await start_worker("host-a", env=systemd.env)
    await systemd.hear("READY=1", "STATUS=serves host-a@fast, host-a@sim")
    await volumes.connect(await volumes.create(a.at("fast")))
    await systemd.hear("WATCHDOG=1")
    # The worker's first environment has it, and no child's.
    told = [one.pid for one in children.mentioning(systemd.env["NOTIFY_SOCKET"])]
    assert told == [a.pid]
    assert a.leftovers()
    await volumes.clean()
    await a.terminate()
    await systemd.hear("STOPPING=1")


# A worker that stands still


async def test_a_worker_that_wakes_up_spoils_nothing_of_who_took_its_copy_over(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    volumes: volumes_service.Volumes,
) -> None:
    a = await start_worker("host-a", lease=3)
    backends = {"sim": workers.SIM}
    one = await start_worker("host-b", backends=backends, lease=3)
    copy = await start_copy(caller, volumes, one.at("sim"), serving=a.at("fast"), seconds=5)
    two = workers.Worker(
        installation,
        "host-b",
        one.folder.parent / "second",
        backends=backends,
        settings={"lease": 3},
    )
    try:
        one.signal(signal.SIGSTOP)
        await two.start()
        await amqp.eventually(lambda: copiers(two), what="the copier of attempt 2")
        assert copiers(one) == []
        one.signal(signal.SIGCONT)
        await assert_copied(caller, volumes, copy)
        assert await stored(installation, copy.sent) == ("succeeded", 2)
        assert events(one, "job.lease_lost")
        assert one.is_running
    finally:
        one.signal(signal.SIGCONT)
        two.close()
