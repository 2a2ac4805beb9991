"""What every connector asks of an attached device: can it be read, and is all of it written?

A path is opened only by children. One that waits in the kernel for a device that is gone cannot
even be killed; nobody waits for it longer than the limits below.
"""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

from messages import errors
from worker import process
from worker.connectors import base, exports
from worker.nbd import session

log = structlog.get_logger(__name__)

READ_TIMEOUT: Final = 30.0
"""Seconds."""
FLUSH_TIMEOUT: Final = 600.0
"""Seconds; there may be much in a cache to bring to slow disks."""
FORCED_FLUSH_TIMEOUT: Final = 30.0
"""Seconds that a detach by force leaves for it."""

_FIRST_BLOCK: Final = 4096
_DD_TOTAL: Final = re.compile(r"^(\d+) bytes", re.MULTILINE)

Answer = TypeVar("Answer")

_stuck: set[asyncio.Task[Any]] = set()


async def is_valid(execute: process.Executor, device: base.Device) -> bool:
    """Whether the device's first block can be read, past the page cache, and is not empty."""
    try:
        reading = (
            _read_path(execute, device) if device.nbd_uri is None else _read_nbd(device.nbd_uri)
        )
        return await within(READ_TIMEOUT, reading)
    except (errors.DeviceUnavailable, errors.CommandFailed, errors.CommandTimeout):
        return False


async def flush(execute: process.Executor, device: base.Device, *, force: bool = False) -> None:
    """Makes what was written to the device durable.

    Args:
        force: one that fails is no error, and it is given less time.

    Raises:
        DeviceUnavailable: it could not be.
    """
    flushing = (
        _flush_path(execute, device) if device.nbd_uri is None else _flush_nbd(device.nbd_uri)
    )
    try:
        await within(FORCED_FLUSH_TIMEOUT if force else FLUSH_TIMEOUT, flushing)
    except errors.VolumeWorkerError as error:
        if force:
            log.warning("device.not_flushed", error=error.message)
            return
        raise errors.DeviceUnavailable(f"the device cannot be flushed: {error.message}") from error


async def _flush_nbd(uri: str) -> None:
    await exports.visit(uri, session.Session.flush)


async def _flush_path(execute: process.Executor, device: base.Device) -> None:
    assert device.path is not None
    # sync(1) with a file's name calls fsync(2) on it.
    await execute.run("sync", "--", device.path, timeout=FLUSH_TIMEOUT)


async def _read_nbd(uri: str) -> bool:
    return await exports.visit(uri, _read_first_block)


def _read_first_block(opened: session.Session) -> bool:
    export = opened.export
    length = min(export.size, export.maximum, max(export.minimum, _FIRST_BLOCK))
    if not length:
        return False
    block = memoryview(bytearray(length))
    opened.demand(session.Request(session.READ, 0, length, into=block), "read")
    return True


async def _read_path(execute: process.Executor, device: base.Device) -> bool:
    assert device.path is not None
    source = (f"if={device.path}", f"bs={_FIRST_BLOCK}", "count=1")
    read = ("dd", *source, "of=/dev/null")
    try:
        result = await execute.run(*read, "iflag=direct", timeout=READ_TIMEOUT)
    except errors.CommandFailed:
        # Not every file system knows direct reads.
        result = await execute.run(*read, timeout=READ_TIMEOUT)
    total = _DD_TOTAL.search(result.stderr)
    return total is not None and int(total[1]) > 0


async def within(seconds: float, work: Coroutine[Any, Any, Answer], *, who: str = "it") -> Answer:
    """Waits for ``work`` so long and no longer, whether it can be cancelled or not.

    Raises:
        DeviceUnavailable: ``who`` did not answer in time.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            _stuck.add(task)
            task.add_done_callback(_forget)
            task.cancel()
    if task.done():
        return task.result()
    raise errors.DeviceUnavailable(f"{who} did not answer within {seconds:g} s")


def _forget(task: asyncio.Task[Any]) -> None:
    _stuck.discard(task)
    if not task.cancelled():
        # Its failure was told already; retrieved, so that asyncio does not report it as lost.
        task.exception()
