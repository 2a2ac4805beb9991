"""A regular file or a block device, by its path."""

import contextlib
import errno
import fcntl
import os
import pathlib
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from messages import errors
from worker import libc
from worker.transfer import endpoint, zeros

# linux/fs.h
_BLKGETSIZE64: Final = 0x80081272
_BLKSSZGET: Final = 0x1268
_BLKZEROOUT: Final = 0x127F

_HOLES_ARE_HOLES: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs", "zfs"}
)
"""Filesystems whose holes, punched ones too, are known to read as zeros.

Others may not: qemu's FUSE export reports success for PUNCH_HOLE and keeps the data unless told
``discard=unmap``, and calls a hole what a SCSI device has merely deallocated.
"""
_CANNOT: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM}
)
"""What a system call answers that this file, kernel or pair of files does not support."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ZERO_STEP: Final = 64 * 1024 * 1024
_CHECKED_STEP: Final = 4 * 1024 * 1024
_SHARED_MEMORY: Final = pathlib.Path("/dev/shm")  # noqa: S108

ZeroMethod = Callable[[int, int], None]


class File:
    """An open file or block device.

    Args:
        path: what to open; it is never created.
        writable: open for reading and writing, else for reading.
        may_be_empty: whether a file of no bytes is one.

    Raises:
        DeviceUnavailable: it is not there, empty, neither a regular file nor a block device, an
            ordinary file in the place of a device, or may not be opened.
    """

    def __init__(self, path: pathlib.Path, *, writable: bool, may_be_empty: bool = False) -> None:
        self.name = str(path)
        with self._faults("opened"):
            self._check_kind(os.stat(path), path)  # noqa: PTH116
            # Without O_CREAT: a device that has vanished must not come back as an ordinary file.
            flags = os.O_RDWR if writable else os.O_RDONLY
            self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.descriptor)
            self._check_kind(status, path)
            self.is_block = stat.S_ISBLK(status.st_mode)
            self.identity: object = (
                ("device", status.st_rdev)
                if self.is_block
                else ("file", status.st_dev, status.st_ino)
            )
            self._measure(status)
            if not self.size and not may_be_empty:
                self._refuse("is empty")
        except BaseException:
            self.close()
            raise
        self._is_plain = not self.is_block and _filesystem(self.descriptor) in _HOLES_ARE_HOLES
        self._trusts_holes = self._is_plain or not writable
        self._zero_methods = self._choose_zero_methods()

    def extents(self, offset: int, length: int) -> list[endpoint.Extent]:
        unknown = [endpoint.Extent(offset, length, zero=False)]
        if self.is_block or not self._trusts_holes:
            return unknown
        end = offset + length
        try:
            data = min(os.lseek(self.descriptor, offset, os.SEEK_DATA), end)
            if data > offset:
                return [endpoint.Extent(offset, data - offset, zero=True)]
            hole = min(os.lseek(self.descriptor, offset, os.SEEK_HOLE), end)
        except OSError as error:
            # No data from here to the end of the file.
            if error.errno == errno.ENXIO and end <= os.fstat(self.descriptor).st_size:
                return [endpoint.Extent(offset, length, zero=True)]
            return unknown
        return [endpoint.Extent(offset, hole - offset, zero=False)] if hole > offset else unknown

    def read_into(self, offset: int, view: memoryview) -> None:
        done = 0
        with self._faults("read", offset):
            while done < len(view):
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
                if not count:
                    self._refuse(f"ends at byte {offset + done}, and {self.size} were expected")
                done += count

    def write(self, offset: int, view: memoryview) -> None:
        done = 0
        with self._faults("written", offset):
            while done < len(view):
                done += os.pwrite(self.descriptor, view[done:], offset + done)

    def copy_from(self, source: "File", offset: int, length: int) -> int:
        """Has the kernel copy a range, or share it where the filesystem can.

        Returns how many bytes it did: less than asked for where it cannot.
        """
        done = 0
        with self._faults("written", offset):
            while done < length:
                at = offset + done
                try:
                    count = os.copy_file_range(
                        source.descriptor, self.descriptor, length - done, at, at
                    )
                except OSError as error:
                    if error.errno in _CANNOT:
                        break
                    raise
                if not count:
                    break
                done += count
        return done

    def zero(self, offset: int, length: int) -> None:
        step = _ZERO_STEP if self._is_plain else _CHECKED_STEP
        for at in range(offset, offset + length, step):
            count = min(step, offset + length - at)
            # Reading first keeps a thin volume thin that would be filled with zeros.
            if self._is_plain or not self._reads_zero(at, count):
                self._zero_step(at, count)

    def flush(self) -> None:
        with self._faults("flushed"):
            os.fsync(self.descriptor)

    def drop_cache(self) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def _check_kind(self, status: os.stat_result, path: pathlib.Path) -> None:
        if stat.S_ISBLK(status.st_mode):
            return
        if not stat.S_ISREG(status.st_mode):
            self._refuse("is neither a file nor a block device")
        real = path.resolve()
        if real.is_relative_to("/dev") and not real.is_relative_to(_SHARED_MEMORY):
            self._refuse("is an ordinary file in the place of a device")

    def _measure(self, status: os.stat_result) -> None:
        self._sector = 1
        self.size = status.st_size
        if self.is_block:
            with self._faults("measured"):
                size = fcntl.ioctl(self.descriptor, _BLKGETSIZE64, bytes(8))
                sector = fcntl.ioctl(self.descriptor, _BLKSSZGET, bytes(4))
            (self.size,) = struct.unpack("Q", size)
            (self._sector,) = struct.unpack("i", sector)

    def _choose_zero_methods(self) -> list[ZeroMethod]:
        if self.is_block:
            # The kernel answers PUNCH_HOLE on a block device only where zeros are read afterwards.
            return [self._punch_hole, self._zero_out, self._write_zeros]
        if self._is_plain:
            return [self._punch_hole, self._zero_range, self._write_zeros]
        return [self._zero_range, self._write_zeros]

    def _zero_step(self, offset: int, length: int) -> None:
        start = min(-(-offset // self._sector) * self._sector, offset + length)
        end = max((offset + length) // self._sector * self._sector, start)
        self._write_zeros(offset, start - offset)
        self._write_zeros(end, offset + length - end)
        if start < end:
            any(self._can(method, start, end - start) for method in tuple(self._zero_methods))

    def _can(self, method: ZeroMethod, offset: int, length: int) -> bool:
        """Zeroes a range by one of the methods, or learns that it does not work here."""
        try:
            with self._faults("zeroed", offset):
                method(offset, length)
        except errors.DeviceUnavailable as fault:
            if fault.details.get("errno") not in _CANNOT or method == self._write_zeros:
                raise
            self._zero_methods = [other for other in self._zero_methods if other != method]
            return False
        return True

    def _punch_hole(self, offset: int, length: int) -> None:
        libc.fallocate(self.descriptor, libc.PUNCH_HOLE | libc.KEEP_SIZE, offset, length)

    def _zero_range(self, offset: int, length: int) -> None:
        libc.fallocate(self.descriptor, libc.ZERO_RANGE | libc.KEEP_SIZE, offset, length)

    def _zero_out(self, offset: int, length: int) -> None:
        fcntl.ioctl(self.descriptor, _BLKZEROOUT, struct.pack("QQ", offset, length))

    def _write_zeros(self, offset: int, length: int) -> None:
        for at in range(offset, offset + length, len(zeros.BLANK)):
            self.write(at, zeros.blank(min(len(zeros.BLANK), offset + length - at)))

    def _reads_zero(self, offset: int, length: int) -> bool:
        buffer = memoryview(bytearray(min(length, len(zeros.BLANK))))
        for at in range(offset, offset + length, len(buffer)):
            view = buffer[: min(len(buffer), offset + length - at)]
            self.read_into(at, view)
            if not zeros.is_zero(view):
                return False
        return True

    def _refuse(self, reason: str) -> NoReturn:
        raise errors.DeviceUnavailable(f"{self.name} {reason}", device=self.name)

    @contextlib.contextmanager
    def _faults(self, done: str, offset: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = "" if offset is None else f" at byte {offset}"
            kind = errors.InsufficientSpace if error.errno in _FULL else errors.DeviceUnavailable
            raise kind(
                f"{self.name} cannot be {done}{where}: {error.strerror}",
                device=self.name,
                offset=offset,
                errno=error.errno,
            ) from error


def _filesystem(descriptor: int) -> str:
    """The type of the filesystem that a descriptor is on, or "" where that cannot be told.

    By the mount's id: st_dev is not the mount's own on btrfs. See proc_pid_mountinfo(5).
    """
    with contextlib.suppress(OSError, IndexError):
        lines = pathlib.Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        mount = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), None)
        with pathlib.Path("/proc/self/mountinfo").open() as table:
            for line in table:
                if line.split(maxsplit=1)[0] == mount:
                    return line.split(" - ", 1)[1].split()[0]
    return ""
