"""What a broker, or whoever looks after one, does to a worker that is connected, or wants to be."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pytest

from messages import topology
from tests.services import (
    amqp,
    environment,
    private_broker,
    stalling,
    tcp_proxy,
    volumes,
    workers,
)
from tests.services.private import Site, ready

ONLY_WITH_ALL: Final = pytest.mark.faults(sampled=False)
"""A test that takes its time: it runs where all are asked for."""


def errors_in(worker: workers.Worker, event: str) -> list[str]:
    """What a worker has logged as errors of one kind."""
    lines = worker.log.read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        str(one.get("error")) for one in found if one["event"] == event and one["level"] == "error"
    ]


@contextlib.asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """A channel for the time of the block."""
    connection = await aio_pika.connect(url)
    async with connection:
        yield await connection.channel()


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("login", "broker_url's credentials"),
        pytest.param("vhost", "the end of broker_url", marks=ONLY_WITH_ALL),
    ],
)
async def test_a_broker_that_refuses_its_login_is_told_once_and_with_what_to_look_at(
    installation: environment.Installation, start_worker: workers.Starter, change: str, hint: str
) -> None:
    parts = urlsplit(installation.broker_url)
    if change == "login":
        wrong = parts._replace(netloc=f"nobody:hunter2@{parts.hostname}:{parts.port}")
    else:
        wrong = parts._replace(path="/no-such-vhost")
    worker = start_worker.new("host-a", broker_url=urlunsplit(wrong))
    worker.spawn()
    links = 4  # its own two, and those of its calls to others
    async with asyncio.timeout(30):
        while len(errors_in(worker, "broker.refused")) < links:
            assert worker.is_running
            await asyncio.sleep(0.05)
    await asyncio.sleep(3)  # some more tries
    told = errors_in(worker, "broker.refused")
    assert len(told) == links
    assert all(hint in one for one in told)
    assert "hunter2" not in worker.log.read_text()
    assert not await worker.is_ready()
    await worker.terminate()


@pytest.mark.parametrize(
    ("argument", "theirs"), [("x-delivery-limit", 7), ("x-overflow", "drop-head")]
)
async def test_a_queue_with_other_arguments_ends_a_live_worker_with_one_error_when_its_link_drops(
    installation: environment.Installation,
    start_worker: workers.Starter,
    argument: str,
    theirs: int | str,
) -> None:
    ours: dict[str, int | str] = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": f"{installation.namespace}.dead",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": 100,
    }
    async with tcp_proxy.before(installation.broker_url) as (proxy, url):
        worker = await start_worker("host-a", backends={"sim": workers.SIM}, broker_url=url)
        queue = f"{installation.namespace}.{worker.at('sim')}"
        await proxy.stop()
        await proxy.cut()
        async with channel_to(installation.broker_url) as channel:
            await channel.queue_delete(queue)
            await channel.declare_queue(queue, durable=True, arguments={**ours, argument: theirs})
        await proxy.start()
        assert await worker.ended() == 1
    lines = [line for line in worker.log.read_text().splitlines() if argument in line]
    assert len(lines) <= 2
    assert all(part in lines[-1] for part in (queue, argument, str(ours[argument]), str(theirs)))


@ONLY_WITH_ALL
async def test_a_queue_that_is_deleted_and_made_again_by_others_gets_its_consumer_back(
    installation: environment.Installation, start_worker: workers.Starter
) -> None:
    worker = await start_worker("host-a", backends={"sim": workers.SIM})
    queue = f"{installation.namespace}.{worker.at('sim')}"
    async with (
        channel_to(installation.broker_url) as channel,
        amqp.Caller.open(installation.broker_url, installation.namespace) as caller,
    ):
        declared = topology.Topology(installation.namespace).queue_arguments()
        await channel.queue_delete(queue)
        # Within a few milliseconds RabbitMQ 3.10 gives the new queue the consumer of the old one,
        # tells nobody, and delivers nothing to it: no client can know (see the README).
        await asyncio.sleep(0.2)
        again = await channel.declare_queue(queue, durable=True, arguments=dict(declared))
        await again.bind(installation.namespace, worker.at("sim"))
        new = {"volume": {"name": "v", "size_bytes": 1024**2}}
        assert await caller.call("create_volume", worker.at("sim"), new, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", marks=ONLY_WITH_ALL),
        ".events",
        pytest.param(".dead", marks=ONLY_WITH_ALL),
    ],
)
async def test_an_exchange_that_is_removed_under_a_worker_is_made_again_and_no_answer_is_lost(
    installation: environment.Installation, start_worker: workers.Starter, name: str
) -> None:
    worker = await start_worker("host-a", backends={"sim": workers.SIM})
    async with (
        channel_to(installation.broker_url) as channel,
        amqp.Caller.open(installation.broker_url, installation.namespace) as caller,
    ):
        new = {"volume": {"name": "v", "size_bytes": 1024**2}}
        sent = [await caller.send("create_volume", worker.at("sim"), new) for _ in range(20)]
        await channel.exchange_delete(installation.namespace + name)
        if name == ".dead":
            await channel.queue_delete(installation.namespace + name)
        for one in sent:
            assert (await caller.result(one)).body["ok"]
        # What is told next finds it missing, or the next look does.
        async with asyncio.timeout(90):
            while not await exists(installation, name):
                await asyncio.sleep(0.2)


async def exists(installation: environment.Installation, name: str) -> bool:
    """Whether an exchange of the installation is on the broker."""
    async with channel_to(installation.broker_url) as channel:
        try:
            await channel.get_exchange(installation.namespace + name, ensure=True)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
    return True


async def test_a_link_on_which_nothing_moves_is_noticed_by_its_heartbeat(
    installation: environment.Installation, start_worker: workers.Starter
) -> None:
    with stalling.before(installation.broker_url) as way:
        worker = await start_worker("host-a", broker_url=f"{way.url}?heartbeat=1")
        way.stall()
        began = time.monotonic()
        await ready(worker, on=False)
        assert time.monotonic() - began < 25
        way.go_on()
        await ready(worker, on=True)
        async with amqp.Caller.open(installation.broker_url, installation.namespace) as caller:
            new = {"volume": {"name": "v", "size_bytes": 1024**2}}
            assert await caller.call("create_volume", worker.at("sim"), new)
        await worker.terminate()


# A delivery is acknowledged once it is stored, however long its job takes then.


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(1, 11), pytest.param(3, 31, marks=ONLY_WITH_ALL)],
)
async def test_a_job_ten_times_longer_than_the_brokers_patience_runs_once(
    node: private_broker.PrivateBroker, on_node: Site, limit: float, seconds: int
) -> None:
    node.set_consumer_timeout(limit, look_every=0.3)
    try:
        worker = await on_node.start_worker("host-a")
        at, size = worker.at("fast"), 4 * 1024**2
        async with on_node.client() as caller:
            source, destination = [
                await caller.call("create_volume", at, {"volume": {"name": n, "size_bytes": size}})
                for n in ("source", "destination")
            ]
            await fill(on_node, at, source["id"], size)
            args = {
                "source_volume_id": source["id"],
                "destination_volume_id": destination["id"],
                "remote": None,
                "bytes_per_second": size // seconds,
            }
            result = await caller.call("copy_volume_data", at, args, timeout=90)
        assert result["seconds"] > limit * 10
        rows = await on_node.installation.rows("SELECT attempt FROM jobs WHERE slot = 'data'")
        assert [row["attempt"] for row in rows] == [1]
        assert "broker.connection_lost" not in worker.log.read_text()
    finally:
        node.set_consumer_timeout(1800, look_every=60)


async def fill(site: Site, at: str, volume: str, size: int) -> None:
    """Writes data all over a volume."""
    async with amqp.Caller.open(
        site.installation.broker_url, site.installation.namespace
    ) as caller:
        await volumes.Volumes(caller).write(volumes.Volume(volume, at, size), {0: b"d" * size})
