"""Workers as operators run them: the installed command, a configuration file, signals."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.services import children, environment, tgtd

COMMAND: Final = str(pathlib.Path(sys.executable).parent / "volume-worker")
READY_TIMEOUT: Final = 30.0
DRAIN_TIMEOUT: Final = 30.0
STATE_VARIABLE: Final = "TEST_STATE_DIR"
"""Set for each worker, so that all it starts is known by it."""


class Worker:
    """One worker process and what belongs to it.

    Args:
        backends: their tables; ``{}`` in a path stands for the worker's folder.
        settings: top-level keys beside those that are made here.
        leaves_something: whether something may be left when the test ends.
        arguments: to ``volume-worker run`` beside its configuration.
    """

    def __init__(
        self,
        site: environment.Installation,
        host: str,
        folder: pathlib.Path,
        *,
        backends: Mapping[str, Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        leaves_something: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.folder = folder
        self.state_dir = folder / "state"
        self.config = folder / "worker.toml"
        self.log = folder / "worker.log"
        self.http_port = tgtd.free_port()
        self.nbd_port: int | None = None
        self.leaves_something = leaves_something
        self.command: Sequence[str] = (COMMAND,)
        """What is started instead of the installed command, with the same arguments."""
        self._env = dict(env or {})
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: self._backend(dict(table)) for name, table in backends.items()}
        site.addresses |= {self.at(name) for name in tables}
        self.settings: dict[str, Any] = {
            "host": host,
            "broker_url": site.broker_url,
            "database_url": site.database_url,
            "namespace": site.namespace,
            "state_dir": str(self.state_dir),
            "http_listen": f"127.0.0.1:{self.http_port}",
            **(settings or {}),
        }
        self.config.write_text(_toml(self.settings, tables))

    def _backend(self, table: dict[str, Any]) -> dict[str, Any]:
        if table.get("target", "nbd") == "nbd" and table["driver"] == "file":
            self.nbd_port = tgtd.free_port()
            table.setdefault("target_listen", f"127.0.0.1:{self.nbd_port}")
        return {
            key: value.replace("{}", str(self.folder)) if isinstance(value, str) else value
            for key, value in table.items()
        }

    def at(self, backend: str) -> str:
        """The address of a backend."""
        return f"{self.host}@{backend}"

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    # Life

    def spawn(self) -> None:
        """Starts the process, and does not wait for it."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "run", "--config", str(self.config), *self._arguments],
                env={**outside, **self._env, STATE_VARIABLE: str(self.state_dir)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Waits until /readyz answers 200."""
        deadline = time.monotonic() + READY_TIMEOUT
        while self.readyz()[0] != http.HTTPStatus.OK:
            has_failed = not self.is_running or time.monotonic() > deadline
            assert not has_failed, f"{self.host} does not get ready: {self._tail()}"
            time.sleep(0.05)

    async def start(self) -> None:
        """Starts the process and waits until /readyz answers 200."""
        self.spawn()
        await asyncio.to_thread(self.wait_until_ready)

    async def terminate(self) -> None:
        """SIGTERM; the worker drains and must end with exit code 0."""
        await asyncio.to_thread(self.stop)

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    async def ended(self, timeout: float = DRAIN_TIMEOUT) -> int:
        """Waits for the end of the process; its exit code."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, timeout)

    def stop(self) -> None:
        """As :meth:`terminate`, for code that is no coroutine."""
        assert self._process is not None
        self._process.terminate()
        try:
            code = self._process.wait(DRAIN_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host} does not drain: {self._tail()}") from None
        assert code == 0, f"{self.host} ended with {code}: {self._tail()}"

    def close(self) -> None:
        """Ends the worker and all it started; fails where something was left."""
        try:
            if self.is_running:
                self.stop()
            deadline = time.monotonic() + 5
            while (left := self.leftovers()) and time.monotonic() < deadline:
                if self.leaves_something:
                    break
                time.sleep(0.05)
            assert self.leaves_something or not left, f"{self.host} left {left}"
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for one in self.leftovers():
                children.end(one.pid)

    def leftovers(self) -> list[children.Found]:
        """The processes that this worker started and that run without it."""
        found = children.mentioning(str(self.state_dir))
        return [one for one in found if not self.is_running or one.pid != self.pid]

    async def leaves(self) -> list[children.Found]:
        """What it leaves running: a live worker may be just running a program, and ends that."""
        deadline = time.monotonic() + 5
        while (left := self.leftovers()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return left

    # Looking

    def readyz(self) -> tuple[int, dict[str, Any]]:
        """What /readyz answers: status and checks; 0 where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/readyz")
                response = connection.getresponse()
                return response.status, json.loads(response.read())["checks"]
            except (OSError, http.client.HTTPException):
                return 0, {}

    async def is_ready(self) -> bool:
        """Whether /readyz answers 200."""
        return (await asyncio.to_thread(self.readyz))[0] == http.HTTPStatus.OK

    def log_lines(self) -> list[dict[str, Any]]:
        """The log so far; each line must be JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def last_words(self) -> list[str]:
        """Lines of the log that are none: why it ended by itself, or what Python had to say."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if not line.startswith("{")]

    def nbd_serves(self) -> bool:
        """Whether somebody listens on the NBD port."""
        assert self.nbd_port is not None
        try:
            socket.create_connection(("127.0.0.1", self.nbd_port), 1).close()
        except OSError:
            return False
        return True

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else "no log"


def _toml(settings: Mapping[str, Any], backends: Mapping[str, Mapping[str, Any]]) -> str:
    # JSON's texts, numbers, booleans and lists of them are TOML's too.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for name, table in backends.items():
        lines.append(f"[backends.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


FAST: Final = {"driver": "file", "target": "nbd", "directory": "{}/fast"}
SIM: Final = {"driver": "fake_iscsi"}


def iscsi(daemon: tgtd.Tgtd) -> dict[str, Any]:
    """A backend whose volumes a tgtd serves; its ``env`` has to be the worker's too."""
    return {
        "driver": "file",
        "target": "tgt",
        "directory": "{}/iscsi",
        "iscsi_port": daemon.port,
    }


class Starter:
    """Starts workers, and ends them."""

    def __init__(self, site: environment.Installation, folder: pathlib.Path) -> None:
        self._site = site
        self._folder = folder
        self._workers: list[Worker] = []

    def new(
        self,
        host: str = "host-a",
        *,
        backends: Mapping[str, Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        leaves_something: bool = False,
        arguments: Sequence[str] = (),
        **settings: Any,
    ) -> Worker:
        """A worker that is not started yet; without ``backends``, with ``fast`` and ``sim``."""
        worker = Worker(
            self._site,
            host,
            self._folder / host,
            backends={"fast": FAST, "sim": SIM} if backends is None else backends,
            settings=settings,
            env=env,
            leaves_something=leaves_something,
            arguments=arguments,
        )
        self._workers.append(worker)
        return worker

    async def __call__(self, host: str = "host-a", **options: Any) -> Worker:
        """Starts a worker and waits until it is ready; the options are those of :meth:`new`."""
        worker = self.new(host, **options)
        await worker.start()
        return worker

    @property
    def are_running(self) -> bool:
        """Whether all workers run."""
        return all(worker.is_running for worker in self._workers)

    def close(self) -> None:
        """Ends all workers."""
        failures = []
        for worker in self._workers:
            try:
                worker.close()
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)


@contextlib.contextmanager
def starter(site: environment.Installation, folder: pathlib.Path) -> Iterator[Starter]:
    """Starts workers in the block, and ends them after it."""
    start = Starter(site, folder)
    try:
        yield start
    finally:
        start.close()
