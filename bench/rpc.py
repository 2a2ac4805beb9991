"""Calls per second and latency of this worker beside what answers calls over RabbitMQ otherwise.

Run it with the services up: ``tools/services.py run -- .venv/bin/python bench/rpc.py``, or by
``make bench``. All are measured in one go and in interleaved rounds, so that what else the machine
does hits all alike. The worker stores each request before it acknowledges it, and makes a volume's
record; the others echo.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import facts, hosts, measuring, systems

MANY = 64
WARM_UP = 1.0
COMMON = """\
* all: one server process, one caller process; requests to a quorum queue, persistent, confirmed;
  replies to a classic queue that goes with its caller, persistent, confirmed"""


@dataclasses.dataclass(slots=True)
class Results:
    """The measurements of one system, one of each kind a round."""

    many: list[measuring.Measured] = dataclasses.field(default_factory=list)
    """With :data:`MANY` in flight."""
    single: list[measuring.Measured] = dataclasses.field(default_factory=list)
    """With one."""

    @property
    def rate(self) -> float:
        """Calls per second at many in flight."""
        return statistics.median(one.calls_per_second for one in self.many)

    @property
    def p50(self) -> float:
        """Milliseconds at one in flight."""
        return statistics.median(one.p50 for one in self.single)

    @property
    def p99(self) -> float:
        """Milliseconds at one in flight."""
        return statistics.median(one.p99 for one in self.single)


def main() -> None:
    """Measures, and prints tables."""
    options = _options()
    wanted = [system for system in systems.SYSTEMS if system.name in options.only]
    installed = systems.installed()
    chosen = [system for system in wanted if not system.missing(installed)]
    with hosts.opened() as site, contextlib.ExitStack() as stack:
        found = facts.of_site(site) | _frameworks(wanted, installed)
        callers = {system.name: stack.enter_context(system.open(site)) for system in chosen}
        results = _measure(callers, rounds=options.rounds, seconds=options.seconds)
    found["measured"] = f"medians of {options.rounds} rounds of {options.seconds:g} s each"
    print(table(chosen, results), notes(chosen), facts.lines(found), sep="\n\n")
    if options.json:
        told = {name: dataclasses.asdict(one) for name, one in results.items()}
        options.json.write_text(json.dumps({"facts": found, "results": told}, indent=2) + "\n")


def _frameworks(wanted: Sequence[systems.System], installed: Mapping[str, str]) -> dict[str, str]:
    """The versions of the frameworks, and which of them are not measured."""
    packages = {name for system in wanted for name in system.packages}
    there = sorted(f"{name} {installed[name]}" for name in packages if name in installed)
    missing = sorted(packages - set(installed))
    told = {}
    if there:
        told["frameworks"] = ", ".join(there)
    if missing:
        told["not measured"] = f"what needs {', '.join(missing)}: run tools/venv.py --bench first"
    return told


def _options() -> Any:
    names = [system.name for system in systems.SYSTEMS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, help=",".join(names)
    )
    parser.add_argument("--json", type=pathlib.Path, help="a file to write the figures to")
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"--only takes some of {','.join(names)}, not {','.join(sorted(unknown))}")
    return options


def _measure(
    callers: Mapping[str, systems.Child], *, rounds: int, seconds: float
) -> dict[str, Results]:
    results = {name: Results() for name in callers}
    for caller in callers.values():
        caller.measure(MANY, WARM_UP)
    for number in range(rounds):
        for name, caller in callers.items():
            many = caller.measure(MANY, seconds)
            single = caller.measure(1, seconds)
            results[name].many.append(many)
            results[name].single.append(single)
            print(
                f"round {number + 1}, {name}: {many.calls_per_second:.0f}/s at {MANY} in flight;"
                f" at 1, p50 {single.p50:.2f} ms, p99 {single.p99:.2f} ms",
                file=sys.stderr,
            )
    return results


def table(chosen: Sequence[systems.System], results: Mapping[str, Results]) -> str:
    """The medians, and their ratios to the bare echo and to the best of the frameworks."""
    echo = results["echo"].rate if "echo" in results else None
    peers = [results[system.name] for system in chosen if system.is_framework]
    rate = max((one.rate for one in peers), default=None)
    p50 = min((one.p50 for one in peers), default=None)
    rows = [
        f"| | calls/s at {MANY} | of the echo | of the best framework"
        " | p50 at 1 | of the best framework | p99 at 1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for system in chosen:
        one = results[system.name]
        rows.append(
            f"| {system.title} | {one.rate:.0f} | {_ratio(one.rate, echo)}"
            f" | {_ratio(one.rate, rate)} | {one.p50:.2f} ms | {_ratio(one.p50, p50)}"
            f" | {one.p99:.2f} ms |"
        )
    return "\n".join(rows)


def notes(chosen: Sequence[systems.System]) -> str:
    """How each is set up and in what the frameworks differ, whatever one sets."""
    told = [f"* {system.title}: {note}" for system in chosen for note in system.notes]
    return "\n".join([COMMON, *told])


def _ratio(value: float, of: float | None) -> str:
    return "-" if of is None else f"{value / of:.2f}"


if __name__ == "__main__":
    main()
