"""One qemu-storage-daemon, driven over QMP.

A daemon is either a *bridge*, by which this worker reaches a volume and which dies with the worker,
or a *server*, which serves volumes to others and goes on when the worker ends. A later worker finds
a server again by what is recorded in its folder; the pid comes from the kernel (``SO_PEERCRED`` of
the QMP socket, unix(7)), so that it is never that of somebody else.

See QEMU's ``docs/tools/qemu-storage-daemon.rst`` and ``docs/interop/qmp-spec``.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import pathlib
import socket
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
from qemu import qmp

from messages import errors, redaction
from worker import children, durable, process
from worker.storage_daemon import record

log = structlog.get_logger(__name__)

PROGRAM: Final = "qemu-storage-daemon"
START_TIMEOUT: Final = 30.0
"""Seconds until a started daemon must answer."""
COMMAND_TIMEOUT: Final = 30.0
"""Seconds for a QMP command."""
CONNECT_TIMEOUT: Final = 10.0
"""Seconds; QMP serves one client at a time, and another one may be just leaving."""
STOP_TIMEOUT: Final = 10.0
"""Seconds for a daemon to flush and end by itself."""

POLL_INTERVAL: Final = 0.01
"""Seconds."""

# All that the library logs is raised as well, and its debug log would show what was sent.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)


class StorageDaemon:
    """One qemu-storage-daemon.

    Args:
        folder: for this daemon's record and secrets; made with mode 0700 when it is started.
    """

    def __init__(self, execute: process.Executor, folder: pathlib.Path) -> None:
        self._execute = execute
        self._folder = folder.absolute()
        self._record: record.Record | None = None
        self._child: process.Child | None = None
        self._client: qmp.QMPClient | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as this worker has started or adopted it."""
        recorded = self._record
        return (
            recorded is not None
            and recorded.pid is not None
            and recorded.started is not None
            and process.start_time(recorded.pid) == recorded.started
        )

    @property
    def connected(self) -> bool:
        """Whether it runs and can be given commands."""
        return self._client is not None and self.alive

    @property
    def pid(self) -> int | None:
        """None unless it was started or adopted."""
        return self._record.pid if self._record else None

    @property
    def data_socket(self) -> pathlib.Path:
        """Where a unix socket for data may be made; short enough, and gone with the daemon."""
        assert self._record is not None, "the daemon was not started"
        return self._record.sockets / "data"

    async def start(
        self, *arguments: str, outlives_worker: bool = False, configuration: str = ""
    ) -> None:
        """Starts it, and waits until it answers.

        Args:
            arguments: besides those for QMP; no secrets.
            outlives_worker: makes it a server.
            configuration: what :meth:`adopt` has to find the same.

        Raises:
            TargetError: with the daemon's own words, and nothing left.
        """
        await self.stop()
        # Written before there is a process: however this ends, its socket can be found.
        durable.make_private(self._folder)
        sockets = record.make_sockets_folder(self._folder)
        await self._save(record.Record(sockets, configuration, boot_id=children.boot_id()))
        command = [PROGRAM, *_monitor_arguments(sockets), *arguments]
        try:
            if outlives_worker:
                # --daemonize: its stdout and stderr must not be pipes that end with the worker.
                await self._execute.run(*command, "--daemonize", timeout=START_TIMEOUT)
            else:
                self._child = await self._execute.start(*command, dies_with_worker=True)
            await self._connect_when_ready()
        except BaseException as error:
            await asyncio.shield(self.stop())
            if isinstance(error, errors.CommandFailed | errors.CommandTimeout):
                words = _words(error.details.get("stderr", "")) or error.message
                raise errors.TargetError(f"{PROGRAM} does not start: {words}") from None
            raise
        log.info("storage_daemon.started", pid=self.pid, outlives_worker=outlives_worker)

    async def adopt(self, *, configuration: str = "") -> bool:
        """Takes over the daemon recorded in the folder, if it runs and was configured like this.

        Otherwise ends what is left of it. Returns whether there is a daemon now.

        Raises:
            TargetError: it runs and does not answer; it is left alone, since it may be serving.
        """
        await self.release()
        self._record = record.read(self._folder)
        if self._record is None:
            return False
        try:
            await self._connect()
        except OSError:
            await self.stop()
            return False
        if self._record.configuration != configuration:
            log.info("storage_daemon.configuration_changed", pid=self.pid)
            await self.stop()
            return False
        log.info("storage_daemon.adopted", pid=self.pid)
        return True

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout: float = COMMAND_TIMEOUT,
    ) -> Any:
        """Runs a QMP command and returns its result.

        Args:
            timeout: seconds.

        Raises:
            TargetError: with QEMU's description; or the daemon has ended or does not answer.
        """
        if self._client is None:
            raise errors.TargetError(f"{PROGRAM} is not running")
        try:
            async with asyncio.timeout(timeout):
                return await self._client.execute(command, arguments)
        except qmp.ExecuteError as error:
            # Not as the cause: the library's error carries all that was sent.
            words = redaction.mask_text(str(error)).strip()
            raise errors.TargetError(
                f"{PROGRAM} refused {command}: {words}", command=command, refusal=words
            ) from None
        except TimeoutError:
            raise errors.TargetError(
                f"{PROGRAM} did not answer {command} within {timeout:g} s", command=command
            ) from None
        except (qmp.QMPError, OSError, EOFError):
            await self.release()
            words = _words(self._child.stderr) if self._child else ""
            raise errors.TargetError(
                f"{PROGRAM} ended during {command}{': ' if words else ''}{words}", command=command
            ) from None

    async def add_secret(self, name: str, value: str) -> None:
        """Makes a QEMU ``secret`` object; the value passes through a file, never an argument."""
        path = self._folder / f"secret-{uuid.uuid4().hex}"
        try:
            await durable.write(path, value.encode())
            secret = {"qom-type": "secret", "id": name, "file": str(path), "format": "raw"}
            await self.execute("object-add", secret)
        finally:
            path.unlink(missing_ok=True)

    async def release(self) -> None:
        """Lets go of QMP; the daemon goes on, and another client can drive it."""
        client, self._client = self._client, None
        if client is not None:
            await asyncio.shield(_close_session(client))

    async def stop(self, *, at_once: bool = False) -> None:
        """Ends the recorded daemon and removes its record and sockets; none is no error.

        It flushes and ends by itself if it can; ``at_once`` does not ask it to, for one that hangs.
        """
        if self._record is None:
            self._record = record.read(self._folder)
        if self._record is None:
            return
        if not at_once:
            # An earlier worker may have died before it could record the pid: the socket knows it.
            with contextlib.suppress(TimeoutError, OSError, errors.TargetError):
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self._quit()
        await self.release()
        await self._end()

    async def _end(self) -> None:
        assert self._record is not None
        child, self._child = self._child, None
        if child is not None:
            await child.stop(grace=1.0)
        if self._record.pid is not None and self._record.started is not None:
            await process.end_recorded(self._record.pid, self._record.started)
        record.remove(self._folder)
        self._record = None

    async def _quit(self) -> None:
        if self._client is None:
            await self._connect()
        with contextlib.suppress(errors.TargetError):
            # It may hang up before it has answered, and flushes after that.
            await self.execute("quit")
        for _ in range(int(STOP_TIMEOUT / POLL_INTERVAL)):
            if not self.alive:
                return
            await asyncio.sleep(POLL_INTERVAL)

    async def _connect_when_ready(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + START_TIMEOUT
        while clock() < deadline and (self._child is None or self._child.exit_code is None):
            try:
                return await self._connect()
            except OSError:
                await asyncio.sleep(POLL_INTERVAL)
        if self._child is not None and self._child.exit_code is not None:
            await self._child.wait()
            raise errors.TargetError(
                f"{PROGRAM} does not start: {_words(self._child.stderr) or 'it said nothing'}"
            )
        raise errors.TargetError(f"{PROGRAM} did not answer within {START_TIMEOUT:g} s")

    async def _connect(self) -> None:
        """Opens QMP and records the process at its other end.

        Raises:
            OSError: nobody listens, or it is another process than the recorded one.
            TargetError: it listens but does not answer.
        """
        assert self._record is not None
        recorded = self._record
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            await _reach(peer, recorded.sockets / "qmp")
            pid = _peer_pid(peer)
            started = process.start_time(pid)
            if started is None or (
                recorded.pid and (recorded.pid, recorded.started) != (pid, started)
            ):
                raise ProcessLookupError(f"process {recorded.pid} does not run any more")
            await self._save(dataclasses.replace(recorded, pid=pid, started=started))
            self._client = await _open_session(peer)
            stack.pop_all()

    async def _save(self, recorded: record.Record) -> None:
        if recorded != self._record:
            await record.write(self._folder, recorded)
            self._record = recorded


async def _reach(peer: socket.socket, path: pathlib.Path) -> None:
    """Connects without holding up the event loop, which a full backlog would: it takes one client.

    Raises:
        OSError: nobody listens.
        TargetError: it listens but takes nobody.
    """
    peer.settimeout(0)
    clock = asyncio.get_running_loop().time
    deadline = clock() + CONNECT_TIMEOUT
    while True:
        try:
            return peer.connect(str(path))
        except BlockingIOError:
            # EAGAIN of a unix socket: nothing is under way, it has to be tried again.
            if clock() > deadline:
                raise _unanswered() from None
        await asyncio.sleep(POLL_INTERVAL)


def _unanswered() -> errors.TargetError:
    return errors.TargetError(
        f"{PROGRAM} runs but does not answer within {CONNECT_TIMEOUT:g} s; "
        "is another program connected to it?"
    )


async def _open_session(peer: socket.socket) -> qmp.QMPClient:
    client = qmp.QMPClient()
    # Nobody reads the events, and without this every one of them would be kept.
    client.events.event_filter = lambda event: False
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await client.connect(peer)
    except TimeoutError:
        raise _unanswered() from None
    except (qmp.QMPError, OSError) as error:
        raise ConnectionResetError(f"{PROGRAM} hung up: {error}") from error
    return client


async def _close_session(client: qmp.QMPClient) -> None:
    # What ended the session is of no interest any more.
    with contextlib.suppress(TimeoutError, qmp.QMPError, OSError, EOFError):
        async with asyncio.timeout(1.0):
            await client.disconnect()


def json_argument(value: Mapping[str, Any]) -> str:
    """An option's value as JSON, in which paths with commas need no escapes."""
    return json.dumps(value)


def _monitor_arguments(sockets: pathlib.Path) -> Sequence[str]:
    # --chardev takes no JSON: a comma in a value is doubled.
    path = str(sockets / "qmp").replace(",", ",,")
    chardev = f"socket,id=qmp,path={path},server=on,wait=off"
    return "--chardev", chardev, "--monitor", "chardev=qmp"


def _peer_pid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _words(stderr: str) -> str:
    """The last line on stderr, without the program's name."""
    lines = redaction.mask_text(stderr).strip().splitlines()
    return lines[-1].removeprefix(f"{PROGRAM}: ").strip() if lines else ""
