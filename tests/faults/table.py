"""The numbers of the suite: points and methods, and how many promises were broken.

``seconds`` is the longest that it took from a death to the answer, the restart included.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self

from tests.faults import suite
from tests.faults.checks import Kind
from tests.faults.points import Point

PROPERTY: Final = "crash"
"""Under this name, a test's report carries its row."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one combination adds."""

    point: str
    method: str
    broken: Sequence[str]
    seconds: float

    @classmethod
    def of(cls, combination: suite.Combination, outcome: suite.Outcome) -> Self:
        """The row of an outcome."""
        kinds = sorted({kind.value for kind, _ in outcome.found.all})
        return cls(
            combination.at.point.value,
            combination.case.method,
            kinds,
            round(outcome.seconds, 2),
        )


def lines(rows: Iterable[Row]) -> list[str]:
    """The tables as text: one line a point, then one line a method, then the sum."""
    every = sorted(rows, key=lambda row: list(Point).index(Point(row.point)))
    by_point = _grouped(every, lambda row: row.point)
    by_method = _grouped(sorted(every, key=lambda row: row.method), lambda row: row.method)
    return [
        _line("the worker dies at", "methods", "runs", [*Kind], "seconds"),
        *(_sum(name, len({row.method for row in one}), one) for name, one in by_point.items()),
        "",
        _line("it was doing", "points", "runs", [*Kind], "seconds"),
        *(_sum(name, len({row.point for row in one}), one) for name, one in by_method.items()),
        _sum("all", len(by_point), every),
    ]


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _sum(name: str, others: int, rows: Sequence[Row]) -> str:
    broken = [str(sum(kind in row.broken for row in rows)) for kind in Kind]
    longest = max(row.seconds for row in rows)
    return _line(name, others, len(rows), broken, f"{longest:.1f}")


def _line(name: str, others: object, runs: object, broken: Sequence[str], seconds: str) -> str:
    cells = "".join(f"{cell:>8}" for cell in (others, runs, *broken, seconds))
    return f"{name:<22}{cells}"
