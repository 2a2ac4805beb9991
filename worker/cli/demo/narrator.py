"""Tells the story: numbered steps, what was sent, what came back, and how long it took."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

import rich.text

from messages import redaction
from worker.cli import output, progress

_INDENT: Final = "     "


class Narrator:
    """Writes to one stream, and keeps what it told for ``--json``."""

    def __init__(self, stream: TextIO) -> None:
        self._console = output.console(stream)
        self._begin = time.monotonic()
        self.steps: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def call_it(self, identity: str, name: str) -> None:
        """From now on shows an id as a name."""
        self._names[identity] = name

    def step(self, title: str) -> None:
        """Begins the next step."""
        self.steps.append({"title": title, "at_seconds": round(self.elapsed, 3), "events": []})
        heading = rich.text.Text(f"\n{len(self.steps):3}. {output.plain(title)}", style="bold")
        heading.append(f"  [{self.elapsed:.1f} s]", style="dim")
        self._console.print(heading)

    def tell(self, text: str, style: str = "") -> None:
        """One line of the step."""
        self._note({"told": text})
        self._print(text, style)

    def good(self, text: str) -> None:
        """One line that says that something was looked at and is right."""
        self._note({"verified": text})
        self._print(f"ok   {text}", "green")

    def skip(self, text: str) -> None:
        """One line that says what is left out, and why."""
        self._note({"skipped": text})
        self._print(f"skip {text}", "yellow")

    def sent(self, method: str, address: str, args: Mapping[str, Any]) -> None:
        """A request on its way."""
        self._note({"method": method, "address": address, "args": redaction.mask_tree(args)})
        self._print(f"--> {method} to {address}  {self._brief(args)}", "cyan")

    def came_back(self, result: Mapping[str, Any], seconds: float) -> None:
        """What was answered."""
        self._note({"result": redaction.mask_tree(result), "seconds": round(seconds, 3)})
        self._print(f"<-- {self._brief(result) or 'done'}  ({seconds:.2f} s)")

    @contextlib.contextmanager
    def bar(self, title: str) -> Iterator[progress.Watch]:
        """A progress bar for the time of a block."""
        with progress.Bar(_INDENT + title, self._console) as shown:
            yield shown

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(rich.text.Text(_INDENT + output.plain(text), style=style))

    def _note(self, event: Mapping[str, Any]) -> None:
        if self.steps:
            self.steps[-1]["events"].append(event)

    def _brief(self, members: Mapping[str, Any]) -> str:
        """Members in one line, their secrets masked."""
        masked: Mapping[str, Any] = redaction.mask_tree(members)
        return " ".join(f"{name}={self._value(name, value)}" for name, value in masked.items())

    def _value(self, name: str, value: Any) -> str:
        match value:
            case Mapping():
                return "{" + self._brief(value) + "}"
            case int() if name.endswith("_bytes") and not isinstance(value, bool):
                return output.size(value)
            case str():
                return self._names.get(value, value)
            case _:
                return json.dumps(value)
