"""The processes of the demo: workers and a private tgtd. All end with it at the latest."""

import asyncio
import collections
import contextlib
import http.client
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Final

from messages import errors
from worker import process
from worker.cli.demo import failure

READY_TIMEOUT: Final = 30.0
"""Seconds."""
STOP_TIMEOUT: Final = 30.0
KEPT_LINES: Final = 5000
"""Of a worker's log."""
_SHORT_PATH: Final = 90
"""Bytes of a folder in which a socket can be made; sun_path has 108, unix(7)."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    """Whether something listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Worker:
    """One ``volume-worker run``."""

    def __init__(
        self, execute: process.Executor, host: str, config: pathlib.Path, http_port: int
    ) -> None:
        self.host = host
        self.config = config
        self._execute = execute
        self._http_port = http_port
        self._child: process.Child | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._child is not None, "the worker was not started"
        return self._child.pid

    @property
    def log(self) -> str:
        """The end of what it logged, and then what kept it from running."""
        return "\n".join([*self._lines, self._child.stderr if self._child else ""])

    async def start(self, env: Mapping[str, str]) -> None:
        """Starts it, and waits until it says that it is ready.

        Raises:
            DemoFailed: it ended, or did not become ready in time.
        """
        command = [sys.executable, "-P", "-m", "worker.cli", "run", "--config", str(self.config)]
        self._child = await self._execute.start(*command, env=env)
        self._reading = asyncio.create_task(self._read(self._child))
        deadline = time.monotonic() + READY_TIMEOUT
        while not await asyncio.to_thread(self._is_ready):
            if self._child.exit_code is not None:
                await self._child.wait()
                raise failure.DemoFailed(f"the worker of {self.host} ended: {self._last_line()}")
            if time.monotonic() > deadline:
                raise failure.DemoFailed(
                    f"the worker of {self.host} is not ready after {READY_TIMEOUT:g} s: "
                    f"{self._last_line()}"
                )
            await asyncio.sleep(0.05)

    async def death(self) -> None:
        """Waits for its end, which nobody has asked for.

        Raises:
            DemoFailed: when that comes.
        """
        assert self._child is not None, "the worker was not started"
        code = await self._child.wait()
        how = f"with exit code {code}: {self._last_line()}" if code >= 0 else f"by signal {-code}"
        raise failure.DemoFailed(f"the worker of {self.host} ended in the middle, {how}")

    async def drain(self) -> int:
        """Sends SIGTERM; returns the exit code.

        Raises:
            DemoFailed: it does not end.
        """
        assert self._child is not None, "the worker was not started"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._child.wait(), STOP_TIMEOUT)
        except TimeoutError:
            raise failure.DemoFailed(
                f"the worker of {self.host} does not end within {STOP_TIMEOUT:g} s of SIGTERM"
            ) from None

    async def end(self) -> None:
        """Ends it, whatever state it is in; twice is no error."""
        if self._child is not None:
            if self._child.exit_code is None:
                await self._child.stop(grace=10.0)
            else:
                await self._child.stop(grace=0.1)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=1)
            self._reading.cancel()

    async def _read(self, child: process.Child) -> None:
        # Also so that the worker never waits for room in the pipe of its log.
        while True:
            # A line longer than the reader's buffer is left away; the next one is read again.
            with contextlib.suppress(ValueError):
                async for line in child.lines():
                    self._lines.append(line.decode(errors="replace"))
                return

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_line(self) -> str:
        lines = self.log.strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Unavailable(errors.VolumeWorkerError):
    """This machine cannot run a tgtd; the text says what is missing."""


class Tgtd:
    """A tgtd on a port and a control socket of its own, which meets no other."""

    def __init__(self, execute: process.Executor) -> None:
        self.port = free_port()
        self._execute = execute
        self._child: process.Child | None = None
        self._folder: pathlib.Path | None = None

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._child is not None, "tgtd was not started"
        return self._child.pid

    @property
    def env(self) -> dict[str, str]:
        """What tgtadm needs to find this daemon."""
        assert self._folder is not None, "tgtd was not started"
        return {"TGT_IPC_SOCKET": str(self._folder / "control")}

    async def start(self) -> None:
        """Starts it and waits until it serves its portal.

        Raises:
            Unavailable: it cannot run here, and nothing is left of it.
        """
        for program in ("tgtd", "tgtadm", "setpriv"):
            if process.find_program(program) is None:
                raise Unavailable(f"{program} is not installed: install the package tgt")
        if os.geteuid() != 0:
            raise Unavailable("tgtd answers to root alone: run the demo as root")
        self._folder = _short_folder()
        try:
            portal = f"portal=127.0.0.1:{self.port}"
            self._child = await self._execute.start("tgtd", "-f", "--iscsi", portal, env=self.env)
            await self._until_ready(self._child)
        except BaseException as error:
            await asyncio.shield(self.end())
            if isinstance(error, errors.VolumeWorkerError):
                raise Unavailable(error.message) from error
            raise

    async def targets(self) -> str:
        """Its targets in tgtadm's words; empty where there are none."""
        return (await self._adm("target")).strip()

    async def end(self) -> None:
        """Ends it with all that it serves; twice is no error."""
        child, self._child = self._child, None
        if child is not None:
            # It ignores SIGTERM while it has a target.
            await child.stop(grace=0.5)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _until_ready(self, child: process.Child) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline and child.exit_code is None:
            with contextlib.suppress(errors.VolumeWorkerError):
                if "iscsi: ready" in await self._adm("sys") and is_open(self.port):
                    return
            await asyncio.sleep(0.05)
        words = child.stderr.strip().splitlines()
        raise Unavailable(f"tgtd does not start: {words[-1] if words else 'it said nothing'}")

    async def _adm(self, mode: str) -> str:
        command = ("tgtadm", "--lld", "iscsi", "--op", "show", "--mode", mode)
        return (await self._execute.run(*command, env=self.env, timeout=10)).stdout


def _short_folder() -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="volume-worker-demo-tgtd-"))
    if len(os.fsencode(folder)) <= _SHORT_PATH:
        return folder
    folder.rmdir()
    return pathlib.Path(tempfile.mkdtemp(prefix="volume-worker-", dir="/tmp"))
