"""Volumes as sparse files in one directory.

A volume is the regular file ``volume-ID`` of its size, rounded up to whole sectors; one of size 0
is the beginning of a create that was interrupted, and no volume. Nothing of a volume but its id
goes into a path, and no link is ever followed.
"""

import asyncio
import contextlib
import errno
import os
import pathlib
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import pydantic
import structlog

from messages import errors
from worker import process, retry
from worker.drivers import base, capacity, directory, wiping

log = structlog.get_logger(__name__)

MIB: Final = 1024**2
SECTOR: Final = 512
"""Bytes; a target that serves sectors would cut off what is left of a file beyond the last one."""
_PREFIX: Final = "volume-"
_T = TypeVar("_T")
_FULL: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_SHRED_PASSES: Final = 3
_SHRED_PACE: Final = 5 * MIB
"""Bytes a second and pass that the slowest disk is taken to manage."""


def _absolute(directory: pathlib.Path) -> pathlib.Path:
    if not directory.is_absolute():
        raise ValueError("must be an absolute path")
    return directory


class Options(base.Options):
    """Options of the file driver."""

    directory: Annotated[pathlib.Path, pydantic.AfterValidator(_absolute)] = pydantic.Field(
        description="where the volumes are; made where only the last part of it is missing"
    )


class FileDriver(base.Driver):
    """The file driver: no program, no root, any file system with sparse files."""

    Options: ClassVar[type[pydantic.BaseModel]] = Options

    def __init__(self, context: base.Context) -> None:
        self._options: Options = context.options
        self._directory = directory.Directory(self._options.directory, context.state_dir)
        self._execute = context.execute
        self._ledger = capacity.Ledger(
            self._options.max_over_subscription_ratio, self._options.reserved_percentage
        )
        self._stats: Mapping[str, Any] | None = None

    # Life cycle

    async def do_setup(self) -> None:
        """Makes the directory, or knows it again, and counts what is in it.

        Raises:
            DriverNotInitialized: with what the operator has to do.
        """
        await asyncio.to_thread(self._directory.set_up)
        await self._recount()

    async def check_for_setup_error(self) -> None:
        """Looks whether volumes can be made, and wiped.

        Raises:
            DriverNotInitialized: with what the operator has to do.
        """
        path = self._directory.path
        if not await asyncio.to_thread(os.access, path, os.R_OK | os.W_OK | os.X_OK):
            raise errors.DriverNotInitialized(directory.unwritable(path))
        shreds = self._options.volume_clear is base.VolumeClear.SHRED
        if shreds and process.find_program("shred") is None:
            raise errors.DriverNotInitialized(
                "volume_clear is shred and there is no shred on PATH: install coreutils"
            )

    async def get_volume_stats(self, *, refresh: bool = False) -> Mapping[str, Any]:
        """See :meth:`worker.drivers.base.Driver.get_volume_stats`.

        ``storage_protocol`` is the target's to tell.
        """
        if refresh or self._stats is None:
            space = await self._recount()
            self._stats = {
                "total_capacity_bytes": space.total,
                "free_capacity_bytes": space.free,
                "provisioned_capacity_bytes": self._ledger.provisioned,
                "thin_provisioning_support": True,
                "thick_provisioning_support": False,
                "multiattach": False,
                "online_extend_support": True,
                "sparse_copy_volume": True,
                "total_volumes": self._ledger.volumes,
            }
        return self._stats

    async def _recount(self) -> capacity.Space:
        sizes, space = await asyncio.to_thread(self._survey)
        self._ledger.set([size for size in sizes.values() if size])
        return space

    # Volumes

    async def create_volume(self, volume: base.Volume) -> base.Update:
        """See :meth:`worker.drivers.base.Driver.create_volume`.

        Raises:
            InsufficientSpace: with nothing made.
            VolumeExists: a file stands there and holds data.
        """
        with self._ledger.taking(_in_sectors(volume.size_bytes)) as taken:

            def create() -> None:
                taken.kept = self._create(volume, taken)

            await _to_its_end(create)
        return base.Update()

    async def delete_volume(self, volume: base.Volume) -> None:
        """See :meth:`worker.drivers.base.Driver.delete_volume`."""
        size = await self._clear(volume)
        if size is not None and await _to_its_end(self._unlink, volume.id):
            self._ledger.give_back(size)

    async def extend_volume(self, volume: base.Volume, new_size_bytes: int) -> None:
        """See :meth:`worker.drivers.base.Driver.extend_volume`.

        Raises:
            InvalidRequest: it is larger already; a volume never shrinks.
            InsufficientSpace: with nothing changed.
            VolumeNotFound: there is no such file.
        """
        size = await self.find_volume(volume)
        if size is None:
            raise errors.VolumeNotFound(f"{self._path(volume.id)} is not there")
        new_size_bytes = _in_sectors(new_size_bytes)
        if new_size_bytes < size:
            raise errors.InvalidRequest(
                f"the volume has {size} bytes and never shrinks", size_bytes=size
            )
        if new_size_bytes > size:
            with self._ledger.taking(new_size_bytes - size, volumes=0) as taken:

                def grow() -> None:
                    self._grow(volume.id, new_size_bytes, taken)
                    taken.kept = True

                await _to_its_end(grow)

    async def find_volume(self, volume: base.Volume) -> int | None:
        """See :meth:`worker.drivers.base.Driver.find_volume`."""
        return await asyncio.to_thread(self._size, volume.id)

    async def list_volumes(self) -> Mapping[uuid.UUID, int] | None:
        """See :meth:`worker.drivers.base.Driver.list_volumes`."""
        sizes, _ = await asyncio.to_thread(self._survey)
        return sizes

    def local_path(self, volume: base.Volume) -> pathlib.Path:
        """See :meth:`worker.drivers.base.Driver.local_path`."""
        return self._path(volume.id)

    # Wiping

    async def _clear(self, volume: base.Volume) -> int | None:
        """Wipes what ``volume_clear`` says; returns the file's size before, None if none is."""
        match self._options.volume_clear:
            case base.VolumeClear.NONE:
                return await asyncio.to_thread(self._size, volume.id, minimum=0)
            case base.VolumeClear.ZERO:
                return await _stoppable(self._zero, volume.id)
            case base.VolumeClear.SHRED:
                return await self._shred(volume.id)

    def _zero(self, stop: threading.Event, volume_id: uuid.UUID) -> int | None:
        with self._open(volume_id) as (_, descriptor):
            if descriptor is None:
                return None
            size = os.fstat(descriptor).st_size
            wiping.zero(descriptor, self._clear_end(size), stop)
            return size

    async def _shred(self, volume_id: uuid.UUID) -> int | None:
        size, left = await asyncio.to_thread(self._compact, volume_id)
        if left:
            await retry.try_execute(
                self._execute,
                "shred",
                f"--iterations={_SHRED_PASSES}",
                f"--size={left}",
                self._path(volume_id),
                num_shell_tries=self._options.num_shell_tries,
                timeout=process.DEFAULT_TIMEOUT + _SHRED_PASSES * left / _SHRED_PACE,
            )
        return size

    def _compact(self, volume_id: uuid.UUID) -> tuple[int | None, int]:
        with self._open(volume_id) as (_, descriptor):
            if descriptor is None:
                return None, 0
            size = os.fstat(descriptor).st_size
            return size, wiping.compact(descriptor, self._clear_end(size))

    def _clear_end(self, size: int) -> int:
        limit = self._options.volume_clear_size * MIB
        return min(size, limit) if limit else size

    # Blocking work, for threads

    def _path(self, volume_id: uuid.UUID) -> pathlib.Path:
        return self._directory.path / f"{_PREFIX}{volume_id}"

    def _survey(self) -> tuple[dict[uuid.UUID, int], capacity.Space]:
        sizes = {}
        with self._directory.opened() as folder, os.scandir(folder) as entries:
            for entry in entries:
                if _is_volume_name(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat(follow_symlinks=False).st_size
                        sizes[uuid.UUID(entry.name.removeprefix(_PREFIX))] = size
            return sizes, capacity.space(folder)

    def _create(self, volume: base.Volume, taken: capacity.Taken) -> bool:
        """Returns whether this call made the volume."""
        path, size = self._path(volume.id), _in_sectors(volume.size_bytes)
        with (
            self._open(volume.id, os.O_CREAT) as (folder, descriptor),
            _insufficient_space(path, size),
        ):
            assert descriptor is not None
            found = os.fstat(descriptor).st_size
            # What an earlier try made is blank: nobody was told of it yet.
            if found and not wiping.is_blank(descriptor):
                raise errors.VolumeExists(
                    f"{path} has {found} bytes and holds data of nobody knows whom: move it away",
                    size_bytes=found,
                )
            if found == size:
                return False
            try:
                self._ledger.check(capacity.space(folder), taken)
                os.ftruncate(descriptor, size)
            except BaseException:
                if not found:
                    os.unlink(path.name, dir_fd=folder)
                raise
            os.fsync(descriptor)
            os.fsync(folder)
        return True

    def _grow(self, volume_id: uuid.UUID, size: int, taken: capacity.Taken) -> None:
        path = self._path(volume_id)
        with (
            self._open(volume_id) as (folder, descriptor),
            _insufficient_space(path, taken.amount),
        ):
            if descriptor is None:
                raise errors.VolumeNotFound(f"{path} is not there")
            self._ledger.check(capacity.space(folder), taken)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)

    def _unlink(self, volume_id: uuid.UUID) -> bool:
        with self._directory.opened() as folder:
            try:
                os.unlink(self._path(volume_id).name, dir_fd=folder)
            except FileNotFoundError:
                return False
            os.fsync(folder)
            return True

    def _size(self, volume_id: uuid.UUID, *, minimum: int = 1) -> int | None:
        path = self._path(volume_id)
        with self._directory.opened() as folder:
            try:
                found = os.lstat(path.name, dir_fd=folder)
            except FileNotFoundError:
                return None
        _require_file(path, found)
        return found.st_size if found.st_size >= minimum else None

    @contextlib.contextmanager
    def _open(self, volume_id: uuid.UUID, flags: int = 0) -> Iterator[tuple[int, int | None]]:
        """The directory, and the volume's file, open for both ways, or None if there is none."""
        with self._directory.opened() as folder:
            descriptor = _open_if_there(self._path(volume_id), folder, flags)
            try:
                yield folder, descriptor
            finally:
                if descriptor is not None:
                    os.close(descriptor)


