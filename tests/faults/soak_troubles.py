"""What happens to the soak: one trouble after the other, chosen by a seed, with pauses between."""

import asyncio
import collections
import enum
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import aio_pika

from messages import link
from tests.services import children, private_broker, private_database, tcp_proxy, workers

LEASE: Final = 3.0
"""Seconds; the shortest that is allowed."""
READY: Final = 60.0
"""Seconds for a worker to be ready again after a trouble."""
ENDING: Final = 60.0
STORAGE_DAEMON: Final = "qemu-storage-daemon"


class Kind(enum.StrEnum):
    """A trouble."""

    WORKER_KILLED = "worker kill -9"
    WORKER_RESTARTED = "worker SIGTERM"
    WORKER_STOPPED = "worker SIGSTOP"
    BROKER_RESTARTED = "broker restart"
    BROKER_KILLED = "broker kill -9"
    DATABASE_RESTARTED = "database restart"
    DATABASE_KILLED = "database kill -9"
    LINK_CUT = "link cut"
    LINK_STALLED = "link stalled"
    LINK_HALF_OPEN = "link half-open"
    STORAGE_DAEMON_KILLED = "qemu kill -9"
    QUEUE_DELETED = "reply queue deleted"


class Troubles:
    """Makes them.

    Args:
        proxies: by what they lead from and to.
        queues: reply queues of callers.
    """

    def __init__(
        self,
        dice: random.Random,
        *,
        hosts: Sequence[workers.Worker],
        broker: private_broker.PrivateBroker,
        database: private_database.PrivateDatabase,
        proxies: Mapping[str, tcp_proxy.Proxy],
        queues: Callable[[], Sequence[str]],
    ) -> None:
        self._dice = dice
        self._hosts = hosts
        self._broker = broker
        self._database = database
        self._proxies = proxies
        self._queues = queues
        self.counts: collections.Counter[Kind] = collections.Counter()
        self.log: list[str] = []
        """What was done when, to be read where something is wrong."""
        self.problems: list[str] = []
        self._began = time.monotonic()

    async def run(self, seconds: float, *, pause: tuple[float, float]) -> None:
        """Makes troubles for so long; each kind before any of them again."""
        end = time.monotonic() + seconds
        deck: list[Kind] = []
        while time.monotonic() < end:
            await asyncio.sleep(self._dice.uniform(*pause))
            if not deck:
                deck = self._dice.sample(list(Kind), len(Kind))
            kind = deck.pop()
            if await self._makers[kind](self):
                self.counts[kind] += 1
            await self.recover()

    async def recover(self) -> None:
        """Waits until all workers are ready; one that ended by itself is told, and started."""
        for worker in self._hosts:
            if not worker.is_running:
                code = await worker.ended()
                self.problems.append(f"{worker.host} ended by itself with {code}: {self.log[-1:]}")
                await worker.start()
        try:
            async with asyncio.timeout(READY):
                for worker in self._hosts:
                    while not await worker.is_ready():
                        await asyncio.sleep(0.1)
        except TimeoutError:
            checks = {worker.host: worker.readyz()[1] for worker in self._hosts}
            self.problems.append(f"not ready after {self.log[-1:]}: {checks}")

    async def mend(self) -> None:
        """Ends what may go on of a trouble that was broken off."""
        for proxy in self._proxies.values():
            proxy.heal()
        for worker in self._hosts:
            if worker.is_running:
                worker.signal(signal.SIGCONT)
        await asyncio.to_thread(self._broker.ensure)
        await asyncio.to_thread(self._database.ensure)
        await self.recover()

    def _say(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:.1f} s: {text}")

    # Workers

    async def _kill_worker(self) -> bool:
        worker = self._dice.choice(self._hosts)
        away = self._dice.uniform(0, 2 * LEASE)
        self._say(f"kill -9 {worker.host}, for {away:.1f} s")
        await worker.kill()
        await asyncio.sleep(away)
        await worker.start()
        return True

    async def _restart_worker(self) -> bool:
        worker = self._dice.choice(self._hosts)
        self._say(f"SIGTERM {worker.host}")
        worker.signal(signal.SIGTERM)
        if code := await worker.ended(ENDING):
            self.problems.append(f"{worker.host} ended with {code} on SIGTERM")
        await worker.start()
        return True

    async def _stop_worker(self) -> bool:
        worker = self._dice.choice(self._hosts)
        seconds = LEASE + self._dice.uniform(0.5, 2)
        self._say(f"SIGSTOP {worker.host}, for {seconds:.1f} s")
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        worker.signal(signal.SIGCONT)
        return True

    async def _kill_storage_daemon(self) -> bool:
        running = [
            (worker.host, one)
            for worker in self._hosts
            for one in worker.leftovers()
            if STORAGE_DAEMON in one.command
        ]
        if not running:
            return False
        host, chosen = self._dice.choice(running)
        self._say(f"kill -9 {chosen.pid} of {host}: {chosen.command[:200]}")
        await asyncio.to_thread(children.end, chosen.pid)
        return True

    # Services

    async def _restart_broker(self) -> bool:
        return await self._replace_broker("stop", self._broker.stop)

    async def _kill_broker(self) -> bool:
        await asyncio.to_thread(self._broker.settle)
        return await self._replace_broker("kill -9", self._broker.kill)

    async def _replace_broker(self, how: str, end: Callable[[], None]) -> bool:
        away = self._dice.uniform(0, 3)
        self._say(f"{how} the broker, for {away:.1f} s")
        await asyncio.to_thread(end)
        await asyncio.sleep(away)
        await asyncio.to_thread(self._broker.start)
        return True

    async def _restart_database(self) -> bool:
        return await self._replace_database("stop", self._database.stop)

    async def _kill_database(self) -> bool:
        return await self._replace_database("kill -9", self._database.kill)

    async def _replace_database(self, how: str, end: Callable[[], None]) -> bool:
        away = self._dice.uniform(0, 5)
        self._say(f"{how} the database, for {away:.1f} s")
        await asyncio.to_thread(end)
        await asyncio.sleep(away)
        await asyncio.to_thread(self._database.start)
        return True

    # Links

    def _link(self) -> tuple[str, tcp_proxy.Proxy]:
        name = self._dice.choice(sorted(self._proxies))
        return name, self._proxies[name]

    async def _cut_link(self) -> bool:
        name, proxy = self._link()
        self._say(f"cut the link {name}")
        await proxy.cut()
        return True

    async def _stall_link(self) -> bool:
        name, proxy = self._link()
        seconds = self._dice.uniform(1, 8)
        self._say(f"stall the link {name}, for {seconds:.1f} s")
        proxy.stall()
        await asyncio.sleep(seconds)
        proxy.heal()
        return True

    async def _half_open_link(self) -> bool:
        name, proxy = self._link()
        way = self._dice.choice(list(tcp_proxy.Way))
        seconds = self._dice.uniform(1, 8)
        self._say(f"no bytes {way.name} on the link {name}, for {seconds:.1f} s, then cut")
        proxy.half_open(way)
        await asyncio.sleep(seconds)
        proxy.heal()
        await proxy.cut()
        return True

    async def _delete_queue(self) -> bool:
        queue = self._dice.choice(self._queues())
        self._say(f"delete the queue {queue}")
        try:
            connection = await aio_pika.connect(self._broker.url, timeout=10)
            async with connection, connection.channel() as channel:
                await channel.queue_delete(queue)
        except link.AWAY:
            return False
        return True

    _makers: Final[Mapping[Kind, Callable[["Troubles"], Awaitable[bool]]]] = {
        Kind.WORKER_KILLED: _kill_worker,
        Kind.WORKER_RESTARTED: _restart_worker,
        Kind.WORKER_STOPPED: _stop_worker,
        Kind.BROKER_RESTARTED: _restart_broker,
        Kind.BROKER_KILLED: _kill_broker,
        Kind.DATABASE_RESTARTED: _restart_database,
        Kind.DATABASE_KILLED: _kill_database,
        Kind.LINK_CUT: _cut_link,
        Kind.LINK_STALLED: _stall_link,
        Kind.LINK_HALF_OPEN: _half_open_link,
        Kind.STORAGE_DAEMON_KILLED: _kill_storage_daemon,
        Kind.QUEUE_DELETED: _delete_queue,
    }
