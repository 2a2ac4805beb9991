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
from worker import nbd_client, process
from worker.connectors import base

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
        return await _within(READ_TIMEOUT, reading)
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
        await _within(FORCED_FLUSH_TIMEOUT if force else FLUSH_TIMEOUT, flushing)
    except errors.VolumeWorkerError as error:
        if force:
            log.warning("device.not_flushed", error=error.message)
            return
        raise errors.DeviceUnavailable(f"the device cannot be flushed: {error.message}") from error


async def _flush_nbd(uri: str) -> None:
    async with nbd_client.connect(uri) as session:
        await session.flush()


async def _flush_path(execute: process.Executor, device: base.Device) -> None:
    assert device.path is not None
    # sync(1) with a file's name calls fsync(2) on it.
    await execute.run("sync", "--", device.path, timeout=FLUSH_TIMEOUT)


async def _read_nbd(uri: str) -> bool:
    async with nbd_client.connect(uri) as session:
        length = min(session.size_bytes, _FIRST_BLOCK)
        return length > 0 and len(await session.read(0, length)) == length


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


async def _within(seconds: float, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Waits for ``work`` so long and no longer, whether it can be cancelled or not."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if done:
        return task.result()
    _stuck.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    raise errors.DeviceUnavailable(f"it did not answer within {seconds:g} s")


def _forget(task: asyncio.Task[Any]) -> None:
    _stuck.discard(task)
    if not task.cancelled():
        # Its failure was told already; retrieved, so that asyncio does not report it as lost.
        task.exception()
