"""Up to where a copy is done without a gap, whatever the order in which its threads end."""

import threading
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import errors
from worker.transfer import extents, frontier

PIECE = extents.PIECE


def _pieces(count: int, start: int = 0) -> list[extents.Piece]:
    return [extents.Piece(start + at * PIECE, PIECE, ()) for at in range(count)]


@given(st.data())
def test_what_stands_before_the_mark_is_done(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 5)) * PIECE
    edge = frontier.Frontier(start)
    taken = edge.watch(_pieces(8, start))
    done: set[int] = set()
    begun: list[extents.Piece] = []
    end = edge.noting(lambda piece: done.add(piece.offset))
    for _ in range(16):
        which = data.draw(st.integers(-1, len(begun) - 1))
        if which >= 0:
            end(begun.pop(which))
        elif (piece := next(taken, None)) is not None:
            begun.append(piece)
        mark = edge.mark()
        assert mark >= start
        assert all(at in done for at in range(start, mark, PIECE))
        assert mark == start + PIECE * 8 or mark not in done


def test_a_piece_that_failed_is_not_done() -> None:
    edge = frontier.Frontier(0)
    first, second = edge.watch(_pieces(2))

    def fail(_: extents.Piece) -> None:
        raise errors.DeviceUnavailable("cut")

    with pytest.raises(errors.DeviceUnavailable):
        edge.noting(fail)(first)
    edge.noting(lambda _: None)(second)
    assert edge.mark() == 0


class Destination:
    """Counts flushes, or fails at them."""

    def __init__(self, error: errors.DeviceUnavailable | None = None) -> None:
        self.error = error
        self.flushed = threading.Event()

    def flush(self) -> None:
        self.flushed.set()
        if self.error:
            raise self.error


def _marker(destination: Destination, edge: frontier.Frontier, said: list[int]) -> frontier.Marker:
    return frontier.Marker(
        cast("Any", destination), edge, start=0, size=frontier.SMALLEST * 4, say=said.append
    )


def test_a_mark_is_told_once_it_is_safe_and_far_enough_from_the_last() -> None:
    edge, said, destination = frontier.Frontier(0), list[int](), Destination()
    marked = threading.Event()
    with _marker(destination, edge, said):
        # Begun, and all of it done but the last piece.
        *done, last = edge.watch(_pieces(frontier.SMALLEST // PIECE + 1))
        for piece in done:
            edge.noting(lambda _: None)(piece)
        assert destination.flushed.wait(5)
        marked.wait(3 * frontier._LOOK)
    assert said == [last.offset]


def test_a_flush_that_failed_ends_the_copy() -> None:
    """The kernel tells of it only once: the flush at the end would succeed."""
    edge, said = frontier.Frontier(0), list[int]()
    destination = Destination(errors.DeviceUnavailable("cannot be flushed"))

    def copy() -> None:
        with _marker(destination, edge, said):
            for piece in list(edge.watch(_pieces(frontier.SMALLEST // PIECE))):
                edge.noting(lambda _: None)(piece)
            assert destination.flushed.wait(5)

    with pytest.raises(errors.DeviceUnavailable, match="flushed"):
        copy()
    assert said == []
