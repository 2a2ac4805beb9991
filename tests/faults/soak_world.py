"""Where the soak takes place: two hosts, a broker and a database of its own, and links between."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from tests.faults import soak_load, soak_troubles
from tests.services import (
    amqp,
    environment,
    private_broker,
    private_database,
    tcp_proxy,
    tgtd,
    volumes,
    workers,
)
from tests.services.volumes import MIB

CALLERS: Final = "callers to broker"
NEVER: Final = 3600
"""Seconds until a round of reconciliation: whatever is left is to be found at the end."""
_SETTINGS: Final[Mapping[str, Any]] = {
    "lease": soak_troubles.LEASE,
    "drain_timeout": 3,
    "stats_interval": 2,
    "reconcile_interval": NEVER,
    "max_attempts": 10,
}


@dataclasses.dataclass
class Site:
    """All of it."""

    installation: environment.Installation
    start: workers.Starter
    broker: private_broker.PrivateBroker
    database: private_database.PrivateDatabase
    proxies: dict[str, tcp_proxy.Proxy]
    callers_url: str
    hosts: dict[str, workers.Worker]
    daemon: tgtd.Tgtd | None
    folder: pathlib.Path

    @property
    def addresses(self) -> list[str]:
        """Of every backend."""
        return sorted(self.installation.addresses)

    @property
    def copiers(self) -> list[str]:
        """Of the backends that store something."""
        return [one for one in self.addresses if not one.endswith("@sim")]

    def path(self, volume_id: str, address: str) -> pathlib.Path:
        """The file of a volume."""
        host, _, backend = address.partition("@")
        return self.hosts[host].folder / backend / f"volume-{volume_id}"

    async def sources(self, dice: random.Random) -> list[soak_load.Source]:
        """One volume with data on each backend that stores something."""
        made = []
        site = self.installation
        async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
            maker = volumes.Volumes(caller)
            for number, address in enumerate(self.copiers):
                one = await maker.create(address, (1 + number % 2) * MIB, name="source")
                await maker.fill(one, dice.randrange(2**32))
                made.append(soak_load.Source(one, await maker.content(one)))
        return made


@contextlib.asynccontextmanager
async def opened(
    broker: private_broker.PrivateBroker,
    database: private_database.PrivateDatabase,
    folder: pathlib.Path,
) -> AsyncIterator[Site]:
    """The site for the time of the block, with its workers running."""
    async with contextlib.AsyncExitStack() as stack:
        made = environment.Databases(broker.url, database.url)
        stack.enter_context(made.open())
        site = stack.enter_context(made.installation())
        # What ends below needs both.
        stack.callback(database.ensure)
        stack.callback(broker.ensure)
        daemon = stack.enter_context(_tgtd())
        proxies: dict[str, tcp_proxy.Proxy] = {}
        urls: dict[str, str] = {}
        targets = {CALLERS: site.broker_url}
        for host in ("host-a", "host-b"):
            targets[f"{host} to broker"] = site.broker_url
            targets[f"{host} to database"] = site.database_url
        for name, url in targets.items():
            proxies[name], urls[name] = await stack.enter_async_context(tcp_proxy.before(url))
        start = workers.Starter(site, folder)
        # Not in this thread: they end through the proxies.
        stack.push_async_callback(asyncio.to_thread, start.close)
        hosts = {}
        for host, backends in _backends(daemon).items():
            hosts[host] = start.new(
                host,
                backends=backends,
                env=daemon.env if daemon and host == "host-b" else {},
                broker_url=urls[f"{host} to broker"],
                database_url=urls[f"{host} to database"],
                **_SETTINGS,
            )
        await asyncio.gather(*(worker.start() for worker in hosts.values()))
        yield Site(site, start, broker, database, proxies, urls[CALLERS], hosts, daemon, folder)


def _backends(daemon: tgtd.Tgtd | None) -> dict[str, dict[str, Mapping[str, Any]]]:
    tgt = {} if daemon is None else {"iscsi": workers.iscsi(daemon)}
    return {
        "host-a": {"fast": workers.FAST, "sim": workers.SIM},
        "host-b": {"fast": workers.FAST, **tgt},
    }


@contextlib.contextmanager
def _tgtd() -> Iterator[tgtd.Tgtd | None]:
    """A tgtd, where there can be one."""
    if shutil.which("tgtd") is None or os.geteuid() != 0:
        yield None
        return
    with tgtd.running() as daemon:
        yield daemon
