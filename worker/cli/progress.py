"""How far a job has come, shown while it runs: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, Self

import rich.console
import rich.progress

from worker.cli import output


class Watch(Protocol):
    """Shows status messages; a context manager."""

    def __call__(self, status: Mapping[str, Any]) -> None:
        """Shows one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Lines(Watch):
    """A line for each status message, on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, status: Mapping[str, Any]) -> None:
        """See :class:`Watch`."""
        output.note(output.to_json(status, indent=None) if self._as_json else describe(status))


class Bar(Watch):
    """A progress bar; where no terminal is, its last state alone is printed."""

    def __init__(self, title: str, console: rich.console.Console | None = None) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[words]}", markup=False),
            console=console or output.console(sys.stderr),
        )
        self._task = self._progress.add_task(output.plain(title), total=None, words="")

    def __call__(self, status: Mapping[str, Any]) -> None:
        """See :class:`Watch`."""
        progress = status.get("progress")
        if not isinstance(progress, Mapping):
            words = f"{status.get('state')} (attempt {status.get('attempt')})"
            self._progress.update(self._task, words=output.plain(words))
            return
        self._progress.update(
            self._task,
            completed=_number(progress, "done_bytes"),
            total=_number(progress, "total_bytes") or None,
            words=output.plain(amounts(progress)),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def watch(title: str, *, as_json: bool) -> Watch:
    """What fits to where stderr leads."""
    return Bar(title) if sys.stderr.isatty() and not as_json else Lines(as_json=as_json)


def describe(status: Mapping[str, Any]) -> str:
    """A status message in one line."""
    words = [
        time.strftime("%H:%M:%S"),
        str(status.get("state")),
        f"attempt {status.get('attempt')}",
    ]
    progress = status.get("progress")
    if isinstance(progress, Mapping):
        words.append(amounts(progress))
    return "  ".join(words)


def amounts(progress: Mapping[str, Any]) -> str:
    """Bytes, rate and the time that is left."""
    done, total = _number(progress, "done_bytes"), _number(progress, "total_bytes")
    rate = _number(progress, "bytes_per_second")
    words = f"{output.size(done)} of {output.size(total)}"
    if rate > 0:
        words += f"  {output.size(rate)}/s"
        if total > done:
            words += f"  {output.duration((total - done) / rate)} left"
    return words


def _number(progress: Mapping[str, Any], name: str) -> float:
    value = progress.get(name)
    return value if isinstance(value, int | float) else 0
