"""An installation of its own for a benchmark, and workers that serve it."""

import asyncio
import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aio_pika
import pydantic

from messages import topology
from worker.store import installation

READY_TIMEOUT = 30.0
STOP_TIMEOUT = 60.0
FAKE: Mapping[str, Mapping[str, Any]] = {"fake": {"driver": "fake_iscsi"}}


class Site:
    """A namespace with its database, on the services of the environment.

    Attributes:
        folder: for what belongs to workers; removed at the end.
        addresses: of workers that were made; their queues are removed at the end.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.namespace = f"bench_{secrets.token_hex(4)}"
        self.broker_url = _needed("VOLUME_WORKER_BROKER_URL")
        self._server = pydantic.SecretStr(_needed("VOLUME_WORKER_DATABASE_URL"))
        own = urllib.parse.urlsplit(self._server.get_secret_value())
        self.database_url = own._replace(path=f"/{self.namespace}").geturl()
        self.addresses: set[str] = set()

    @property
    def names(self) -> topology.Topology:
        """The broker names."""
        return topology.Topology(self.namespace)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The database for the time of the block."""
        asyncio.run(installation.create_database(self._server, self.namespace))
        try:
            url = pydantic.SecretStr(self.database_url)
            asyncio.run(installation.migrate(url, self.namespace))
            yield
        finally:
            asyncio.run(self._remove())

    async def _remove(self) -> None:
        queues = [self.names.dead, *(self.names.queue(one) for one in self.addresses)]
        exchanges = [self.names.requests, self.names.events, self.names.dead]
        await remove_from_broker(self.broker_url, queues=queues, exchanges=exchanges)
        await installation.drop_database(self._server, self.namespace)


@contextlib.contextmanager
def opened() -> Iterator[Site]:
    """A fresh installation; nothing of it is left after the block, whatever ends that."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        site = Site(pathlib.Path(folder))
        with site.made():
            yield site


async def remove_from_broker(
    url: str, *, queues: Sequence[str] = (), exchanges: Sequence[str] = ()
) -> None:
    """Deletes queues and exchanges; those that are not there are no error."""
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        for name in queues:
            await channel.queue_delete(name)
        for name in exchanges:
            await channel.exchange_delete(name)


class Worker:
    """A ``volume-worker run`` process. Several of one host share configuration and state.

    Args:
        backends: their tables; ``{folder}`` and ``{port}`` in a text are filled in.
        settings: top-level keys.
    """

    def __init__(
        self,
        site: Site,
        *,
        host: str = "bench",
        backends: Mapping[str, Mapping[str, Any]] = FAKE,
        **settings: Any,
    ) -> None:
        self._folder = site.folder / f"{host}-{secrets.token_hex(4)}"
        self._http = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        site.addresses |= {f"{host}@{name}" for name in backends}
        self._folder.mkdir()
        keys = {
            "host": host,
            "broker_url": site.broker_url,
            "database_url": site.database_url,
            "namespace": site.namespace,
            "state_dir": str(site.folder / host / "state"),
            "http_listen": self._http,
            **settings,
        }
        tables = {name: self._filled_in(site, table) for name, table in backends.items()}
        (self._folder / "worker.toml").write_text(_toml(keys, tables))

    def _filled_in(self, site: Site, table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value.format(folder=site.folder, port=free_port())
            if isinstance(value, str)
            else value
            for key, value in table.items()
        }

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Starts the process, and does not wait for it."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")}
        command = pathlib.Path(sys.executable).parent / "volume-worker"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [command, "run", "--config", self._folder / "worker.toml"],
                env=outside,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """Waits until /readyz answers 200."""
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the worker does not get ready: {self._tail()}")
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._http}/readyz", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    @contextlib.contextmanager
    def running(self) -> Iterator["Worker"]:
        """A ready worker for the time of the block; it drains at the end."""
        self.spawn()
        try:
            self.wait_until_ready()
            yield self
        except BaseException:
            print(f"the worker's log ends with: {self._tail()}", file=sys.stderr)
            raise
        finally:
            self.stop()

    def stop(self) -> None:
        """SIGTERM; the worker drains and must end with exit code 0."""
        assert self._process is not None
        self._process.terminate()
        try:
            code = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise SystemExit(f"the worker does not drain: {self._tail()}") from None
        if code != 0:
            raise SystemExit(f"the worker ended with {code}: {self._tail()}")

    @property
    def log(self) -> pathlib.Path:
        """What it prints: one JSON object a line."""
        return self._folder / "worker.log"

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def resident(self) -> float:
        """The memory that it holds, in MiB."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024

    def cpu_seconds(self) -> float:
        """The processor time that it has used, in user and kernel mode."""
        stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        # The second field, the command in parentheses, may hold spaces.
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _toml(keys: Mapping[str, Any], backends: Mapping[str, Mapping[str, Any]]) -> str:
    # JSON's texts, numbers, booleans and lists of them are TOML's too.
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    for name, table in backends.items():
        lines.append(f"[backends.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _needed(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise SystemExit(f"{variable} is not set; run this by: tools/services.py run -- COMMAND")
    return value


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
