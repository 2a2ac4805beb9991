"""The directory that a backend's files are in, which no other is taken for.

The mount point of a storage that is away looks like a storage without volumes. So a marker with an
id lies in the directory, and the id is remembered in the worker's own state: only where both are
the same is a file that is not found believed to be gone.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Final

from messages import errors
from worker import durable

MARKER: Final = ".volume-worker-storage"
REMEMBERED: Final = "storage-id"
"""The file in the backend's ``state_dir``."""
_ENOUGH: Final = 64
"""Bytes, more than an id has."""
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class Directory:
    """One backend's directory; every method blocks, and is for a thread.

    Args:
        path: the directory.
        state_dir: where the id is remembered.
    """

    def __init__(self, path: pathlib.Path, state_dir: pathlib.Path) -> None:
        self.path = path
        self._remembered = state_dir / REMEMBERED
        self._id: uuid.UUID | None = None

    def set_up(self) -> None:
        """Looks whether this is the storage of the last time; what was never used is marked.

        One with volumes and no marker is of a version that made none, as long as no id is
        remembered.

        Raises:
            DriverNotInitialized: with what the operator has to do.
        """
        self._id = self._recall()
        if self._id is not None:
            try:
                with self.opened():
                    return
            except errors.DeviceUnavailable as error:
                raise errors.DriverNotInitialized(error.message) from error
        self._make()
        found = self._mark()
        try:
            # After the marker: a crash in between leaves one that the next set-up finds.
            durable.write_private(self._remembered, f"{found}\n".encode())
        except errors.TargetError as error:
            raise errors.DriverNotInitialized(error.message) from error
        self._id = found

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The directory, open, with its marker seen; what is done by it cannot meet another one.

        Raises:
            DeviceUnavailable: this is not the storage, or the system refused what was done in it.
        """
        if self._id is None:
            raise errors.DeviceUnavailable(f"{self.path} is not set up yet")
        try:
            with self._open() as folder:
                self._require_marker(folder)
                yield folder
        except OSError as error:
            # With a directory's handle, the system names a file without its directory.
            name = error.filename if isinstance(error.filename, str) else ""
            raise errors.DeviceUnavailable(
                f"{self.path / name} cannot be used: {error.strerror}"
            ) from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise errors.DeviceUnavailable(
                f"{self.path} is not there: {self._what_to_do()}"
            ) from None
        try:
            yield folder
        finally:
            os.close(folder)

    def _require_marker(self, folder: int) -> None:
        content = _marker(folder)
        if content is None:
            raise errors.DeviceUnavailable(
                f"{self.path} is not this backend's storage, for it has no {MARKER}:"
                f" {self._what_to_do()}"
            )
        if _parsed(content) != self._id:
            raise errors.DeviceUnavailable(
                f"{self.path} is another storage than this backend's, for its {MARKER} has another"
                f" id: {self._what_to_do()}"
            )

    def _what_to_do(self) -> str:
        return (
            f"mount the storage with the id {self._id}; or, to use what is there from now on,"
            f" remove {self._remembered} and start the worker anew"
        )

    # Set-up

    def _recall(self) -> uuid.UUID | None:
        try:
            content = self._remembered.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.DriverNotInitialized(
                f"{self._remembered} cannot be read: {error.strerror}"
            ) from error
        found = _parsed(content)
        if found is None:
            raise errors.DriverNotInitialized(
                f"{self._remembered} has no id: see that {self.path} is the right storage, and"
                " remove that file"
            )
        return found

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            raise errors.DriverNotInitialized(
                f"{self.path.parent} is not there: mount the file system that is to hold"
                f" the volumes, or make it with mkdir -p {self.path.parent}"
            ) from None
        except OSError as error:
            raise errors.DriverNotInitialized(
                f"{self.path} is no directory and cannot be made: {error.strerror}"
            ) from error

    def _mark(self) -> uuid.UUID:
        """The id in the marker, which is made where there is none."""
        try:
            with self._open() as folder:
                content = _marker(folder) or _make_marker(folder)
        except OSError as error:
            if error.errno in _READ_ONLY:
                raise errors.DriverNotInitialized(unwritable(self.path)) from error
            raise errors.DriverNotInitialized(
                f"{self.path / MARKER} cannot be made: {error.strerror}"
            ) from error
        found = _parsed(content)
        if found is None:
            raise errors.DriverNotInitialized(
                f"{self.path / MARKER} has no id: look who wrote it, and remove it"
            )
        return found


def unwritable(path: pathlib.Path) -> str:
    """What the operator has to do about a directory without the rights for it."""
    return f"{path} cannot be written: mount it writable, and give it to the worker's user"


def _marker(folder: int) -> bytes | None:
    """What is in the marker, None where there is none."""
    # O_NONBLOCK: a FIFO in its place must not be waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(MARKER, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return os.read(handle, _ENOUGH)
    finally:
        os.close(handle)


def _make_marker(folder: int) -> bytes:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    # An id is no secret, and another user of the host may be the first to make it.
    handle = os.open(MARKER, flags, 0o644, dir_fd=folder)
    try:
        # Hosts that share a storage may set it up at once; a crash may leave an empty marker.
        fcntl.flock(handle, fcntl.LOCK_EX)
        if content := os.read(handle, _ENOUGH):
            return content
        content = f"{uuid.uuid4()}\n".encode()
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.fsync(folder)
    return content


def _parsed(content: bytes) -> uuid.UUID | None:
    try:
        return uuid.UUID(content.decode().strip())
    except ValueError:
        return None
