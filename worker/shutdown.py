"""Why a worker ends, and that it does so in bounded time, whatever hangs."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import structlog

from messages import errors

log = structlog.get_logger(__name__)

_NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)

LOG_PATIENCE: Final = 1.0
"""Seconds that the last line of the log may take: whoever reads it may have stopped to."""


class Died(errors.VolumeWorkerError):
    """A part of the service has ended, which none may."""


class Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for haste, more change nothing."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Takes the signals while the block runs; after it, none keeps the process from ending.

        Not by the loop's own handlers, which a late signal would find gone with the loop: it would
        end the process with an error, although nothing is wrong.
        """
        loop = asyncio.get_running_loop()

        def take(_number: int, _frame: object) -> None:
            loop.call_soon_threadsafe(self._take)

        for number in _NUMBERS:
            signal.signal(number, take)
        try:
            yield
        finally:
            for number in _NUMBERS:
                signal.signal(number, signal.SIG_IGN)

    def _take(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


class Limit:
    """Ends the process when its time is up.

    It is a thread: an event loop that hangs, and system calls that do not return (a dead NFS server
    under a volume), hold up neither it nor the end of the process.

    Attributes:
        exit_code: what the process ends with then.
        last: called before that, from the thread.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self.last: Callable[[], None] = _nothing
        self._due = float("inf")
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def within(self, seconds: float) -> None:
        """The process ends within so many seconds from now, or as was said before if sooner."""
        with self._changed:
            self._due = min(self._due, time.monotonic() + seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="limit", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _wait(self) -> None:
        with self._changed:
            while (left := self._due - time.monotonic()) > 0:
                self._changed.wait(left)
        self.last()
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(LOG_PATIENCE)
        os._exit(self.exit_code)

    def _tell(self) -> None:
        log.error("service.end_forced", exit_code=self.exit_code)


async def living(name: str, part: Coroutine[Any, Any, None]) -> None:
    """A part of the service, whose end is the service's.

    Raises:
        Died: it has ended, by whatever.
    """
    why, cause, trace = "has ended", None, None
    try:
        await part
    except Exception as error:
        cause = _innermost(error)
        if isinstance(cause, errors.VolumeWorkerError):
            why = f"failed: {cause.message}"
        else:
            why, trace = f"failed: {type(cause).__name__}: {cause}", error
    log.error("service.part_died", part=name, why=why, exc_info=trace)
    raise Died(f"the worker ends: its {name} {why}") from cause


def _innermost(error: Exception) -> Exception:
    """The first error of a group of tasks."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _nothing() -> None:
    pass
