"""Telling zeros from data in what was read, and equal from different."""

from collections.abc import Iterator
from typing import Final

GRAIN: Final = 64 * 1024
"""Bytes: zeros inside data are looked for in blocks of this size."""

# bytearray compares with any buffer by memcmp and stops at the first difference; memoryview goes
# item by item, and is slower by a factor of ten.
BLANK: Final = bytearray(1024 * 1024)
"""Zeros, never to be written to."""
_BLANK_GRAIN: Final = bytearray(GRAIN)
_BLANK_VIEW: Final = memoryview(BLANK).toreadonly()


def blank(length: int) -> memoryview:
    """``length`` zeros, at most 1 MiB of them."""
    return _BLANK_VIEW[:length]


def is_zero(view: memoryview) -> bool:
    """Whether the view, of at most 1 MiB, is all zeros."""
    return is_same(_BLANK_GRAIN if len(view) <= GRAIN else BLANK, view)


def is_same(buffer: bytearray, view: memoryview) -> bool:
    """Whether the buffer begins with what the view holds."""
    return (buffer if len(buffer) == len(view) else buffer[: len(view)]) == view


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
