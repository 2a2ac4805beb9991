"""What `bench/rpc.py` compares: for each system a server process and a caller process."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench import hosts, measuring

ROOT = pathlib.Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-bench/bin/python"
"""Of an environment apart, so that no framework gets near that of the project."""
READY_TIMEOUT = 60.0
ANSWER_TIMEOUT = 60.0
STOP_TIMEOUT = 15.0


class Child:
    """A process of this package, and the lines that it is asked and answers."""

    def __init__(
        self, python: str | pathlib.Path, module: str, *arguments: str, log: pathlib.Path
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._module = module

    def wait_until_ready(self) -> None:
        """Waits for the line that says so."""
        with self._within(READY_TIMEOUT):
            while self._line() != measuring.READY:
                pass

    def measure(self, in_flight: int, seconds: float) -> measuring.Measured:
        """Lets a caller measure."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"in_flight": in_flight, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        with self._within(seconds + ANSWER_TIMEOUT):
            return measuring.Measured(**json.loads(self._line()))

    @contextlib.contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Ends the process if the block takes longer, and the block with it."""
        watch = threading.Timer(seconds, self._process.kill)
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            told = self._log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{self._module} has ended or does not answer: {told}")
        return line.rstrip("\n")


@contextlib.contextmanager
def _child(python: str | pathlib.Path, *command: str, log: pathlib.Path) -> Iterator[Child]:
    child = Child(python, *command, log=log)
    try:
        child.wait_until_ready()
        yield child
    finally:
        child.stop()


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One of those compared."""

    name: str
    title: str
    open: Callable[[hosts.Site], contextlib.AbstractContextManager[Child]]
    """Starts the server and its caller for the time of a block, which gets the caller."""
    packages: Sequence[str] = ()
    """Of a framework: the distributions that it consists of."""
    notes: Sequence[str] = ()
    """In which it differs from the others, whatever one sets."""

    @property
    def is_framework(self) -> bool:
        """Whether it is something that others build on."""
        return bool(self.packages)

    def missing(self, installed: Mapping[str, str]) -> list[str]:
        """The packages that are not there."""
        return [name for name in self.packages if name not in installed]


def installed() -> dict[str, str]:
    """The versions of the packages in the environment of the frameworks; {} without one."""
    if not PEERS_PYTHON.exists():
        return {}
    told = subprocess.run(
        [PEERS_PYTHON, "-c", _VERSIONS], check=True, capture_output=True, text=True
    ).stdout
    versions: dict[str, str] = json.loads(told)
    return versions


_VERSIONS = """
import importlib.metadata, json
print(json.dumps({one.name: one.version for one in importlib.metadata.distributions()}))
"""


@contextlib.contextmanager
def _worker(site: hosts.Site) -> Iterator[Child]:
    with (
        hosts.Worker(site).running(),
        _amqp_caller(site, site.names.requests, "bench@fake") as caller,
    ):
        yield caller


@contextlib.contextmanager
def _echo(site: hosts.Site) -> Iterator[Child]:
    queue = f"{site.namespace}-echo"
    try:
        with (
            _child(sys.executable, "bench.echo_server", queue, log=site.folder / "echo-server.log"),
            _amqp_caller(site, "", queue) as caller,
        ):
            yield caller
    finally:
        asyncio.run(hosts.remove_from_broker(site.broker_url, queues=[queue]))


def _amqp_caller(
    site: hosts.Site, exchange: str, routing_key: str
) -> contextlib.AbstractContextManager[Child]:
    log = site.folder / f"caller-of-{routing_key}.log"
    return _child(sys.executable, "bench.amqp_caller", exchange, routing_key, log=log)


def _peer(
    module: str, role: str = "caller", *, queues: Sequence[str] = ("",), exchanges: Sequence[str]
) -> Callable[[hosts.Site], contextlib.AbstractContextManager[Child]]:
    """Opens a framework; ``queues`` and ``exchanges`` are the endings of names that it leaves."""

    @contextlib.contextmanager
    def opened(site: hosts.Site) -> Iterator[Child]:
        name = f"{site.namespace}-{module}-{role}"
        command = (PEERS_PYTHON, f"bench.peers.{module}")
        try:
            with (
                _child(*command, "server", name, log=site.folder / f"{name}-server.log"),
                _child(*command, role, name, log=site.folder / f"{name}-caller.log") as caller,
            ):
                yield caller
        finally:
            asyncio.run(
                hosts.remove_from_broker(
                    site.broker_url,
                    queues=[name + ending for ending in queues],
                    exchanges=[name + ending for ending in exchanges],
                )
            )

    return opened


SYSTEMS = (
    System("worker", "volume-worker", _worker),
    System("echo", "bare aio-pika echo", _echo),
    System(
        "oslo",
        "oslo.messaging",
        _peer("oslo_rpc", queues=["", ".server"], exchanges=["", "_fanout"]),
        packages=["oslo.messaging", "kombu", "amqp"],
        notes=[
            "acknowledges a request before it is carried out, so that a crash loses it",
            "one thread and one connection for each call in flight",
        ],
    ),
    System(
        "celery",
        "Celery",
        _peer("celery_rpc", exchanges=[""]),
        packages=["celery", "kombu", "amqp"],
        notes=[
            "solo pool, so that it is one process; acks_late, so that a crash loses no request;"
            " confirm_publish is set, and holds for results too",
        ],
    ),
    System(
        "faststream",
        "FastStream, request()",
        _peer("faststream_rpc", "request", exchanges=[]),
        packages=["faststream", "aio-pika"],
        notes=[
            "request() lets one call be in flight at a time: 64 wait for one another",
            "replies come by amq.rabbitmq.reply-to, which keeps none of them",
        ],
    ),
    System(
        "faststream-replies",
        "FastStream, reply_to",
        _peer("faststream_rpc", "replies", exchanges=[]),
        packages=["faststream", "aio-pika"],
        notes=["no call of its own: the caller matches replies and calls itself"],
    ),
)