def _open_if_there(path: pathlib.Path, folder: int, flags: int) -> int | None:
    # O_NONBLOCK: opening a FIFO that somebody put there must not wait for a writer.
    always = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path.name, flags | always, 0o600, dir_fd=folder)
    except FileNotFoundError as error:
        if flags & os.O_CREAT:
            raise errors.DeviceUnavailable(f"{path.parent} was removed") from error
        return None
    except OSError as error:
        if error.errno in _FULL:
            raise errors.InsufficientSpace(f"{path} cannot be made: {error.strerror}") from None
        with contextlib.suppress(FileNotFoundError):
            _require_file(path, os.lstat(path.name, dir_fd=folder))
        raise errors.DeviceUnavailable(f"{path} cannot be opened: {error.strerror}") from error
    try:
        _require_file(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _in_sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR


def _is_volume_name(name: str) -> bool:
    try:
        return name == f"{_PREFIX}{uuid.UUID(name.removeprefix(_PREFIX))}"
    except ValueError:
        return False


def _require_file(path: pathlib.Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise errors.DeviceUnavailable(f"{path} is {kind}: look who put it there, and remove it")


@contextlib.contextmanager
def _insufficient_space(path: pathlib.Path, size: int) -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        raise errors.InsufficientSpace(f"no file has {size} bytes") from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise errors.InsufficientSpace(
            f"{path.parent} cannot take {size} bytes: {error.strerror}"
        ) from error


async def _stoppable(work: Callable[..., _T], *args: Any) -> _T:
    """Runs ``work(stop, …)`` in a thread; cancelled, it sets ``stop`` and waits for its end."""
    stop = threading.Event()
    return await _to_its_end(work, stop, *args, on_cancel=stop.set)


async def _to_its_end(
    work: Callable[..., _T], *args: Any, on_cancel: Callable[[], None] | None = None
) -> _T:
    """Runs ``work(…)`` in a thread; cancelled, it waits for its end, so that all stands still."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await asyncio.wait({running})
        raise
