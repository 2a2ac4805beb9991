"""A database that goes away, refuses, is full, or stands still: real ones, of the tests' own."""

import asyncio
import contextlib
import json
import pathlib
import uuid
from collections.abc import AsyncIterator, Callable

import asyncpg
import pydantic
import pytest

import sql
from messages import errors
from tests.faults.test_broker_outage import copy_of, is_moving, new_volume, two_volumes
from tests.services import (
    amqp,
    environment,
    private_database,
    private_pooler,
    stalling,
    workers,
)
from tests.services.private import Site, ready
from tests.services.volumes import MIB
from worker.store import database


def said(worker: workers.Worker, event: str) -> int:
    """How often a worker has logged an event."""
    lines = worker.log.read_text().splitlines()
    return len([line for line in lines if json.loads(line)["event"] == event])


@pytest.mark.parametrize(
    "end", [pytest.param("stop", marks=pytest.mark.faults(sampled=False)), "kill"]
)
async def test_what_is_asked_around_the_end_of_the_database_is_answered_once(
    server: private_database.PrivateDatabase, on_server: Site, end: str
) -> None:
    worker = await on_server.start_worker("host-a")
    at, box = worker.at("sim"), on_server.box
    ending: Callable[[], None] = getattr(server, end)
    first = await box.send(at, *[new_volume()] * 20)
    await asyncio.to_thread(ending)
    second = await box.send(at, *[new_volume()] * 20)
    await ready(worker, on=False)
    await asyncio.sleep(2)
    await asyncio.to_thread(server.start)
    for reply in await box.only_results([*first, *second]):
        assert reply.body["ok"]
    await ready(worker, on=True)
    rows = await on_server.installation.rows("SELECT count(*) FROM volumes")
    assert rows[0]["count"] == 40
    # Once for the whole outage, however many statements were tried meanwhile.
    assert said(worker, "database.away") == said(worker, "database.back") == 1


async def test_a_database_that_becomes_read_only_is_left_and_waited_for(
    server: private_database.PrivateDatabase, on_server: Site
) -> None:
    worker = await on_server.start_worker("host-a")
    at, box = worker.at("sim"), on_server.box
    await box.only_results(await box.send(at, new_volume()))
    await asyncio.to_thread(lambda: server.set_read_only(on=True))
    await ready(worker, on=False)
    jobs = await box.send(at, *[new_volume()] * 10)
    async with asyncio.timeout(20):
        # It has let go of every connection: the next one has to lead to a server that writes.
        while await connections(server, on_server):
            await asyncio.sleep(0.1)
    await asyncio.to_thread(lambda: server.set_read_only(on=False))
    for reply in await box.only_results(jobs):
        assert reply.body["ok"]
    await ready(worker, on=True)


async def connections(server: private_database.PrivateDatabase, site: Site) -> int:
    """How many connections the workers of an installation have."""
    name = site.installation.database_url.rpartition("/")[2]
    rows = await asyncio.to_thread(
        server.execute,
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'volume-worker'"
        f" AND datname = '{name}'",
    )
    return int(rows[0]["count"])


class Crowd:
    """Clients that take every connection that a server still has to give."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._inside: list[asyncpg.Connection[asyncpg.Record]] = []

    async def fill(self) -> None:
        """Takes all that is free now."""
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                self._inside.append(await asyncpg.connect(self._url))

    async def throw_out(self, worker: workers.Worker) -> None:
        """Ends a worker's connections, and takes their places, until it has none."""
        async with asyncio.timeout(30):
            while await worker.is_ready():
                await self._inside[0].execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'volume-worker'"
                )
                await self.fill()

    async def leave(self) -> None:
        """Lets go of all."""
        for one in self._inside:
            await one.close()
        self._inside = []


@contextlib.asynccontextmanager
async def full(server: private_database.PrivateDatabase) -> AsyncIterator[Crowd]:
    """A server that lets nobody else in."""
    crowd = Crowd(server.url)
    try:
        await crowd.fill()
        yield crowd
    finally:
        await crowd.leave()


async def test_a_worker_that_is_inside_goes_on_while_the_server_lets_nobody_else_in(
    server: private_database.PrivateDatabase, on_server: Site
) -> None:
    worker = await on_server.start_worker("host-a")
    at, box = worker.at("sim"), on_server.box
    await box.only_results(await box.send(at, *[new_volume()] * 10))
    async with full(server):
        jobs = await box.send(at, *[new_volume()] * 50)
        for reply in await box.only_results(jobs):
            assert reply.body["ok"]
        assert await worker.is_ready()


