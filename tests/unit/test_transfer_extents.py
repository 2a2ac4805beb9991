"""The order of the work, checked against a map of single bytes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.transfer import endpoint, extents

PIECE = extents.PIECE
PLACES = st.one_of(
    st.integers(0, 5 * PIECE), st.sampled_from([PIECE, 2 * PIECE, 3 * PIECE, 4 * PIECE])
)


class Mapped:
    """An endpoint that knows its extents, and tells only some at a time."""

    name = "mapped"
    identity: object = None

    def __init__(self, cuts: list[int], first_is_zero: bool) -> None:
        bounds = sorted({0, *cuts, 6 * PIECE})
        self.size = bounds[-1]
        self.known = [
            endpoint.Extent(start, end - start, (index % 2 == 0) is first_is_zero)
            for index, (start, end) in enumerate(itertools.pairwise(bounds))
        ]

    def extents(self, offset: int, length: int) -> list[endpoint.Extent]:
        for extent in self.known:
            if extent.offset <= offset < extent.end:
                return [extent._replace(offset=offset, length=min(extent.end - offset, length))]
        raise AssertionError(offset)

    def is_zero(self, offset: int) -> bool:
        return self.extents(offset, 1)[0].zero

    def read_into(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def write(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def zero(self, offset: int, length: int) -> None:
        raise NotImplementedError

    def flush(self) -> None: ...

    def drop_cache(self) -> None: ...

    def close(self) -> None: ...


ENDS = st.builds(Mapped, st.lists(PLACES, max_size=8), st.booleans())


def check_cover(pieces: list[extents.Piece], size: int) -> None:
    at = 0
    for piece in pieces:
        assert piece.offset == at
        assert piece.offset % PIECE == 0
        assert piece.length <= PIECE or extents.is_blank(piece)
        for span in piece.spans:
            assert span.offset == at
            assert span.length > 0
            at += span.length
        assert piece.offset + piece.length == at
    assert at == size


@settings(deadline=None)
@given(ENDS, ENDS, st.integers(1, 6 * PIECE))
def test_a_copy_covers_every_byte_once(source: Mapped, destination: Mapped, size: int) -> None:
    pieces = list(extents.copy_pieces(source, destination, size))
    check_cover(pieces, size)
    for piece in pieces:
        for span in piece.spans:
            for at in (span.offset, span.offset + span.length - 1):
                assert span.source_zero is source.is_zero(at)
                assert span.destination_zero is (source.is_zero(at) and destination.is_zero(at))


@settings(deadline=None)
@given(ENDS, ENDS, st.integers(1, 6 * PIECE))
def test_a_reading_back_covers_every_byte_once(
    source: Mapped, destination: Mapped, size: int
) -> None:
    pieces = list(extents.read_pieces(source, destination, size))
    check_cover(pieces, size)
    for piece in pieces:
        for span in piece.spans:
            for at in (span.offset, span.offset + span.length - 1):
                assert span.source_zero is source.is_zero(at)
                assert span.destination_zero is destination.is_zero(at)
