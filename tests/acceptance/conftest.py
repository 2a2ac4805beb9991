"""Workers that tests share; each test has a caller and volumes of its own, and leaves nothing."""

import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.services import amqp, dead_letters, environment, tgtd, volumes, workers


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The shared workers as one test sees them.

    Each has the backends ``fast`` (NBD), ``iscsi`` (tgt, where there is one), ``sim`` and ``iser``.
    """

    installation: environment.Installation
    a: workers.Worker
    b: workers.Worker
    c: workers.Worker
    caller: amqp.Caller
    volumes: volumes.Volumes

    async def assert_at_work(self) -> None:
        """Whatever was sent to them, they are ready and carry out the next request."""
        for worker in (self.a, self.b):
            assert await worker.is_ready()
            await self.volumes.delete(await self.volumes.create(worker.at("fast")))


@pytest.fixture(scope="session")
def machine_tgtd(request: pytest.FixtureRequest) -> tgtd.Tgtd | None:
    """The private tgtd, or None where there is none; tests that need it ask for ``tgtd`` too."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("tgtd", "tgtadm", "setpriv"))):
        return None
    daemon: tgtd.Tgtd = request.getfixturevalue("tgtd")
    return daemon


@pytest.fixture(scope="session")
def shared(
    databases: environment.Databases,
    machine_tgtd: tgtd.Tgtd | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[environment.Installation, list[workers.Worker]]]:
    """The workers host-a, host-b and host-c of one installation."""
    backends = {"fast": workers.FAST, "sim": workers.SIM, "iser": {"driver": "fake_iser"}}
    env = {}
    if machine_tgtd is not None:
        env = dict(machine_tgtd.env)
        backends["iscsi"] = workers.iscsi(machine_tgtd)
    with (
        databases.installation() as site,
        workers.starter(site, tmp_path_factory.mktemp("shared")) as start,
    ):
        made = [
            start.new(host, backends=backends, env=env) for host in ("host-a", "host-b", "host-c")
        ]
        for worker in made:
            worker.spawn()
        for worker in made:
            worker.wait_until_ready()
        yield site, made


@pytest.fixture
async def hosts(
    shared: tuple[environment.Installation, list[workers.Worker]],
) -> AsyncIterator[Hosts]:
    """The shared workers, with a caller and volumes of the test's own."""
    site, made = shared
    for worker in made:
        if not worker.is_running:
            await worker.start()
    async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
        own = volumes.Volumes(caller)
        yield Hosts(site, made[0], made[1], made[2], caller, own)
        await own.clean()
    for worker in made:
        assert await worker.leaves() == []
        assert not worker.nbd_serves()


DeadSite = tuple[environment.Installation, workers.Worker]


@pytest.fixture(scope="module")
def dead_site(
    databases: environment.Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeadSite]:
    """An installation for dead letters alone: whoever replays all of them meets no others."""
    with dead_letters.installed(databases, tmp_path_factory.mktemp("dead")) as made:
        yield made


@pytest.fixture
async def dead(dead_site: DeadSite) -> AsyncIterator[dead_letters.Dead]:
    """The same, as one test sees it."""
    async with dead_letters.opened(*dead_site) as opened:
        yield opened
