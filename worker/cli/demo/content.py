"""A real file system: filled with files of this machine, and checked when it has been copied."""

import asyncio
import os
import pathlib
import shutil
import stat
import sys
from collections.abc import Iterator
from typing import Final

from messages import errors
from worker import process

AT_LEAST: Final = 210 * 1024**2
"""Bytes."""
_SOURCES: Final = ("/usr/lib", "/usr/share", sys.base_prefix)
_SMALLEST: Final = 16 * 1024
_LARGEST: Final = 32 * 1024**2
_PROGRAMS: Final = {
    "mke2fs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "qemu-storage-daemon": "qemu-system-common (or qemu-storage-daemon)",
    "setpriv": "util-linux",
}


class Missing(errors.VolumeWorkerError):
    """A program that the demo needs is not installed."""


def check_programs() -> None:
    """Looks for the programs that the story cannot do without.

    Raises:
        Missing: naming the package.
    """
    for program, package in _PROGRAMS.items():
        if process.find_program(program) is None:
            raise Missing(f"{program} is not on PATH: install {package}")


def collect(folder: pathlib.Path) -> tuple[int, int]:
    """Copies files of this machine into a folder; returns how many, and how many bytes."""
    folder.mkdir()
    count = total = 0
    for path, size in _files():
        target = folder / f"{count // 1000:03}" / f"{count:05}-{path.name}"
        target.parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(path, target)
        except OSError:
            target.unlink(missing_ok=True)
            continue
        count, total = count + 1, total + size
        if total >= AT_LEAST:
            break
    return count, total


def _files() -> Iterator[tuple[pathlib.Path, int]]:
    """Files in a fixed order; neither tiny, which would take long, nor huge."""
    for source in _SOURCES:
        for folder, folders, names in os.walk(source):
            folders.sort()
            for name in sorted(names):
                path = pathlib.Path(folder, name)
                try:
                    found = path.lstat()
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode) and _SMALLEST <= found.st_size <= _LARGEST:
                    yield path, found.st_size


async def make_file_system(
    execute: process.Executor, device: pathlib.Path, content: pathlib.Path
) -> None:
    """Makes an ext4 file system on a device, with a folder's files in it."""
    command = ("mke2fs", "-q", "-F", "-t", "ext4", "-L", "demo", "-d", content, device)
    await execute.run(*command, timeout=120)


async def check_file_system(execute: process.Executor, device: pathlib.Path) -> str:
    """Checks an ext4 file system, changing nothing; returns e2fsck's summary.

    Raises:
        CommandFailed: it found an error.
    """
    result = await execute.run("e2fsck", "-fn", device, timeout=120)
    return result.stdout.strip().splitlines()[-1]


async def fill(
    execute: process.Executor, device: pathlib.Path, staging: pathlib.Path
) -> tuple[int, int]:
    """Puts files of this machine on a device; returns how many, and how many bytes."""
    try:
        count, total = await asyncio.to_thread(collect, staging)
        await make_file_system(execute, device, staging)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
    return count, total
