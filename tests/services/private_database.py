"""A PostgreSQL server of the tests' own, which they may stop, kill and make read-only."""

import contextlib
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

import asyncpg
from devservices import common, postgres, processes, state

from tests.services import environment

PATIENCE: Final = 60.0
"""Seconds for the server to start or to end."""


class PrivateDatabase:
    """One server; :meth:`ensure` brings it back to how every test may expect it."""

    def __init__(self, folder: pathlib.Path) -> None:
        settings = {"cluster_name": "volume-worker-tests", "max_connections": "40"}
        self._server = postgres.PostgreSQL(folder, settings)
        self._ports = common.choose_ports(self._server.port_names, {})
        self._process: subprocess.Popen[bytes] | None = None
        self._is_read_only = False

    @property
    def url(self) -> str:
        """What clients connect to; the same after a restart."""
        return self._server.url(self._ports)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._ports["postgres"]

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> None:
        """Starts the server if it is down, and lets it take writes."""
        if not self.is_running:
            self.start()
        if self._is_read_only:
            self.set_read_only(on=False)

    def start(self) -> None:
        """Starts the server and waits until it answers clients."""
        self._server.prepare()
        [self._process] = self._server.launch(self._ports)
        deadline = time.monotonic() + PATIENCE
        while not self._server.is_ready(self._ports):
            waits = self.is_running and time.monotonic() < deadline
            assert waits, f"PostgreSQL does not start: {common.tail(self._server.log)}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the server as an operator does: it closes every connection."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Ends all processes of the server as a crash of the machine would."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        family = self._family()
        if number is signal.SIGKILL:
            # The others do not outlive the first, but may say good-bye to their clients.
            for one in family:
                processes.send(one, number)
        else:
            self._process.send_signal(number)
        self._process.wait(PATIENCE)
        self._process = None
        assert processes.wait_until(lambda: processes.all_gone(family), PATIENCE)

    def _family(self) -> list[processes.Process]:
        assert self._process is not None
        first = processes.look_up(self._process.pid)
        recorded = [] if first is None else [first.process]
        return processes.family(recorded, self._server.is_ours)

    def execute(self, *statements: str) -> list[Any]:
        """Runs statements, each in a transaction of its own; returns the last one's rows."""

        async def all_of_them() -> list[Any]:
            connection = await asyncpg.connect(self.url)
            try:
                rows: list[Any] = []
                for statement in statements:
                    rows = await connection.fetch(statement)
                return rows
            finally:
                await connection.close()

        return environment.blocking(all_of_them())

    def set_read_only(self, *, on: bool) -> None:
        """Lets the server refuse writes, as a primary that has become a standby does."""
        self._is_read_only = on
        self.execute(
            f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}",
            "SELECT pg_reload_conf()",
        )


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[PrivateDatabase]:
    """A server for the time of the block; the test is given up where there is no PostgreSQL."""
    if postgres.bin_directory() is None:
        environment.give_up("no PostgreSQL on this machine: `make packages` installs it")
    state.prepare_home()
    database = PrivateDatabase(folder)
    try:
        database.start()
        yield database
    finally:
        database.stop()
