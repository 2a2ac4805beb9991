"""The connection to an NBD server: whole buffers in and out, or ``DeviceUnavailable``."""

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Final, NoReturn

from messages import errors
from worker.nbd import uri as uris

CONNECT_TIMEOUT: Final = 30.0
PATIENCE: Final = 60.0
"""Seconds without one byte more, after which a server counts as stalled."""
_BUFFER: Final = 1024 * 1024


class Link:
    """A stream to a server. One thread may send while another receives.

    Args:
        where: the server.
        patience: seconds that one wait for the server may take, also for the connection; without
            it :data:`CONNECT_TIMEOUT` and :data:`PATIENCE`.

    Raises:
        DeviceUnavailable: from each method, where the server is away, has closed the connection or
            has stalled.
    """

    def __init__(self, where: uris.Location, *, patience: float | None = None) -> None:
        self.name = f"NBD server {where.server}"
        with self._faults("cannot be reached"):
            self._socket = _connect(where, patience or CONNECT_TIMEOUT)
        self._ending = threading.Lock()
        self._patience = patience or PATIENCE
        self._wait_at_most(self._patience)

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """One wait for the server may take so long in the block."""
        self._wait_at_most(seconds)
        try:
            yield
        finally:
            self._wait_at_most(self._patience)

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        with self._faults("cannot be written to"):
            if payload is None:
                sent = 0
                buffers = [memoryview(head)]
            else:
                buffers = [memoryview(head), payload]
            while buffers:
                sent = self._socket.sendmsg(buffers)
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = buffers[0][sent:]

    def receive(self, view: memoryview) -> None:
        """Fills the whole view."""
        done = 0
        with self._faults("cannot be read from"):
            while done < len(view):
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
                if not count:
                    self.fail("closed the connection")
                done += count

    def receive_bytes(self, length: int) -> bytes:
        buffer = bytearray(length)
        self.receive(memoryview(buffer))
        return bytes(buffer)

    def fail(self, reason: str) -> NoReturn:
        raise errors.DeviceUnavailable(f"{self.name} {reason}", server=self.name)

    def abort(self) -> None:
        """Has every use of it fail at once, also one that waits in another thread."""
        # Not while it is closed: the descriptor's number may be another file's right after.
        with self._ending, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._ending:
            self._socket.close()

    def _wait_at_most(self, seconds: float) -> None:
        # By the kernel, not by Python's timeouts: with those, each call may move less than was
        # asked for and costs a poll(2).
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @contextlib.contextmanager
    def _faults(self, failure: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            stalled = error.errno in (errno.EAGAIN, errno.EINPROGRESS) or isinstance(
                error, TimeoutError
            )
            reason = "no answer in time" if stalled else error.strerror or str(error)
            raise errors.DeviceUnavailable(
                f"{self.name} {failure}: {reason}", server=self.name
            ) from error


def _connect(where: uris.Location, timeout: float) -> socket.socket:
    if where.socket is not None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(timeout)
            link.connect(where.socket)
        except BaseException:
            link.close()
            raise
    else:
        link = socket.create_connection((where.host, where.port), timeout)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setblocking(True)  # noqa: FBT003
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return link
