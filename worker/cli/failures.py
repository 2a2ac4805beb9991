"""What becomes of an error: one line on stderr that says what to do, and an exit code."""

import enum
import os
import sys
from collections.abc import Callable

import asyncpg

from messages import errors
from worker import settings
from worker.cli import output


class ExitCode(enum.IntEnum):
    """How a command ends."""

    DONE = 0
    FAILED = 1
    """The job failed, or something needs mending."""
    WRONG_USAGE = 2
    UNREACHABLE = 3
    """The broker or the database cannot be reached."""
    INTERRUPTED = 130
    """By Ctrl-C, as shells say it."""


def guarded(command: Callable[[], object]) -> int:
    """Runs the command line; returns its exit code.

    What nobody has foreseen is raised: its traceback belongs into a bug report.
    """
    try:
        code = _run(command)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has had enough. Python would try to flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    return code


def _run(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        raise
    except BaseExceptionGroup as group:
        return report(_first(group))
    except Exception as error:
        return report(error)
    return ExitCode.DONE


def report(error: BaseException) -> int:
    """Says what went wrong; returns the exit code."""
    code, text = explain(error)
    output.fail(text)
    return code


def explain(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the text of an error; one that is nobody's fault but ours is raised."""
    match error:
        case settings.ConfigurationError():
            return ExitCode.WRONG_USAGE, f"configuration: {error.message}"
        case errors.NoSuchAddress() | errors.ReplyTimeout():
            return ExitCode.FAILED, error.message
        case errors.Unreachable():
            return ExitCode.UNREACHABLE, error.message
        case errors.VolumeWorkerError():
            code = error.details.get("code", error.code)
            is_wire = type(error).__name__ == error.code or isinstance(error, errors.RemoteError)
            return ExitCode.FAILED, f"{code}: {error.message}" if is_wire else error.message
        case asyncpg.InsufficientPrivilegeError():
            return (
                ExitCode.FAILED,
                f"the database refused: {error}; give database_url's user the right to it",
            )
        case asyncpg.PostgresError():
            return ExitCode.FAILED, f"the database refused: {error}"
        case _:
            raise error


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that says most to a person: one of ours before any other."""
    flat = list(_flatten(group))
    ours = [error for error in flat if isinstance(error, errors.VolumeWorkerError)]
    return (ours or flat)[0]


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
