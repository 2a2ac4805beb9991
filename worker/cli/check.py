"""``volume-worker check``: tells what is wrong with this host."""

import asyncio
from collections.abc import Sequence
from typing import Final

import typer

from worker import settings
from worker.cli import failures, options, output
from worker.cli.checks import backends, broker, database, finding, host

_STYLES: Final = {
    finding.State.OK: "green",
    finding.State.WARN: "yellow",
    finding.State.FAIL: "bold red",
}


def check(*, config: options.Config = None, as_json: options.Json = False) -> None:
    """Tells what is wrong with this host; a worker that runs is not disturbed."""
    configured = settings.load(config)
    found = asyncio.run(_look(configured))
    wrong = [one for one in found if one.state is finding.State.FAIL]
    if as_json:
        checks = [one.to_wire() for one in found]
        output.print_json({"host": configured.host, "ok": not wrong, "checks": checks})
    else:
        output.print_table(
            ("check", "state", "message"),
            [
                (
                    output.cell(one.subject),
                    output.cell(one.state, _STYLES[one.state]),
                    output.cell(one.message),
                )
                for one in found
            ],
        )
    for one in wrong:
        output.fail(f"{one.subject}: {one.message}")
    if wrong:
        raise typer.Exit(_exit_code(wrong))


async def _look(configured: settings.Settings) -> list[finding.Finding]:
    # First, since nothing can be said of backends that are configured wrongly.
    settings.backends(configured)
    parts = await asyncio.gather(
        broker.look(configured),
        database.look(configured),
        host.look(configured),
        backends.look(configured),
    )
    return [one for part in parts for one in part]


def _exit_code(wrong: Sequence[finding.Finding]) -> failures.ExitCode:
    if any(one.unreachable for one in wrong):
        return failures.ExitCode.UNREACHABLE
    return failures.ExitCode.FAILED
