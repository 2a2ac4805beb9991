"""Mixed load on two hosts while workers, broker, database, links and targets fail at random.

A short one by default; ``make soak SECONDS=1800`` goes on for longer. ``SOAK_SEED`` makes another.
"""

import asyncio
import contextlib
import gc
import os
import pathlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import pytest

from messages import client
from tests.faults import soak_checks, soak_load, soak_troubles, soak_world
from tests.faults.checks import Kind
from tests.faults.soak_calls import ClientLine, Ledger, Line, PlainLine
from tests.services import private_broker, private_database

SECONDS: Final = float(os.environ.get("SOAK_SECONDS", "30"))
SEED: Final = os.environ.get("SOAK_SEED", "1")
PAUSE: Final = (1.0, 3.0)
"""Seconds between troubles."""
CALL_TIMEOUT: Final = 45.0


@contextlib.asynccontextmanager
async def _lines(site: soak_world.Site) -> AsyncIterator[list[PlainLine | ClientLine]]:
    """Two plain callers and two clients, through the callers' link."""
    namespace = site.installation.namespace
    plain = [PlainLine(site.callers_url, namespace) for _ in range(2)]
    tasks = [asyncio.create_task(line.run()) for line in plain]
    try:
        async with (
            client.Client(site.callers_url, namespace=namespace) as one,
            client.Client(site.callers_url, namespace=namespace) as two,
        ):
            clients = [ClientLine(made, CALL_TIMEOUT) for made in (one, two)]
            yield [plain[0], clients[0], plain[1], clients[1]]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _askers(
    load: soak_load.Load, lines: list[PlainLine | ClientLine]
) -> list[soak_load.Owner | soak_load.Meddler]:
    """Two owners on each backend, and two meddlers."""
    made: list[soak_load.Owner | soak_load.Meddler] = []
    for number, address in enumerate([*load.addresses, *load.copiers]):
        line: Line = lines[number % len(lines)]
        made.append(soak_load.Owner(load, line, address, f"{SEED}-owner-{number}"))
    plain = [line for line in lines if isinstance(line, PlainLine)]
    made += [
        soak_load.Meddler(load, line, f"{SEED}-meddler-{number}")
        for number, line in enumerate(plain)
    ]
    return made


# A connection whose link is stalled cannot say good-bye, and its library wants to until the end.
@pytest.mark.filterwarnings("ignore:coroutine 'Connection.close' was never awaited:RuntimeWarning")
@pytest.mark.timeout(SECONDS + 600)
async def test_nothing_is_lost_done_twice_or_left_whatever_fails_under_mixed_load(
    node: private_broker.PrivateBroker,
    server: private_database.PrivateDatabase,
    tmp_path: pathlib.Path,
    record_property: Callable[[str, object], None],
) -> None:
    node.ensure()
    server.ensure()
    dice = random.Random(SEED)
    began = time.monotonic()
    async with soak_world.opened(node, server, tmp_path) as site:
        sources = await site.sources(dice)
        load = soak_load.Load(Ledger(), sources, copiers=site.copiers, addresses=site.addresses)
        rest = soak_checks.Rest(site, load)
        async with _lines(site) as lines:
            troubles = soak_troubles.Troubles(
                dice,
                hosts=list(site.hosts.values()),
                broker=node,
                database=server,
                proxies=site.proxies,
                queues=lambda: [line.queue for line in lines],
            )
            tasks = [asyncio.create_task(asker.run()) for asker in _askers(load, lines)]
            try:
                await _until_over(troubles, tasks)
                load.is_over.set()
                await troubles.mend()
                for text in await soak_checks.remaining(load, tasks):
                    rest.found.note(Kind.LOST, text)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    rest.found.note(Kind.LOST, f"a caller ended: {error!r}")
            await soak_checks.everything(rest)
        gc.collect()
        for problem in troubles.problems:
            rest.found.note(Kind.LOST, problem)
    lines_ = [
        f"SOAK_SEED={SEED} SOAK_SECONDS={SECONDS:g}, {time.monotonic() - began:.0f} s in all",
        "",
        *soak_checks.numbers(rest, troubles),
    ]
    record_property("numbers", lines_)
    assert not rest.found.all, "\n".join(
        [*lines_, str(rest.found), *troubles.log, f"logs: {tmp_path}/host-*/worker.log"]
    )


async def _until_over(troubles: soak_troubles.Troubles, tasks: list[asyncio.Task[None]]) -> None:
    """Makes troubles for the time of the soak; ends before where a caller fails."""
    trouble = asyncio.create_task(troubles.run(SECONDS, pause=PAUSE))
    try:
        await asyncio.wait([trouble, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if trouble.done():
            trouble.result()
    finally:
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
