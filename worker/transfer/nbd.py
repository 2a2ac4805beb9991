"""An export of an NBD server, as an endpoint."""

import errno
from collections.abc import Iterator
from typing import Final

from worker.nbd import link as links
from worker.nbd import session
from worker.nbd import uri as uris
from worker.transfer import endpoint, zeros

_ZERO_STEP: Final = 64 * 1024 * 1024
"""Bytes: small enough for a server that has to write them."""
_CANNOT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EOVERFLOW})


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
        where = uris.parse(uri)
        self.name = uri
        self.identity: object = where
        link = links.Link(where)
        self._session = session.begin(link, where.export, name=uri)
        self._export = self._session.export
        self.size = self._export.size
        self._has_status = self._export.allocation is not None
        self._has_zeroes = self._export.can_zero
        try:
            if not self.size:
                link.fail(f"serves nothing in export {where.export!r}")
            if writable and self._export.read_only:
                link.fail(f"serves export {where.export!r} for reading only")
        except BaseException:
            self.close()
            raise

    def extents(self, offset: int, length: int) -> list[endpoint.Extent]:
        unknown = [endpoint.Extent(offset, length, zero=False)]
        if not self._has_status:
            return unknown
        start, end = self._aligned(offset, length)
        request = session.Request(session.BLOCK_STATUS, start, end - start)
        self._session.call(request)
        if request.error:
            self._has_status = False
            return unknown
        return list(_cut(request.runs, offset, offset + length)) or unknown

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
        self._session.flush()

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
            request = session.Request(session.READ, offset + at, len(part), into=part)
            self._session.demand(request, "read")

    def _write(self, offset: int, view: memoryview) -> None:
        step = self._export.maximum
        for at in range(0, len(view), step):
            part = view[at : at + step]
            request = session.Request(session.WRITE, offset + at, len(part), payload=part)
            self._session.demand(request, "written")

    def _zero_by_command(self, offset: int, length: int) -> bool:
        """Returns False where the server cannot. Without NO_HOLE: it may free the space."""
        if not self._has_zeroes:
            return False
        request = session.Request(session.WRITE_ZEROES, offset, length)
        if self._session.call(request).error in _CANNOT:
            self._has_zeroes = False
            return False
        self._session.check(request, "zeroed")
        return True

    def _write_zeros(self, offset: int, length: int) -> None:
        for at in range(offset, offset + length, len(zeros.BLANK)):
            self.write(at, zeros.blank(min(len(zeros.BLANK), offset + length - at)))


def _cut(runs: list[session.Run], start: int, end: int) -> Iterator[endpoint.Extent]:
    for run in runs:
        first, last = max(run.offset, start), min(run.offset + run.length, end)
        if first < last:
            yield endpoint.Extent(first, last - first, run.zero)
