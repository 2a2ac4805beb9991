"""The transmission phase of the NBD protocol (doc/proto.md of the NBD project).

Each thread sends its own request. Whoever waits for a reply receives, for the others too, until its
own has come: there is no thread of the session's own, and as many requests are in flight as threads
use it.
"""

import errno
import itertools
import os
import struct
import threading
from typing import Final, NamedTuple, NoReturn

from messages import errors
from worker.nbd import handshake
from worker.nbd import link as links

READ: Final = 0
WRITE: Final = 1
DISCONNECT: Final = 2
FLUSH: Final = 3
WRITE_ZEROES: Final = 6
BLOCK_STATUS: Final = 7

FLUSH_PATIENCE: Final = 900.0
"""Seconds: a server may have much in its cache to bring to slow disks."""

_REQUEST: Final = struct.Struct(">IHHQQI")
_REQUEST_MAGIC: Final = 0x25609513
_SIMPLE: Final = struct.Struct(">IIQ")
_SIMPLE_MAGIC: Final = 0x67446698
_STRUCTURED: Final = struct.Struct(">IHHQ")
_STRUCTURED_MAGIC: Final = 0x668E33EF
_LENGTH: Final = struct.Struct(">I")

_DONE: Final = 1 << 0
_CHUNK_NONE: Final = 0
_CHUNK_DATA: Final = 1
_CHUNK_HOLE: Final = 2
_CHUNK_STATUS: Final = 5
_CHUNK_ERROR: Final = 1 << 15

_STATE_ZERO: Final = 1 << 1
_LONGEST_STATUS: Final = 4 * 1024 * 1024
_LONGEST_ERROR: Final = 64 * 1024

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Run(NamedTuple):
    """A run of bytes that a server has told the state of."""

    offset: int
    length: int
    zero: bool
    """It reads as zeros."""


class Request:
    """One request and what has come of it so far."""

    def __init__(
        self,
        command: int,
        offset: int = 0,
        length: int = 0,
        *,
        payload: memoryview | None = None,
        into: memoryview | None = None,
    ) -> None:
        self.command = command
        self.offset = offset
        self.length = length
        self.payload = payload
        self.into = into
        self.missing = length if command == READ else 0
        """Bytes still to come."""
        self.done = False
        self.error = 0
        """The protocol's error number, which is Linux's."""
        self.text = ""
        self.runs: list[Run] = []


def begin(link: links.Link, export: str, *, name: str) -> "Session":
    """Shakes hands for an export; a connection over which that fails is closed.

    Args:
        name: of the export, for messages.

    Raises:
        DeviceUnavailable: the server has no such export, refuses it, or speaks something else.
    """
    try:
        return Session(link, handshake.negotiate(link, export), name=name)
    except BaseException:
        link.close()
        raise


