"""Telling zeros from data in what was read."""

from collections.abc import Iterator
from typing import Final

GRAIN: Final = 64 * 1024
"""Bytes: zeros inside data are looked for in blocks of this size."""

# bytearray compares with any buffer by memcmp and stops at the first difference; memoryview compares
# item by item, and is slower by a factor of ten.
BLANK: Final = bytearray(1024 * 1024)
"""Zeros, never to be written to."""
_BLANK_VIEW: Final = memoryview(BLANK).toreadonly()


def blank(length: int) -> memoryview:
    """``length`` zeros, at most 1 MiB of them."""
    return _BLANK_VIEW[:length]


def is_zero(view: memoryview) -> bool:
    """Whether the view, of at most 1 MiB, is all zeros."""
    if len(view) == len(BLANK):
        return BLANK == view
    return bytearray(len(view)) == view


def runs(view: memoryview) -> Iterator[tuple[int, int, bool]]:
    """Cuts a view into runs of zero and other blocks: start, end, and whether it is zero."""
    start, length = 0, len(view)
    last: bool | None = None
    for at in range(0, length, GRAIN):
        zero = is_zero(view[at : at + GRAIN])
        if last is not None and zero is not last:
            yield start, at, last
            start = at
        last = zero
    if last is not None:
        yield start, length, last
