"""Fixtures for tests that need the services: an installation, workers, a caller, tgtd."""

import pathlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.services import amqp, environment, tgtd, volumes, workers


@pytest.fixture(scope="session")
def databases() -> Iterator[environment.Databases]:
    """Makes installations; skips where the services are missing."""
    made = environment.Databases(
        environment.url(environment.BROKER), environment.url(environment.DATABASE)
    )
    with made.open():
        yield made


@pytest.fixture
def installation(databases: environment.Databases) -> Iterator[environment.Installation]:
    """A fresh database and a namespace of the test's own."""
    with databases.installation() as made:
        yield made


@pytest.fixture
def start_worker(
    installation: environment.Installation, tmp_path: pathlib.Path
) -> Iterator[workers.Starter]:
    """Starts workers of the installation; what they leave fails the test."""
    with workers.starter(installation, tmp_path) as start:
        yield start


@pytest.fixture
async def caller(installation: environment.Installation) -> AsyncIterator[amqp.Caller]:
    """Speaks plain AMQP to the installation's workers."""
    async with amqp.Caller.open(installation.broker_url, installation.namespace) as opened:
        yield opened


@pytest.fixture(name="volumes")
async def volumes_(
    start_worker: workers.Starter, caller: amqp.Caller
) -> AsyncIterator[volumes.Volumes]:
    """Makes volumes, and removes them before the workers end."""
    made = volumes.Volumes(caller)
    yield made
    if start_worker.are_running:
        await made.clean()


@pytest.fixture(scope="session", name="tgtd")
def tgtd_() -> Iterator[tgtd.Tgtd]:
    """A private tgtd; skips where there is none."""
    with tgtd.running() as daemon:
        yield daemon
