"""The few system calls that Python has no function for."""

import ctypes
import os
from typing import Final

PUNCH_HOLE: Final = 0x02
KEEP_SIZE: Final = 0x01
ZERO_RANGE: Final = 0x10
_PR_SET_PDEATHSIG: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)
_fallocate: Final = _libc.fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2), with a mode.

    Raises:
        OSError: as the system call does.
    """
    while _fallocate(descriptor, mode, offset, length):
        error = ctypes.get_errno()
        if not isinstance(OSError(error, ""), InterruptedError):
            raise OSError(error, os.strerror(error))


def die_with_parent(number: int) -> None:
    """Asks for a signal when the parent ends (PR_SET_PDEATHSIG, prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
