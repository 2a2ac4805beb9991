"""Which combinations are run, and the table of what came of them.

All of them with ``-m faults``; else a sample that a seed chooses, the same one each time unless
``FAULTS_SEED`` or ``FAULTS_SAMPLE`` say otherwise.
"""

import os
import random
from typing import Any, Final

import pytest

from tests.faults import table
from tests.services import private

node, node_databases, on_node = private.node, private.node_databases, private.on_node
server, server_databases, on_server = private.server, private.server_databases, private.on_server

SEED: Final = os.environ.get("FAULTS_SEED", "1")
SAMPLE: Final = int(os.environ.get("FAULTS_SAMPLE", "12"))
MARK: Final = "faults"


def _is_whole(config: pytest.Config) -> bool:
    return MARK in str(config.option.markexpr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the sample of the marked tests, where the mark is not asked for."""
    marked = sorted(item.nodeid for item in items if _may_be_sampled(item))
    if _is_whole(config):
        return
    size = min(SAMPLE, len(marked))
    sample = set(random.Random(SEED).sample(marked, size))
    out = [item for item in items if item.get_closest_marker(MARK) and item.nodeid not in sample]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]


def _may_be_sampled(item: pytest.Item) -> bool:
    """Not where the mark says ``sampled=False``: a long test, which runs when all are asked for."""
    marker = item.get_closest_marker(MARK)
    return marker is not None and bool(marker.kwargs.get("sampled", True))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the table, and the numbers of the soak."""
    _print_numbers(terminalreporter)
    rows = [
        table.Row(**value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == table.PROPERTY
    ]
    if not rows:
        return
    terminalreporter.section("crash points")
    if not _is_whole(config):
        terminalreporter.write_line(
            f"a sample of {len(rows)}: FAULTS_SEED={SEED} FAULTS_SAMPLE={SAMPLE}; "
            "`make faults` runs all"
        )
    for line in table.lines(rows):
        terminalreporter.write_line(line)


def _print_numbers(terminalreporter: Any) -> None:
    """Prints what tests have recorded as ``numbers``: lines of text."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, lines in report.user_properties:
                    if name == "numbers":
                        terminalreporter.section(report.nodeid.rpartition("::")[2])
                        for line in lines:
                            terminalreporter.write_line(line)