class Session:
    """A connection in its transmission phase; safe to use from several threads.

    Raises:
        DeviceUnavailable: from every request, once the connection is lost or the server has broken
            the protocol.
    """

    def __init__(self, link: links.Link, export: handshake.Export, *, name: str) -> None:
        self.export = export
        self._name = name
        self._link = link
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._cookies = itertools.count(1)
        self._waiting: dict[int, Request] = {}
        self._lost: errors.VolumeWorkerError | None = None

    def call(self, request: Request) -> Request:
        """Sends a request and waits for all of its reply, which may be an error."""
        cookie = next(self._cookies)
        self._waiting[cookie] = request
        self._send(cookie, request)
        while not request.done:
            with self._receiving:
                self._check_connection()
                if not request.done:
                    self._receive_or_lose()
        return request

    def demand(self, request: Request, done: str) -> None:
        """Like :meth:`call` and :meth:`check` after it."""
        self.check(self.call(request), done)

    def check(self, request: Request, done: str) -> None:
        """Raises the error that the server answered with, if any: what could not be ``done``.

        Raises:
            InsufficientSpace: the server is full.
            DeviceUnavailable: it has another error.
        """
        if not request.error:
            return
        full = request.error in _FULL and request.command != READ
        kind = errors.InsufficientSpace if full else errors.DeviceUnavailable
        reason = os.strerror(request.error) + (f" ({request.text})" if request.text else "")
        raise kind(
            f"{self._name} cannot be {done} at byte {request.offset}: {reason}",
            device=self._name,
            offset=request.offset,
            errno=request.error,
        )

    def flush(self) -> None:
        """Makes every write that was answered durable; nothing where the server has no cache.

        Raises:
            DeviceUnavailable: the server could not.
            InsufficientSpace: there was no room for all of it.
        """
        if not self.export.can_flush:
            return
        with self._link.waiting(FLUSH_PATIENCE):
            self.demand(Request(FLUSH), "flushed")

    def close(self) -> None:
        """Takes leave of the server, where it still listens, and closes the connection."""
        try:
            if self._lost is None and self._sending.acquire(blocking=False):
                self._link.send(_REQUEST.pack(_REQUEST_MAGIC, 0, DISCONNECT, 0, 0, 0))
        except errors.DeviceUnavailable:
            pass
        finally:
            self._link.close()

    def _check_connection(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(self._lost.message, **self._lost.details)

    def _send(self, cookie: int, request: Request) -> None:
        head = _REQUEST.pack(
            _REQUEST_MAGIC, 0, request.command, cookie, request.offset, request.length
        )
        with self._sending:
            self._check_connection()
            try:
                self._link.send(head, request.payload)
            except BaseException as error:
                self._lose(error)
                raise

    def _receive_or_lose(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            self._lose(error)
            raise

    def _lose(self, error: BaseException) -> None:
        if not isinstance(error, errors.VolumeWorkerError):
            error = errors.DeviceUnavailable(f"{self._link.name} was lost: {error!r}")
        self._lost = error

    def _receive(self) -> None:
        head = self._link.receive_bytes(_SIMPLE.size)
        magic, error, cookie = _SIMPLE.unpack(head)
        if magic == _SIMPLE_MAGIC:
            self._receive_simple(cookie, error)
        elif magic == _STRUCTURED_MAGIC and self.export.structured:
            _, flags, kind, cookie = _STRUCTURED.unpack(head)
            (length,) = _LENGTH.unpack(self._link.receive_bytes(_LENGTH.size))
            self._receive_chunk(self._request(cookie), kind, length)
            if flags & _DONE:
                self._finish(cookie)
        else:
            self._garbage("with an unknown reply")

    def _receive_simple(self, cookie: int, error: int) -> None:
        request = self._request(cookie)
        request.error = error
        if request.into is not None and not error:
            if self.export.structured:
                self._garbage("with a simple reply to a read")
            self._link.receive(request.into)
            request.missing = 0
        self._finish(cookie)

    def _receive_chunk(self, request: Request, kind: int, length: int) -> None:
        if kind & _CHUNK_ERROR:
            self._receive_error(request, length)
        elif kind == _CHUNK_DATA and request.into is not None and length > 8:
            (offset,) = struct.unpack(">Q", self._link.receive_bytes(8))
            self._link.receive(self._part(request, offset, length - 8))
        elif kind == _CHUNK_HOLE and request.into is not None and length == 12:
            offset, count = struct.unpack(">QI", self._link.receive_bytes(12))
            self._part(request, offset, count)[:] = bytes(count)
        elif kind == _CHUNK_STATUS and request.command == BLOCK_STATUS:
            self._receive_status(request, length)
        elif kind != _CHUNK_NONE or length:
            self._garbage(f"with a chunk of type {kind} and {length} bytes")

    def _part(self, request: Request, offset: int, length: int) -> memoryview:
        at = offset - request.offset
        if at < 0 or at + length > request.length or length > request.missing:
            self._garbage("with bytes that were not asked for")
        request.missing -= length
        assert request.into is not None
        return request.into[at : at + length]

    def _receive_error(self, request: Request, length: int) -> None:
        if not 6 <= length <= _LONGEST_ERROR:
            self._garbage("with an error that cannot be read")
        data = self._link.receive_bytes(length)
        error, size = struct.unpack_from(">IH", data)
        request.error = error or errno.EIO
        request.text = data[6 : 6 + size].decode("utf-8", "replace").strip()

    def _receive_status(self, request: Request, size: int) -> None:
        if size % 8 != 4 or not 12 <= size <= _LONGEST_STATUS:
            self._garbage("with a block status that cannot be read")
        data = memoryview(self._link.receive_bytes(size))
        (context,) = struct.unpack_from(">I", data)
        if context != self.export.allocation:
            return
        at, end = request.offset, request.offset + request.length
        for length, state in struct.iter_unpack(">II", data[4:]):
            if not length:
                self._garbage("with an extent of no bytes")
            zero = bool(state & _STATE_ZERO)
            count = min(length, end - at)
            last = request.runs[-1] if request.runs else None
            if last and last.zero is zero:
                request.runs[-1] = last._replace(length=last.length + count)
            elif count:
                request.runs.append(Run(at, count, zero))
            at += count

    def _request(self, cookie: int) -> Request:
        request = self._waiting.get(cookie)
        if request is None:
            self._garbage("to a request that was never sent")
        return request

    def _finish(self, cookie: int) -> None:
        request = self._waiting.pop(cookie)
        if request.missing and not request.error:
            self._garbage("with fewer bytes than were asked for")
        request.done = True

    def _garbage(self, how: str) -> NoReturn:
        self._link.fail(f"broke the NBD protocol: it answered {how}")
