"""What tests of reconciliation share: the command, and what is done behind a worker's back."""

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from tests.services import amqp, command, environment, volumes, workers
from worker import process
from worker.connectors import base as connectors
from worker.connectors import bridge
from worker.storage_daemon import daemon, server

NEVER: Final = 3600
"""Seconds until a round: whatever is wrong is left to the command."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the command said."""

    code: int
    findings: list[dict[str, Any]]
    stderr: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The findings of a kind."""
        return [one for one in self.findings if one["kind"] == kind]

    def subjects(self) -> dict[str, str]:
        """The kind of each finding by its subject."""
        return {one["subject"]: one["kind"] for one in self.findings}


async def reconcile(worker: workers.Worker, *arguments: str) -> Answer:
    """Runs ``volume-worker reconcile`` with the configuration and environment of a worker."""
    ended = await command.run(
        "reconcile", "--json", "--config", worker.config, *arguments, env=dict(worker._env)
    )
    return Answer(ended.code, ended.data["findings"], ended.stderr)


async def ask(caller: amqp.Caller, address: str, *, repair: bool = False) -> Answer:
    """Asks the worker at an address itself; the code is the one that the command would give."""
    findings = (await caller.call("reconcile", address, {"repair": repair}))["findings"]
    return Answer(int(any(not one["repaired"] for one in findings)), findings, "")


async def mend(caller: amqp.Caller, address: str) -> Answer:
    """Has all repaired at an address; all must have been, and nothing be found any more."""
    answer = await ask(caller, address, repair=True)
    assert answer.code == 0, answer
    after = await ask(caller, address)
    assert after.findings == [], after
    return answer


async def pair(made: volumes.Volumes, at: str) -> list[tuple[volumes.Volume, dict[str, Any]]]:
    """Two connected volumes; the first is filled with 5."""
    first, second = await made.create(at), await made.create(at)
    await made.write(first, {0: b"\5" * first.size_bytes})
    return [(one, await made.connect(one)) for one in (first, second)]


async def forget(site: environment.Installation, connection_id: str) -> None:
    """Ends a connection in the records alone."""
    await site.rows("UPDATE connections SET state = 'ended' WHERE id = $1::uuid", connection_id)


async def set_volume(
    site: environment.Installation, volume: volumes.Volume, **columns: Any
) -> None:
    """Changes a volume's record."""
    for name, value in columns.items():
        await site.rows(f"UPDATE volumes SET {name} = $2 WHERE id = $1::uuid", volume.id, value)


@contextlib.asynccontextmanager
async def nbd_server(worker: workers.Worker) -> AsyncIterator[server.Server]:
    """The NBD server of a worker that has ended, to be changed behind its back."""
    folder = worker.state_dir / "backends" / "fast" / "nbd"
    opened = daemon.StorageDaemon(process.Executor(), folder)
    assert await opened.adopt(configuration=f'["127.0.0.1:{worker.nbd_port}", "nbd"]')
    try:
        yield server.Server(opened)
    finally:
        await opened.release()


async def attach(worker: workers.Worker, key: str, path: pathlib.Path) -> None:
    """Attaches a file to a worker's host as a connector would, by no job of anybody's."""
    made = bridge.Bridges(process.Executor(), worker.state_dir / "connectors" / "nbd")
    source = bridge.Source("a file", {"driver": "file", "filename": str(path)})
    await made.open(key, source, access=connectors.Access.STREAM, read_only=True)
    # As if its worker were gone: nobody talks to it.
    await made._daemons[key].release()


async def is_gone(caller: amqp.Caller, volume: volumes.Volume, what: str) -> None:
    """Waits until a volume's record has no connection, and no export, any more."""
    record: Mapping[str, Any] = {}

    async def look() -> bool:
        nonlocal record
        record = await caller.call("get_volume", volume.address, volume.at)
        return not record["connections"] and not record["exported"]

    for _ in range(300):
        if await look():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {record}")
