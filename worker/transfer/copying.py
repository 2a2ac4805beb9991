"""Copying the data of one attached volume to another, in a child process."""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from messages import errors
from worker import process
from worker.connectors import base

_COPIER: Final = ("-P", "-m", "worker.transfer.copier")
"""``-P``: the folder that the worker was started in is no place to import from."""
_FEEDS_PER_LEASE: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a copy has come."""

    done_bytes: int
    """Bytes copied, or made or left zero; the reading back afterwards does not count."""
    total_bytes: int
    bytes_per_second: int
    """Of data, over the last few seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did: ``copied_bytes``, ``zeroed_bytes`` and ``resumed_from_bytes`` add up to
    ``total_bytes``."""

    total_bytes: int
    copied_bytes: int
    zeroed_bytes: int
    """Bytes made zero at the destination, or found to be."""
    seconds: float
    digest: str | None
    """Of the destination's first ``total_bytes`` as read back; None where it was not verified."""
    resumed_from_bytes: int
    """What an earlier attempt had copied, and this one did not copy again."""


class Rate:
    """How fast a copy may go, in bytes a second; it can be changed while the copy runs."""

    def __init__(self, bytes_per_second: int | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self._changed = asyncio.Event()

    def set(self, bytes_per_second: int | None) -> None:
        """Changes it; None for as fast as it goes."""
        self.bytes_per_second = bytes_per_second
        self._changed.set()

    async def changed(self) -> None:
        """Waits for the next change that nobody has waited for yet."""
        await self._changed.wait()
        self._changed.clear()


OnMark = Callable[[int], Awaitable[None]]
OnProgress = Callable[[Progress], Awaitable[None]]
OnChild = Callable[[int], Awaitable[None]]


async def copy(
    execute: process.Executor,
    source: base.Device,
    destination: base.Device,
    *,
    size_bytes: int,
    verify: bool,
    source_changes: bool,
    bytes_per_second: int | Rate | None = None,
    on_progress: OnProgress | None = None,
    resume_from: int = 0,
    on_mark: OnMark | None = None,
    on_child: OnChild | None = None,
    lease_seconds: float = 30.0,
    run_as_root: bool = False,
) -> Copied:
    """Copies the first ``size_bytes`` of one device to another; holes stay holes.

    On cancellation the child is ended, and gone when this returns.

    Args:
        verify: read the destination back, compare it and give its digest.
        source_changes: the source is in use, so what is read back is compared with what was sent.
        bytes_per_second: the most that the copy itself may move; reading back is not slowed down.
        resume_from: the mark of an earlier attempt between the same devices, of which the source
            has not changed since; it is taken if what stands right before it agrees.
        on_mark: called with each mark: the first byte before which all is on stable storage.
            There is none where the source changes.
        on_child: called with the pid of the child before it is told what to do.
        lease_seconds: the child ends itself when this process has stood still for so long.

    Raises:
        InvalidRequest: a device is smaller than ``size_bytes``; nothing was written.
        DeviceUnavailable: a device cannot be reached, read or written, or gives back other data
            than was written.
        InsufficientSpace: the destination is full.
        CommandFailed: the child could not be started, or died without saying why.
    """
    rate = bytes_per_second if isinstance(bytes_per_second, Rate) else Rate(bytes_per_second)
    request = {
        "source": _describe(source),
        "destination": _describe(destination),
        "size_bytes": size_bytes,
        "verify": verify,
        "source_changes": source_changes,
        "bytes_per_second": rate.bytes_per_second,
        "lease_seconds": lease_seconds,
        "resume_from": resume_from,
    }
    async with (
        _started(execute, request, on_child, run_as_root=run_as_root) as child,
        _fed(child, rate, lease_seconds / _FEEDS_PER_LEASE),
    ):
        return await _outcome(child, on_progress, on_mark)


@contextlib.asynccontextmanager
async def _started(
    execute: process.Executor,
    request: dict[str, Any],
    on_child: OnChild | None,
    *,
    run_as_root: bool,
) -> AsyncIterator[process.Child]:
    """A child with its request; ended, and gone, after the block."""
    child = await execute.start(sys.executable, *_COPIER, run_as_root=run_as_root)
    try:
        if on_child:
            await on_child(child.pid)
        await child.write_line(json.dumps(request).encode())
        yield child
    finally:
        await asyncio.shield(child.stop(grace=0))


def _describe(device: base.Device) -> dict[str, str]:
    if device.path is not None:
        return {"path": str(device.path)}
    assert device.nbd_uri is not None
    return {"nbd_uri": device.nbd_uri}


async def _outcome(
    child: process.Child, on_progress: OnProgress | None, on_mark: OnMark | None
) -> Copied:
    async for message in _messages(child):
        match message:
            case Copied():
                await child.wait()
                return message
            case errors.VolumeWorkerError():
                raise message
            case Progress():
                if on_progress:
                    await on_progress(message)
            case int():
                if on_mark:
                    await on_mark(message)
    code = await child.wait()
    raise _failed(child, f"ended without a result, with exit code {code}")


Message = Progress | Copied | errors.VolumeWorkerError | int


async def _messages(child: process.Child) -> AsyncIterator[Message]:
    try:
        async for line in child.lines():
            yield _parse(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise _failed(child, f"said something else than a message ({error!r})") from error


def _parse(message: dict[str, Any]) -> Message:
    if "result" in message:
        return Copied(**message["result"])
    if "error" in message:
        return errors.from_wire(message["error"])
    if "mark" in message:
        return int(message["mark"])
    return Progress(**message["progress"])


def _failed(child: process.Child, how: str) -> errors.CommandFailed:
    stderr = child.stderr.strip()
    last = stderr.splitlines()[-1] if stderr else "it printed nothing on stderr"
    return errors.CommandFailed(
        f"the copier {how}: {last}",
        program="copier",
        exit_code=child.exit_code,
        stderr=stderr[-2000:],
    )


@contextlib.asynccontextmanager
async def _fed(child: process.Child, rate: Rate, interval: float) -> AsyncIterator[None]:
    """Keeps the child alive, and tells it of a new rate."""

    async def feed() -> None:
        while True:
            control: dict[str, Any] = {}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rate.changed(), interval)
                control["bytes_per_second"] = rate.bytes_per_second
            await child.write_line(json.dumps(control).encode())

    feeding = asyncio.create_task(feed())
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
