"""The copy itself: data is moved, zeros are made."""

import contextlib
import functools
from collections.abc import Callable
from typing import Final

from worker.transfer import crew, digest, endpoint, extents, file, frontier, pace, zeros

THREADS: Final = 4
"""Requests in flight at each end. With one buffer each they also bound the memory."""
FILE_THREADS: Final = 2
"""From file to file the kernel copies, and more would only wait for each other's locks."""


def move(
    source: endpoint.Endpoint,
    destination: endpoint.Endpoint,
    size: int,
    *,
    sent: digest.Record | None,
    throttle: pace.Throttle,
    meter: pace.Meter,
    tick: Callable[[], None] | None = None,
    start: int = 0,
    mark: Callable[[int], None] | None = None,
) -> None:
    """Copies the first ``size`` bytes; returns when all of them are on stable storage.

    Args:
        sent: gets the digest of what was sent, where it is wanted.
        start: the first byte that is still to be copied, at the bounds of a piece.
        mark: called now and then with the first byte before which all is on stable storage.

    Raises:
        DeviceUnavailable, InsufficientSpace: the destination is then partly written.
    """
    in_kernel = (
        sent is None and isinstance(source, file.File) and isinstance(destination, file.File)
    )
    edge = frontier.Frontier(start)
    marking = (
        frontier.Marker(destination, edge, start=start, size=size, say=mark)
        if mark
        else contextlib.nullcontext()
    )
    hands = functools.partial(
        _Mover, source, destination, sent=sent, throttle=throttle, meter=meter
    )
    with marking:
        crew.run(
            edge.watch(extents.copy_pieces(source, destination, size, start=start)),
            lambda: edge.noting(hands()),
            threads=FILE_THREADS if in_kernel else THREADS,
            tick=tick,
        )
    destination.flush()


class _Mover:
    """One thread's hands: moves a piece at a time through a buffer of its own."""

    def __init__(
        self,
        source: endpoint.Endpoint,
        destination: endpoint.Endpoint,
        *,
        sent: digest.Record | None,
        throttle: pace.Throttle,
        meter: pace.Meter,
    ) -> None:
        self._source = source
        self._destination = destination
        self._sent = sent
        self._throttle = throttle
        self._meter = meter
        self._buffer = memoryview(bytearray(pace.CHUNK))
        self._in_kernel = sent is None

    def __call__(self, piece: extents.Piece) -> None:
        if extents.is_blank(piece):
            self._meter.count(zeroed=piece.length)
            if self._sent:
                count = piece.length // extents.PIECE
                self._sent.put(piece.offset, digest.zero_piece(), count)
            return
        hashed = digest.PieceHash() if self._sent else None
        for span in piece.spans:
            if span.source_zero:
                self._blank(span, hashed)
            else:
                self._data(span, hashed)
        if self._sent and hashed:
            self._sent.put(piece.offset, hashed.digest())

    def _blank(self, span: extents.Span, hashed: digest.PieceHash | None) -> None:
        if not span.destination_zero:
            self._destination.zero(span.offset, span.length)
        if hashed:
            hashed.zeros(span.length)
        self._meter.count(zeroed=span.length)

    def _data(self, span: extents.Span, hashed: digest.PieceHash | None) -> None:
        at, end = span.offset, span.offset + span.length
        while at < end:
            count = min(self._throttle.step(), end - at)
            self._throttle.take(count)
            done = self._copy_in_kernel(at, count)
            if done < count:
                self._copy_through(at + done, self._buffer[: count - done], hashed)
            at += count

    def _copy_in_kernel(self, offset: int, length: int) -> int:
        if not (
            self._in_kernel
            and isinstance(self._source, file.File)
            and isinstance(self._destination, file.File)
        ):
            return 0
        done = self._destination.copy_from(self._source, offset, length)
        self._in_kernel = done == length
        self._meter.count(copied=done)
        return done

    def _copy_through(self, offset: int, view: memoryview, hashed: digest.PieceHash | None) -> None:
        self._source.read_into(offset, view)
        if hashed:
            hashed.data(view)
        for start, end, zero in zeros.runs(view):
            if zero:
                self._destination.zero(offset + start, end - start)
                self._meter.count(zeroed=end - start)
            else:
                self._destination.write(offset + start, view[start:end])
                self._meter.count(copied=end - start)
