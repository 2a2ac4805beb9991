"""Replies that get lost on their way to a caller, and what the caller's client does about it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aio_pika
import pytest

from messages import client, errors
from tests.services import environment, tcp_proxy, workers

SIZE = 1024**2


@pytest.fixture
async def at(start_worker: workers.Starter) -> str:
    """The address of a worker's backend."""
    worker = await start_worker("host-a", backends={"sim": workers.SIM})
    return worker.at("sim")


@pytest.fixture
async def proxied(
    installation: environment.Installation,
) -> AsyncIterator[tuple[tcp_proxy.Proxy, client.Client]]:
    """A client whose way to the broker the test can trouble."""
    async with (
        tcp_proxy.before(installation.broker_url) as (proxy, url),
        client.Client(f"{url}?heartbeat=1", namespace=installation.namespace) as made,
    ):
        yield proxy, made


def new_volume() -> dict[str, Any]:
    """The arguments of a create."""
    return {"volume": {"name": "v", "size_bytes": SIZE}}


async def jobs_and_volumes(installation: environment.Installation) -> tuple[int, int]:
    """How many of each there are."""
    [row] = await installation.rows(
        "SELECT (SELECT count(*) FROM jobs), (SELECT count(*) FROM volumes)"
    )
    return row[0], row[1]


async def test_a_call_whose_reply_queue_was_deleted_ends_with_its_result(
    installation: environment.Installation, start_worker: workers.Starter
) -> None:
    """The worker finds nobody to answer, and the client asks again under the same message id."""
    worker = start_worker.new("host-a", backends={"sim": workers.SIM})
    await worker.start()
    await worker.terminate()  # its queue is there, and the request waits in it
    async with client.Client(installation.broker_url, namespace=installation.namespace) as calling:
        call = asyncio.create_task(
            calling.call("create_volume", worker.at("sim"), new_volume(), timeout=60)
        )
        await calling._replies.ready()
        connection = await aio_pika.connect(installation.broker_url)
        async with connection:
            channel = await connection.channel()
            await channel.queue_delete(calling._reply_queue)
        await worker.start()
        result = await call
    assert result["size_bytes"] == SIZE
    assert await jobs_and_volumes(installation) == (1, 1)


async def test_a_reply_that_went_to_a_connection_lost_while_the_request_was_confirmed_is_had(
    installation: environment.Installation,
    at: str,
    proxied: tuple[tcp_proxy.Proxy, client.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the time that the confirm has come, the next connection is there, and all looks well."""
    calling = proxied[1]
    publish, take = calling._publisher.publish, calling._take_reply
    lost = asyncio.Event()

    async def lose(_: Any) -> None:
        lost.set()

    async def publish_late(*args: Any, **options: Any) -> None:
        await publish(*args, **options)
        if not lost.is_set():
            await lost.wait()
            monkeypatch.setattr(calling, "_take_reply", take)
            await again(calling)

    monkeypatch.setattr(calling, "_take_reply", lose)
    await again(calling)
    monkeypatch.setattr(calling._publisher, "publish", publish_late)
    assert (await calling.call("create_volume", at, new_volume(), timeout=30))["id"]
    assert lost.is_set()
    assert await jobs_and_volumes(installation) == (1, 1)


async def again(calling: client.Client) -> None:
    """Ends the connection that replies come by, and waits for the next one."""
    await calling._replies.ready()
    assert calling._queue is not None
    channel: Any = await calling._queue.channel.get_underlay_channel()
    await channel.connection.close()
    async with asyncio.timeout(20):
        while calling._replies.is_up:
            await asyncio.sleep(0.01)
        await calling._replies.ready()


async def test_calls_survive_a_link_on_which_nothing_moves(
    installation: environment.Installation,
    at: str,
    proxied: tuple[tcp_proxy.Proxy, client.Client],
) -> None:
    proxy, calling = proxied
    await calling.call("create_volume", at, new_volume())
    proxy.stall()
    calls = [
        asyncio.create_task(calling.call("create_volume", at, new_volume(), timeout=90))
        for _ in range(20)
    ]
    async with asyncio.timeout(40):
        while calling._replies.is_up or calling._publisher.link.is_up:
            await asyncio.sleep(0.05)
    proxy.heal()
    assert len({(await call)["id"] for call in calls}) == 20
    assert await jobs_and_volumes(installation) == (21, 21)


async def test_a_client_whose_login_is_refused_says_so(
    installation: environment.Installation,
) -> None:
    parts = urlsplit(installation.broker_url)
    wrong = parts._replace(netloc=f"nobody:hunter2@{parts.hostname}:{parts.port}").geturl()
    async with client.Client(wrong, namespace=installation.namespace) as calling:
        with pytest.raises(errors.Unreachable, match="refuses broker_url's credentials") as raised:
            await calling.cast("create_volume", "host-a@sim", new_volume(), timeout=3)
    assert "hunter2" not in str(raised.value)
