"""Files that survive a power loss whole, and that only their owner can read."""

import asyncio
import os
import pathlib
import tempfile

from messages import errors


def write_private(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file atomically and durably with one that only its owner can read.

    Raises:
        TargetError: it cannot be written, for want of space or rights.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        pathlib.Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)
        raise errors.TargetError(f"{path} cannot be written: {error.strerror}") from error


async def write(path: pathlib.Path, content: bytes) -> None:
    """:func:`write_private`, in a thread: a busy disk takes seconds to sync.

    A cancellation waits for it, so that nothing is written behind the caller's back.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write_private, path, content))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder, with those above it, that only its owner can enter.

    Raises:
        TargetError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise errors.TargetError(f"{folder} cannot be made: {error.strerror}") from error
