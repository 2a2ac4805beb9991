"""Reading a destination back after a copy."""

from collections.abc import Callable
from typing import Final

from messages import errors
from worker.transfer import crew, digest, endpoint, extents, pace, zeros

_CHUNK: Final = 512 * 1024
_MISMATCH: Final = "verify_mismatch"


def verify(
    source: endpoint.Endpoint,
    destination: endpoint.Endpoint,
    size: int,
    *,
    sent: digest.Record | None,
    meter: pace.Meter,
    tick: Callable[[], None] | None = None,
) -> str:
    """Compares the destination with the source, byte by byte; returns its digest.

    Args:
        sent: what was sent, to compare with instead of a source that changes.

    Raises:
        DeviceUnavailable: they differ (``details.offset`` is that of a piece that does), or one of
            them cannot be read.
    """
    destination.drop_cache()
    tree = digest.Tree()
    crew.run(
        extents.read_pieces(None if sent else source, destination, size),
        lambda: _Verifier(source, destination, sent=sent, tree=tree, meter=meter),
        threads=digest.THREADS,
        tick=tick,
    )
    if sent and sent.text() != tree.text():
        raise _differs(destination, None)
    return tree.text()


def agrees(source: endpoint.Endpoint, destination: endpoint.Endpoint, start: int, end: int) -> bool:
    """Whether the destination has in a range what the source has; it begins with a piece."""
    destination.drop_cache()
    tree, meter = digest.Tree(), pace.Meter(end)
    try:
        crew.run(
            extents.read_pieces(source, destination, end, start=start),
            lambda: _Verifier(source, destination, sent=None, tree=tree, meter=meter),
            threads=digest.THREADS,
        )
    except errors.DeviceUnavailable as error:
        if error.details.get("reason") != _MISMATCH:
            raise
        return False
    return True


def _differs(destination: endpoint.Endpoint, offset: int | None) -> errors.DeviceUnavailable:
    where = "" if offset is None else f" in the piece at byte {offset}"
    return errors.DeviceUnavailable(
        f"{destination.name} gives back other data than was written to it{where}",
        reason=_MISMATCH,
        device=destination.name,
        offset=offset,
    )


class _Verifier:
    """One thread's hands: reads a piece at a time from both ends."""

    def __init__(
        self,
        source: endpoint.Endpoint,
        destination: endpoint.Endpoint,
        *,
        sent: digest.Record | None,
        tree: digest.Tree,
        meter: pace.Meter,
    ) -> None:
        self._source = source
        self._destination = destination
        self._sent = sent
        self._tree = tree
        self._meter = meter
        self._given = bytearray(_CHUNK)
        self._wanted = bytearray(_CHUNK)

    def __call__(self, piece: extents.Piece) -> None:
        if extents.is_blank(piece):
            self._put(piece, digest.zero_piece(), piece.length // extents.PIECE)
            return
        hashed = digest.PieceHash()
        for span in piece.spans:
            if span.source_zero and span.destination_zero:
                hashed.zeros(span.length)
                continue
            for at in range(span.offset, span.offset + span.length, _CHUNK):
                count = min(_CHUNK, span.offset + span.length - at)
                given = self._read_destination(span, at, count)
                if not self._sent and not self._is_as_source(span, at, given):
                    raise _differs(self._destination, piece.offset)
                hashed.data(given)
        self._put(piece, hashed.digest(), 1)

    def _put(self, piece: extents.Piece, value: bytes, count: int) -> None:
        if self._sent and not self._sent.matches(piece.offset, value, count):
            raise _differs(self._destination, piece.offset)
        self._tree.put(piece.offset, value, count)

    def _read_destination(self, span: extents.Span, at: int, count: int) -> memoryview:
        if span.destination_zero:
            return zeros.blank(count)
        view = memoryview(self._given)[:count]
        self._destination.read_into(at, view)
        self._meter.count(read=count)
        return view

    def _is_as_source(self, span: extents.Span, at: int, given: memoryview) -> bool:
        if span.source_zero:
            return zeros.is_zero(given)
        self._source.read_into(at, memoryview(self._wanted)[: len(given)])
        return zeros.is_same(self._wanted, given)
