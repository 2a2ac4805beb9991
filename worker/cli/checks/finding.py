"""What one look found."""

import dataclasses
import enum
from typing import Any


class State(enum.StrEnum):
    """How it stands."""

    OK = "ok"
    WARN = "warn"
    """Works, or does not matter yet."""
    FAIL = "fail"
    """Needs mending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    state: State
    message: str
    unreachable: bool = False
    """The broker or the database is away: nothing else can be said of it."""

    def to_wire(self) -> dict[str, Any]:
        """As JSON data."""
        return {"check": self.subject, "state": str(self.state), "message": self.message}


def ok(subject: str, message: str) -> Finding:
    """All is well."""
    return Finding(subject, State.OK, message)


def warn(subject: str, message: str) -> Finding:
    """Worth knowing."""
    return Finding(subject, State.WARN, message)


def fail(subject: str, message: str) -> Finding:
    """Needs mending."""
    return Finding(subject, State.FAIL, message)


def away(subject: str, message: str) -> Finding:
    """Cannot be reached."""
    return Finding(subject, State.FAIL, message, unreachable=True)
