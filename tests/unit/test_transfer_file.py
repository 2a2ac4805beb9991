"""Files as endpoints: opening, holes, and making zeros."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Protocol

import pytest

from messages import errors
from worker import libc
from worker.transfer import file

MIB = 1024 * 1024
OLD = b"\xee"


class OpenFile(Protocol):
    def __call__(self, path: pathlib.Path, *, writable: bool = True) -> file.File: ...


@pytest.fixture
def volume(tmp_path: pathlib.Path) -> pathlib.Path:
    """4 MiB of old data."""
    path = tmp_path / "volume"
    path.write_bytes(OLD * 4 * MIB)
    return path


@pytest.fixture
def open_file() -> Iterator[OpenFile]:
    with contextlib.ExitStack() as stack:

        def open_file(path: pathlib.Path, *, writable: bool = True) -> file.File:
            opened = file.File(path, writable=writable)
            stack.callback(opened.close)
            return opened

        yield open_file


def test_a_missing_file_is_unavailable_and_not_made(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.DeviceUnavailable, match="No such file"):
        file.File(tmp_path / "absent", writable=True)
    assert not list(tmp_path.iterdir())


def test_an_empty_file_is_unavailable(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(errors.DeviceUnavailable, match="is empty"):
        file.File(tmp_path / "empty", writable=False)


@pytest.mark.parametrize("kind", ["folder", "pipe", "character device"])
def test_anything_but_a_file_or_block_device_is_unavailable(
    tmp_path: pathlib.Path, kind: str
) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = pathlib.Path("/dev/zero")
    with pytest.raises(errors.DeviceUnavailable, match="neither a file nor a block device"):
        file.File(path, writable=True)


def test_an_ordinary_file_in_dev_is_no_device(tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(f"/dev/volume-{os.getpid()}-{tmp_path.name}")
    try:
        path.write_bytes(OLD)
    except OSError:
        pytest.skip("/dev cannot be written to")
    try:
        with pytest.raises(errors.DeviceUnavailable, match="in the place of a device"):
            file.File(path, writable=True)
    finally:
        path.unlink()


def test_a_file_says_where_its_holes_are(open_file: OpenFile, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "volume"
    with path.open("wb") as made:
        made.truncate(3 * MIB + 100)
        made.seek(MIB)
        made.write(OLD * MIB)
    opened = open_file(path, writable=False)
    assert opened.extents(0, opened.size) == [(0, MIB, True)]
    assert opened.extents(MIB, 2 * MIB) == [(MIB, MIB, False)]
    assert opened.extents(2 * MIB, MIB + 100) == [(2 * MIB, MIB + 100, True)]
    assert opened.extents(2 * MIB + 7, 13) == [(2 * MIB + 7, 13, True)]


@pytest.mark.parametrize("bounds", [(0, 4 * MIB), (MIB, MIB), (4097, 123_457), (4 * MIB - 1, 1)])
def test_zeroing_leaves_no_old_data_and_touches_nothing_else(
    open_file: OpenFile, volume: pathlib.Path, bounds: tuple[int, int]
) -> None:
    offset, length = bounds
    opened = open_file(volume)
    opened.zero(offset, length)
    opened.flush()
    expected = bytearray(OLD * 4 * MIB)
    expected[offset : offset + length] = bytes(length)
    assert volume.read_bytes() == expected


def test_zeroing_frees_the_space(open_file: OpenFile, volume: pathlib.Path) -> None:
    opened = open_file(volume)
    opened.zero(MIB, 2 * MIB)
    assert opened.extents(MIB, 3 * MIB)[0] == (MIB, 2 * MIB, True)


def test_a_hole_punched_elsewhere_than_on_a_known_filesystem_is_not_relied_on(
    open_file: OpenFile, volume: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(descriptor: int, mode: int, offset: int, length: int) -> None:
        if not mode & libc.PUNCH_HOLE:
            raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(libc, "fallocate", lie)
    monkeypatch.setattr(file, "_filesystem", lambda _: "fuse")
    opened = open_file(volume)
    opened.zero(0, 4 * MIB)
    assert volume.read_bytes() == bytes(4 * MIB)
    assert opened.extents(0, MIB) == [(0, MIB, False)], "a hole there may not read as zeros"


def test_zeros_are_written_where_nothing_else_works(
    open_file: OpenFile, volume: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(libc, "fallocate", refuse)
    opened = open_file(volume)
    opened.zero(5, 3 * MIB)
    assert volume.read_bytes() == OLD * 5 + bytes(3 * MIB) + OLD * (MIB - 5)


def test_a_full_filesystem_is_insufficient_space(
    open_file: OpenFile, volume: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    opened = open_file(volume)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(errors.InsufficientSpace) as caught:
        opened.write(0, memoryview(b"data"))
    assert caught.value.details["device"] == str(volume)


def test_short_reads_and_writes_are_carried_on(
    open_file: OpenFile, volume: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:999]], at))
    opened = open_file(volume)
    data = os.urandom(12_345)
    opened.write(77, memoryview(data))
    back = bytearray(len(data))
    opened.read_into(77, memoryview(back))
    assert bytes(back) == data


def test_a_file_that_became_shorter_is_an_error(open_file: OpenFile, volume: pathlib.Path) -> None:
    opened = open_file(volume, writable=False)
    os.truncate(volume, MIB)
    with pytest.raises(errors.DeviceUnavailable, match=f"ends at byte {MIB}"):
        opened.read_into(MIB - 10, memoryview(bytearray(20)))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_kernel_that_cannot_copy_between_two_files_says_so(
    open_file: OpenFile, volume: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    opened = open_file(volume)
    assert opened.copy_from(opened, 0, 10) == 0
