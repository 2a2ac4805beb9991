"""Options that commands share."""

import pathlib
import uuid
from typing import Annotated

import typer

from messages import topology
from worker.cli import output
from worker.telemetry import logs


def check_address(text: str | None) -> str | None:
    """An address, or none.

    Raises:
        BadParameter: it has not the form of one.
    """
    if text is not None and not topology.is_address(text):
        raise typer.BadParameter(f"{output.plain(text)!r} is no address: it must be HOST@BACKEND")
    return text


Config = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="VOLUME_WORKER_CONFIG",
        show_envvar=True,
        help="The configuration file.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogFormat = Annotated[logs.Format, typer.Option("--log-format", help="How log lines look.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log each program that is run.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST@BACKEND", callback=check_address, help="Only of this address."
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many at most.")]
After = Annotated[
    uuid.UUID | None,
    typer.Option("--after", metavar="ID", help="Go on after the last id seen."),
]
