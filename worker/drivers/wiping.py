"""Wiping what a sparse file holds, without making its holes into data.

Blocking calls on a descriptor, for a thread. Each can be stopped between two pieces of the work and
done again from the start.
"""

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Final

from worker import libc

PIECE: Final = 1024**3
"""Bytes that one system call punches at most, so that a stop is heeded soon."""
_ZEROS: Final = bytes(1024 * 1024)
_COLLAPSE_RANGE: Final = 0x08
"""FALLOC_FL_COLLAPSE_RANGE, fallocate(2)."""
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)


def data(descriptor: int, end: int) -> Iterator[tuple[int, int]]:
    """The extents below ``end`` that hold data, as start and end (SEEK_DATA, lseek(2)).

    A file system that knows no holes calls the whole file data.
    """
    at = 0
    while at < end:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                return
            raise
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), end)
        if start < end:
            yield start, at


def is_blank(descriptor: int) -> bool:
    """Whether the file holds no data at all."""
    found = os.fstat(descriptor)
    extents = list(itertools.islice(data(descriptor, found.st_size), 1))
    # Where no holes are known, what was never written still has no blocks.
    knows_no_holes = extents == [(0, found.st_size)]
    return not extents or (knows_no_holes and not found.st_blocks)


def zero(descriptor: int, end: int, stop: threading.Event) -> None:
    """Makes the data below ``end`` zeros, on the disk when it returns."""
    for start, stretch in data(descriptor, end):
        for at in range(start, stretch, PIECE):
            if stop.is_set():
                return
            _zero_piece(descriptor, at, min(at + PIECE, stretch), stop)
    os.fsync(descriptor)


def _zero_piece(descriptor: int, start: int, end: int, stop: threading.Event) -> None:
    try:
        libc.fallocate(descriptor, libc.PUNCH_HOLE | libc.KEEP_SIZE, start, end - start)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        for at in range(start, end, len(_ZEROS)):
            if stop.is_set():
                return
            _write(descriptor, _ZEROS[: end - at], at)


def _write(descriptor: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def compact(descriptor: int, end: int) -> int:
    """Cuts the file at ``end`` and its holes out of it; returns its new size in bytes.

    What is left is the data's own blocks, to be overwritten in place by a program that would fill
    holes up. The file is no longer what it was: only for one that is to be removed. A file system
    that cannot cut out (FALLOC_FL_COLLAPSE_RANGE) leaves the holes before the last data.
    """
    extents = list(data(descriptor, end))
    os.ftruncate(descriptor, extents[-1][1] if extents else 0)
    starts = [start for start, _ in extents]
    ends = [0, *(stretch for _, stretch in extents)]
    try:
        for hole, start in reversed(list(zip(ends, starts, strict=False))):
            if hole < start:
                libc.fallocate(descriptor, _COLLAPSE_RANGE, hole, start - hole)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EINVAL):
            raise
    return os.fstat(descriptor).st_size
