"""Fixtures: an installation whose broker, or whose database, is the test's own to trouble."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Iterator

import pytest

from messages import client
from tests.services import (
    environment,
    mailbox,
    private_broker,
    private_database,
    workers,
)


class Site:
    """An installation with what tests of outages need of it."""

    def __init__(
        self, site: environment.Installation, start: workers.Starter, box: mailbox.Mailbox
    ) -> None:
        self.installation = site
        self.start_worker = start
        self.box = box

    def client(self) -> client.Client:
        """The project's own client."""
        return client.Client(self.installation.broker_url, namespace=self.installation.namespace)

    async def job_state(self, job: object) -> str:
        """A job's state by its record, whether the broker is there or not."""
        rows = await self.installation.rows("SELECT state FROM jobs WHERE id = $1", job)
        return str(rows[0]["state"]) if rows else "none"


async def ready(worker: workers.Worker, *, on: bool, timeout: float = 30.0) -> None:
    """Waits until a worker is ready, or until it is not."""
    async with asyncio.timeout(timeout):
        while await worker.is_ready() is not on:
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _installed(
    troubled: private_broker.PrivateBroker | private_database.PrivateDatabase,
    databases: environment.Databases,
    folder: pathlib.Path,
) -> AsyncIterator[Site]:
    """An installation on what the test troubles, which is put right before all else ends."""
    troubled.ensure()
    with databases.installation() as site:
        with workers.starter(site, folder) as start:
            box = mailbox.Mailbox(site.broker_url, site.namespace)
            await box.open()
            yield Site(site, start, box)
            await asyncio.to_thread(troubled.ensure)
            await box.close()
        troubled.ensure()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[private_broker.PrivateBroker]:
    """A broker for tests that stop it, one after the other."""
    with private_broker.running(tmp_path_factory.mktemp("broker") / "node") as running:
        yield running


@pytest.fixture(scope="session")
def node_databases(node: private_broker.PrivateBroker) -> Iterator[environment.Databases]:
    """Makes installations on that broker."""
    made = environment.Databases(node.url, environment.url(environment.DATABASE))
    with made.open():
        yield made


@pytest.fixture
async def on_node(
    node: private_broker.PrivateBroker,
    node_databases: environment.Databases,
    tmp_path: pathlib.Path,
) -> AsyncIterator[Site]:
    """An installation whose broker is :func:`node`."""
    async with _installed(node, node_databases, tmp_path) as site:
        yield site


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[private_database.PrivateDatabase]:
    """A database server for tests that stop it, one after the other."""
    with private_database.running(tmp_path_factory.mktemp("database") / "server") as running:
        yield running


@pytest.fixture(scope="session")
def server_databases(server: private_database.PrivateDatabase) -> Iterator[environment.Databases]:
    """Makes installations on that server."""
    made = environment.Databases(environment.url(environment.BROKER), server.url)
    with made.open():
        yield made


@pytest.fixture
async def on_server(
    server: private_database.PrivateDatabase,
    server_databases: environment.Databases,
    tmp_path: pathlib.Path,
) -> AsyncIterator[Site]:
    """An installation whose database server is :func:`server`."""
    async with _installed(server, server_databases, tmp_path) as site:
        yield site