async def test_a_worker_that_lost_its_place_in_a_full_server_waits_for_another(
    server: private_database.PrivateDatabase, on_server: Site
) -> None:
    worker = await on_server.start_worker("host-a")
    at, box = worker.at("sim"), on_server.box
    async with full(server) as crowd:
        await crowd.throw_out(worker)
        jobs = await box.send(at, *[new_volume()] * 10)
        await asyncio.sleep(2)
        assert worker.is_running
    for reply in await box.only_results(jobs):
        assert reply.body["ok"]
    await ready(worker, on=True)


async def test_one_connection_serves_fifty_at_once(
    installation: environment.Installation,
) -> None:
    async with database.connect(pydantic.SecretStr(installation.database_url), size=1) as store:
        answers = await asyncio.gather(*(store.row("is_writable") for _ in range(50)))
    assert all(answer is not None and answer["writable"] for answer in answers)


# A pooler gives each transaction another connection.


async def test_jobs_and_copies_are_done_through_a_transaction_pooler(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    tmp_path: pathlib.Path,
) -> None:
    with private_pooler.before(installation.database_url, tmp_path / "pooler", size=3) as url:
        worker = await start_worker("host-a", database_url=url, database_statement_cache_size=0)
        at, size = worker.at("fast"), MIB
        made = await asyncio.gather(
            *(caller.call("create_volume", at, new_volume(size)[1]) for _ in range(24))
        )
        pairs = zip(made[:12], made[12:], strict=True)
        copies = [copy_of((source["id"], destination["id"])) for source, destination in pairs]
        results = await asyncio.gather(
            *(caller.call(method, at, args, timeout=90) for method, args in copies),
            *(caller.call("create_volume", worker.at("sim"), new_volume()[1]) for _ in range(24)),
        )
        assert len(results) == 36
        await asyncio.gather(
            *(caller.call("delete_volume", at, {"volume_id": one["id"]}) for one in made)
        )
        assert await worker.is_ready()
        await worker.terminate()


@pytest.mark.parametrize("ignored", ["", "jit"])
async def test_a_pooler_and_a_statement_cache_are_told_with_the_setting_that_is_wrong(
    installation: environment.Installation, tmp_path: pathlib.Path, ignored: str
) -> None:
    async def use(url: str) -> None:
        texts = sql.queries()
        async with database.connect(pydantic.SecretStr(url)) as store:
            while True:
                await asyncio.gather(
                    *(store._fetch_once(texts["get_job"], [uuid.uuid4()], 30) for _ in range(20)),
                    *(store._fetch_once(texts["is_writable"], [], 30) for _ in range(20)),
                )

    with (
        private_pooler.before(
            installation.database_url, tmp_path / "pooler", size=2, ignored=ignored
        ) as url,
        pytest.raises(errors.Unreachable, match="database_statement_cache_size = 0"),
    ):
        await use(url)


# A database that stands still says nothing: whoever waits for it has to know when to stop.


async def test_a_database_that_stands_still_is_noticed_and_leases_are_kept_to(
    installation: environment.Installation,
    start_worker: workers.Starter,
    tmp_path: pathlib.Path,
) -> None:
    with stalling.before(installation.database_url) as way:
        worker = await start_worker("host-a", database_url=way.url, lease=6)
        at = worker.at("fast")
        site = Site(installation, start_worker, None)  # type: ignore[arg-type]
        pair = await two_volumes(site, at, 8 * MIB)
        async with amqp.Caller.open(installation.broker_url, installation.namespace) as caller:
            method, args = copy_of(pair, bytes_per_second=MIB)
            sent = await caller.send(method, at, args)
            assert sent.message_id is not None
            await is_moving(site, uuid.UUID(sent.message_id))
            way.stall()
            await ready(worker, on=False, timeout=15)
            # The copy is ended before another worker might begin with it.
            async with asyncio.timeout(20):
                while not said(worker, "job.lease_lost"):
                    await asyncio.sleep(0.05)
            way.go_on()
            assert (await caller.only_result(sent, timeout=60)).body["ok"]
            await ready(worker, on=True)
        await worker.terminate()
