"""An export of an NBD server, as an endpoint."""

import errno
import os
from collections.abc import Iterator
from typing import Final, NoReturn

from messages import errors
from worker.transfer import endpoint, nbd_handshake, nbd_link, nbd_session, nbd_uri, zeros

FLUSH_PATIENCE: Final = 900.0
"""Seconds: a server may have much in its cache to bring to slow disks."""
_ZERO_STEP: Final = 64 * 1024 * 1024
"""Bytes: small enough for a server that has to write them."""
_CANNOT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EOVERFLOW})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Nbd:
    """An open export. It asks for what the server can do, and does without what it cannot.

    Args:
        uri: ``nbd://HOST:PORT/EXPORT`` or ``nbd+unix:///EXPORT?socket=PATH``.
        writable: whether it will be written to.

    Raises:
        InvalidRequest: the URI is none.
        DeviceUnavailable: the server cannot be reached, has no such export, or one that cannot be
            written to.
    """

    def __init__(self, uri: str, *, writable: bool) -> None:
        where = nbd_uri.parse(uri)
        self.name = uri
        self.identity: object = where
        self._link = nbd_link.Link(where)
        try:
            self._export = nbd_handshake.negotiate(self._link, where.export)
            if writable and self._export.flags & nbd_handshake.READ_ONLY:
                self._link.fail(f"serves export {where.export!r} for reading only")
        except BaseException:
            self._link.close()
            raise
        self.size = self._export.size
        self._session = nbd_session.Session(self._link, self._export)
        self._has_status = self._export.allocation is not None
        self._has_zeroes = bool(self._export.flags & nbd_handshake.SEND_WRITE_ZEROES)

    def extents(self, offset: int, length: int) -> list[endpoint.Extent]:
        unknown = [endpoint.Extent(offset, length, zero=False)]
        if not self._has_status:
            return unknown
        start, end = self._aligned(offset, length)
        request = nbd_session.Request(nbd_session.BLOCK_STATUS, start, end - start)
        self._session.call(request)
        if request.error:
            self._has_status = False
            return unknown
        return list(_cut(request.extents, offset, offset + length)) or unknown

    def read_into(self, offset: int, view: memoryview) -> None:
        start, end = self._aligned(offset, len(view))
        if (start, end) == (offset, offset + len(view)):
            self._read(offset, view)
            return
        bounce = memoryview(bytearray(end - start))
        self._read(start, bounce)
        view[:] = bounce[offset - start : offset - start + len(view)]

    def write(self, offset: int, view: memoryview) -> None:
        """Writes the whole view; a block that it covers in part keeps its other bytes."""
        start, end = self._aligned(offset, len(view))
        if (start, end) == (offset, offset + len(view)):
            self._write(offset, view)
            return
        bounce = memoryview(bytearray(end - start))
        self._read(start, bounce)
        bounce[offset - start : offset - start + len(view)] = view
        self._write(start, bounce)

    def zero(self, offset: int, length: int) -> None:
        block = self._export.minimum
        end = offset + length
        for at in range(offset, end, _ZERO_STEP):
            upto = min(at + _ZERO_STEP, end)
            first = min(-(-at // block) * block, upto)
            last = upto if upto == self.size else max(upto // block * block, first)
            self._write_zeros(at, first - at)
            if not (first < last and self._zero_by_command(first, last - first)):
                self._write_zeros(first, last - first)
            self._write_zeros(last, upto - last)

    def flush(self) -> None:
        if not self._export.flags & nbd_handshake.SEND_FLUSH:
            return
        self._link.wait_at_most(FLUSH_PATIENCE)
        try:
            request = nbd_session.Request(nbd_session.FLUSH)
            self._check(self._session.call(request), "flushed")
        finally:
            self._link.wait_at_most(nbd_link.PATIENCE)

    def drop_cache(self) -> None:
        """There is no way to ask a server for it."""

    def close(self) -> None:
        self._session.close()

    def _aligned(self, offset: int, length: int) -> tuple[int, int]:
        """The range of whole blocks around another; the export's last one may be cut off."""
        block = self._export.minimum
        end = -(-(offset + length) // block) * block
        return offset // block * block, min(end, self.size)

    def _read(self, offset: int, view: memoryview) -> None:
        step = self._export.maximum
        for at in range(0, len(view), step):
            part = view[at : at + step]
            request = nbd_session.Request(nbd_session.READ, offset + at, len(part), into=part)
            self._check(self._session.call(request), "read")

    def _write(self, offset: int, view: memoryview) -> None:
        step = self._export.maximum
        for at in range(0, len(view), step):
            part = view[at : at + step]
            request = nbd_session.Request(nbd_session.WRITE, offset + at, len(part), payload=part)
            self._check(self._session.call(request), "written")

    def _zero_by_command(self, offset: int, length: int) -> bool:
        """Returns False where the server cannot. Without NO_HOLE: it may free the space."""
        if not self._has_zeroes:
            return False
        request = nbd_session.Request(nbd_session.WRITE_ZEROES, offset, length)
        if self._session.call(request).error in _CANNOT:
            self._has_zeroes = False
            return False
        self._check(request, "zeroed")
        return True

    def _write_zeros(self, offset: int, length: int) -> None:
        for at in range(offset, offset + length, len(zeros.BLANK)):
            self.write(at, zeros.blank(min(len(zeros.BLANK), offset + length - at)))

    def _check(self, request: nbd_session.Request, done: str) -> None:
        if request.error:
            self._fail(request, done)

    def _fail(self, request: nbd_session.Request, done: str) -> NoReturn:
        kind = errors.InsufficientSpace if request.error in _FULL else errors.DeviceUnavailable
        reason = os.strerror(request.error) + (f" ({request.text})" if request.text else "")
        raise kind(
            f"{self.name} cannot be {done} at byte {request.offset}: {reason}",
            device=self.name,
            offset=request.offset,
            errno=request.error,
        )


def _cut(extents: list[endpoint.Extent], start: int, end: int) -> Iterator[endpoint.Extent]:
    for extent in extents:
        first, last = max(extent.offset, start), min(extent.end, end)
        if first < last:
            yield endpoint.Extent(first, last - first, extent.zero)
