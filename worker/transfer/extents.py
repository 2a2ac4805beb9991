"""The order of the work: what to do with each range of a copy, worked out as it goes along."""

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from worker.transfer import endpoint

PIECE: Final = 4 * 1024 * 1024
"""Bytes. Work is given out in aligned pieces of this size; digests are made of the same ones."""
_LOOK_AHEAD: Final = 256 * 1024 * 1024
"""Bytes that an endpoint is asked about at a time; it bounds how many extents are held at once."""


class Span(NamedTuple):
    """A run of bytes about which both ends of a copy say one thing."""

    offset: int
    length: int
    source_zero: bool
    destination_zero: bool
    """Not asked, and False, where it makes no difference."""


class Piece(NamedTuple):
    """One aligned piece, or a run of whole pieces in which nothing is to be read."""

    offset: int
    length: int
    spans: tuple[Span, ...]


class Walk:
    """What an endpoint says about a range, asked for from its start to its end, once."""

    def __init__(self, origin: endpoint.Endpoint, end: int) -> None:
        self._origin = origin
        self._end = end
        self._known: deque[endpoint.Extent] = deque()

    def cut(self, offset: int, length: int) -> Iterator[endpoint.Extent]:
        """The extents of a range, cut to it; ranges must be asked for in rising order."""
        end = offset + length
        while offset < end:
            extent = self._at(offset)
            upto = min(extent.end, end)
            yield endpoint.Extent(offset, upto - offset, extent.zero)
            offset = upto

    def _at(self, offset: int) -> endpoint.Extent:
        while self._known and self._known[0].end <= offset:
            self._known.popleft()
        if not self._known:
            ahead = min(_LOOK_AHEAD, self._end - offset)
            self._known.extend(self._origin.extents(offset, ahead))
        return self._known[0]


def copy_pieces(
    source: endpoint.Endpoint, destination: endpoint.Endpoint, size: int, *, start: int = 0
) -> Iterator[Piece]:
    """The pieces of a copy. The destination is only asked where the source has zeros.

    ``start``, which one of them begins with, is the first byte that they are about.
    """
    return _pieces(_copy_spans(Walk(source, size), Walk(destination, size), start, size))


def read_pieces(
    source: endpoint.Endpoint | None,
    destination: endpoint.Endpoint,
    size: int,
    *,
    start: int = 0,
) -> Iterator[Piece]:
    """The pieces of a reading back; without a source it is as if it said the same."""
    walk = Walk(source, size) if source else None
    return _pieces(_read_spans(walk, Walk(destination, size), start, size))


def _copy_spans(source: Walk, destination: Walk, start: int, size: int) -> Iterator[Span]:
    for extent in source.cut(start, size - start):
        if not extent.zero:
            yield Span(extent.offset, extent.length, source_zero=False, destination_zero=False)
            continue
        for part in destination.cut(extent.offset, extent.length):
            yield Span(part.offset, part.length, source_zero=True, destination_zero=part.zero)


def _read_spans(source: Walk | None, destination: Walk, start: int, size: int) -> Iterator[Span]:
    for extent in destination.cut(start, size - start):
        parts = source.cut(extent.offset, extent.length) if source else (extent,)
        for part in parts:
            yield Span(
                part.offset, part.length, source_zero=part.zero, destination_zero=extent.zero
            )


def _pieces(spans: Iterator[Span]) -> Iterator[Piece]:
    """Cuts spans at the pieces' bounds and gathers them, but leaves long runs of zeros whole."""
    gathered: list[Span] = []
    for span in spans:
        rest = span
        while rest.length:
            whole = rest.length // PIECE * PIECE
            if rest.source_zero and rest.destination_zero and whole and rest.offset % PIECE == 0:
                head, rest = _split(rest, whole)
            else:
                head, rest = _split(rest, min(rest.length, PIECE - rest.offset % PIECE))
            gathered.append(head)
            if rest.offset % PIECE == 0:
                yield _gather(gathered)
                gathered = []
    if gathered:
        yield _gather(gathered)


def _split(span: Span, length: int) -> tuple[Span, Span]:
    head = span._replace(length=length)
    return head, span._replace(offset=span.offset + length, length=span.length - length)


def _gather(spans: list[Span]) -> Piece:
    first, last = spans[0], spans[-1]
    return Piece(first.offset, last.offset + last.length - first.offset, tuple(spans))


def is_blank(piece: Piece) -> bool:
    """Whether it is one or more whole pieces that both sides call zero."""
    return piece.length % PIECE == 0 and all(
        span.source_zero and span.destination_zero for span in piece.spans
    )
