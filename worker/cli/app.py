"""The commands, and what their errors become: a text on stderr and an exit code."""

import asyncio
import enum
import logging
import sys

import click
import typer

from messages import errors
from worker import service, settings
from worker.cli import call, options
from worker.store import installation
from worker.telemetry import logs

app = typer.Typer(
    name="volume-worker",
    help="An asyncio worker service for block storage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ExitCode(enum.IntEnum):
    """How the command ends."""

    DONE = 0
    FAILED = 1
    WRONG_USAGE = 2
    UNREACHABLE = 3


@app.command()
def run(
    config: options.Config = None,
    log_format: options.LogFormat = logs.Format.JSON,
    verbose: options.Verbose = False,
) -> None:
    """Runs the service in the foreground; SIGTERM drains, a second one hurries."""
    logs.configure(log_format, level=logging.DEBUG if verbose else logging.INFO)
    configured = settings.load(config)
    backends = settings.backends(configured)
    if not backends:
        raise settings.ConfigurationError("no backends: add a table [backends.NAME]")
    asyncio.run(service.Service(configured, backends).run())


@app.command()
def migrate(config: options.Config = None, as_json: options.Json = False) -> None:
    """Brings the database schema up to date, and records the namespace."""
    configured = settings.load(config)
    steps = asyncio.run(installation.migrate(configured.database_url, configured.namespace))
    if as_json:
        options.print_json({"namespace": configured.namespace, "applied": steps})
    else:
        print("\n".join(f"applied {step}" for step in steps) or "the schema is up to date")  # noqa: T201


app.command("call")(call.call)


def main() -> None:
    """Runs the command line; never returns."""
    logs.configure(logs.Format.CONSOLE, level=logging.WARNING)
    sys.exit(_run())


def _run() -> int:
    try:
        app(standalone_mode=False)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return ExitCode.FAILED
    except BaseExceptionGroup as group:
        return _report(_first(group))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)
    return ExitCode.DONE


def _report(error: BaseException) -> int:
    match error:
        case click.ClickException():
            error.show()
            return ExitCode.WRONG_USAGE
        case settings.ConfigurationError():
            code = ExitCode.WRONG_USAGE
        case errors.NoSuchAddress() | errors.ReplyTimeout():
            code = ExitCode.FAILED
        case errors.Unreachable():
            code = ExitCode.UNREACHABLE
        case errors.VolumeWorkerError():
            code = ExitCode.FAILED
        case _:
            raise error
    print(f"volume-worker: {error}", file=sys.stderr)  # noqa: T201
    return code


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that says something to a person."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        if isinstance(error, errors.VolumeWorkerError):
            return error
    return group.exceptions[0]
