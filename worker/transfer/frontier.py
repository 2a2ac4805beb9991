"""How far a copy has come without a gap, and when that is safe: what it can go on from."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self

from worker.transfer import endpoint, extents

STEPS: Final = 100
"""Marks in a copy, at most: each costs a flush of the destination."""
SMALLEST: Final = 32 * 1024 * 1024
"""Bytes between two marks, at least."""
_LOOK: Final = 0.05
"""Seconds between looks whether it has come far enough."""


class Frontier:
    """The first byte that is not done, of pieces that several threads do in turn."""

    def __init__(self, start: int) -> None:
        self._lock = threading.Lock()
        self._next = start
        self._begun: set[int] = set()

    def watch(self, pieces: Iterable[extents.Piece]) -> Iterator[extents.Piece]:
        """The pieces; each is begun when it is taken."""
        for piece in pieces:
            with self._lock:
                self._begun.add(piece.offset)
                self._next = piece.offset + piece.length
            yield piece

    def noting(self, do: Callable[[extents.Piece], None]) -> Callable[[extents.Piece], None]:
        """``do``, after which the piece is done."""

        def done(piece: extents.Piece) -> None:
            do(piece)
            with self._lock:
                self._begun.discard(piece.offset)

        return done

    def mark(self) -> int:
        """Up to where all is done."""
        with self._lock:
            return min(self._begun, default=self._next)


class Marker:
    """Tells now and then, in a thread of its own, how far a copy has safely come.

    Args:
        say: called with the mark, once what stands before it is on stable storage.
    """

    def __init__(
        self,
        destination: endpoint.Endpoint,
        frontier: Frontier,
        *,
        start: int,
        size: int,
        say: Callable[[int], None],
    ) -> None:
        self._destination = destination
        self._frontier = frontier
        self._said = start
        self._step = max(SMALLEST, size // STEPS)
        self._say = say
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._mark()
        except BaseException as error:
            # Raised again at the end of the block: the kernel tells of a failed flush only once.
            self._error = error

    def _mark(self) -> None:
        while not self._over.wait(_LOOK):
            # Taken before the flush, which says nothing of what is written while it lasts.
            mark = self._frontier.mark() // extents.PIECE * extents.PIECE
            if mark - self._said >= self._step:
                self._destination.flush()
                self._said = mark
                self._say(mark)
