"""What stands on the broker, and what a worker says over HTTP."""

import asyncio
import http.client

import aio_pika
import pytest

from tests.acceptance.conftest import Hosts
from tests.services import amqp, environment, volumes, workers
from tests.services.volumes import MIB


async def test_the_topology_is_the_contracts(hosts: Hosts) -> None:
    namespace = hosts.installation.namespace
    connection = await aio_pika.connect(hosts.installation.broker_url)
    async with connection:
        channel = await connection.channel()
        # To declare what is there with other arguments is an error.
        for name, kind in (("", "topic"), (".events", "topic"), (".dead", "fanout")):
            await channel.declare_exchange(namespace + name, kind, durable=True)
        for address in hosts.installation.addresses:
            await channel.declare_queue(
                f"{namespace}.{address}",
                durable=True,
                arguments={
                    "x-queue-type": "quorum",
                    "x-dead-letter-exchange": f"{namespace}.dead",
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                    "x-delivery-limit": 100,
                },
            )
        await channel.declare_queue(
            f"{namespace}.dead",
            durable=True,
            arguments={"x-queue-type": "quorum", "x-delivery-limit": 2147483647},
        )
        dead = await channel.get_exchange(f"{namespace}.dead")
        await dead.publish(aio_pika.Message(b"bound", correlation_id="bound"), "", mandatory=True)
    assert [one.body for one in await hosts.caller.letters_with("bound")] == [b"bound"]


async def test_a_queue_with_other_arguments_ends_the_worker_with_one_clear_error(
    installation: environment.Installation, start_worker: workers.Starter
) -> None:
    worker = start_worker.new("host-a")
    connection = await aio_pika.connect(installation.broker_url)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue(f"{installation.namespace}.{worker.at('fast')}", durable=True)
    worker.spawn()
    assert await worker.ended() == 1
    text = worker.log.read_text()
    assert worker.at("fast") in text
    assert len(text.splitlines()) < 40


async def test_requests_wait_in_the_queue_while_the_worker_is_away(
    start_worker: workers.Starter, caller: amqp.Caller, volumes: volumes.Volumes
) -> None:
    worker = await start_worker("host-a")
    volume = await volumes.create(worker.at("fast"))
    await worker.terminate()
    sent = [
        await caller.send("extend_volume", volume.address, {**volume.at, "new_size_bytes": size})
        for size in (2 * MIB, 3 * MIB)
    ]
    read = await caller.send("get_volume", volume.address, volume.at)
    await asyncio.sleep(0.3)
    assert caller.replies == caller.results(sent[0]) + [
        reply for reply in caller.replies if reply.body["method"] == "create_volume"
    ]
    await worker.start()
    sizes = [(await caller.only_result(one)).body["result"]["size_bytes"] for one in sent]
    assert sizes == [2 * MIB, 3 * MIB]
    assert (await caller.result(read)).body["ok"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/livez", 200),
        ("GET", "/readyz", 200),
        ("HEAD", "/readyz", 200),
        ("GET", "/", 404),
        ("GET", "/readyz/../../etc/passwd", 404),
        ("POST", "/readyz", 405),
    ],
)
async def test_health_is_told_over_http(hosts: Hosts, method: str, path: str, status: int) -> None:
    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", hosts.a.http_port, timeout=10)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    found, body = await asyncio.to_thread(ask)
    assert found == status
    assert (body == b"") == (method == "HEAD")
    _, checks = await asyncio.to_thread(hosts.a.readyz)
    assert checks["broker"] is True
    assert checks["database"] is True
    assert checks[hosts.a.at("fast")] is True


async def test_every_log_line_is_one_json_object(hosts: Hosts) -> None:
    await hosts.volumes.create(hosts.a.at("fast"), name="a\u2028b")
    await hosts.caller.publish(b"\xff\n{", hosts.a.at("fast"))
    await hosts.assert_at_work()
    for line in hosts.a.log_lines():
        assert {"event", "level", "timestamp"} <= set(line)
