"""Options and output that commands share."""

import json
import pathlib
from typing import Annotated, Any

import typer

from worker.telemetry import logs

Config = Annotated[
    pathlib.Path | None,
    typer.Option("--config", envvar="VOLUME_WORKER_CONFIG", help="The configuration file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogFormat = Annotated[logs.Format, typer.Option("--log-format", help="How log lines look.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log each program that is run.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2))  # noqa: T201
