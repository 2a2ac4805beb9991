"""The command line put together."""

import logging
import sys
from typing import NoReturn

import typer

from worker.cli import (
    backend,
    call,
    check,
    dead,
    digest,
    failures,
    jobs,
    reconcile,
    run,
    volumes,
)
from worker.cli.demo import command as demo
from worker.telemetry import logs

app = typer.Typer(
    name="volume-worker",
    help="An asyncio worker service for block storage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("migrate")(run.migrate)
app.command("check")(check.check)
app.command("call")(call.call)
app.add_typer(jobs.commands, name="jobs")
app.add_typer(volumes.commands, name="volumes")
app.add_typer(dead.commands, name="dead")
app.add_typer(backend.commands, name="backend")
app.command("reconcile")(reconcile.reconcile)
app.command("digest")(digest.digest)
app.command("demo")(demo.demo)


def main() -> NoReturn:
    """Runs the command line."""
    logs.configure(logs.Format.CONSOLE, level=logging.WARNING)
    sys.exit(failures.guarded(app))
