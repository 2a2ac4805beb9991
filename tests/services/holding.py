"""Holding a worker at a point of its work, so that a test can act just then."""

import contextlib
import itertools
import pathlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from tests.services import amqp, workers

_NUMBERS: Final = itertools.count()


class Holder:
    """What makes one worker wait; made before that starts, whose command it becomes."""

    def __init__(self, worker: workers.Worker) -> None:
        self._folder = worker.folder
        worker.command = self.command

    @property
    def command(self) -> Sequence[str]:
        """What to start instead of the installed command."""
        return (sys.executable, "-m", "tests.services.holding_worker", str(self._folder))

    def set(self, *points: object) -> None:
        """From now on, whoever comes to one of them (``NAME`` or ``NAME:N``) waits there."""
        (self._folder / "held").unlink(missing_ok=True)
        _write(self._folder / "hold", " ".join(map(str, (*points, next(_NUMBERS)))))

    async def held(self, point: object = "", **options: Any) -> None:
        """Waits until somebody is there: at this point, where one is named."""
        await amqp.eventually(
            lambda: self._is_held(str(point)), what=f"the hold at {point}", **options
        )

    def _is_held(self, point: str) -> bool:
        hold, held = self._text("hold"), self._text("held")
        return held.startswith(f"{hold} {point}")

    def release(self) -> None:
        """Nobody waits any more."""
        (self._folder / "hold").unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def at(self, point: object) -> AsyncIterator[None]:
        """Holds there for the time of the block."""
        self.set(point)
        try:
            yield
        finally:
            self.release()

    def _text(self, name: str) -> str:
        path = self._folder / name
        return path.read_text() if path.exists() else ""


def _write(path: pathlib.Path, text: str) -> None:
    # Whole or not at all: the worker may read it at any time.
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
