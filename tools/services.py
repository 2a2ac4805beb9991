#!/usr/bin/env python3
"""Private RabbitMQ and PostgreSQL for development and tests, below `.services/` of the checkout.

Where VOLUME_WORKER_BROKER_URL or VOLUME_WORKER_DATABASE_URL is set already, that service is used
as it is and nothing is started in its place.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from devservices import control, packages, state
from devservices.common import HOME, ServicesError, say
from devservices.signals import (
    InterruptedBySignal,
    raise_on_signals,
    run_passing_signals,
    signals_held,
)
from devservices.state import prepare_home


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    raise_on_signals()
    try:
        return _dispatch(options)
    except (ServicesError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except InterruptedBySignal as interrupt:
        say("interrupted")
        return 128 + interrupt.number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/services.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install the system packages that are missing")
    commands.add_parser("start", help="start both services and leave them running")
    stop = commands.add_parser("stop", help="stop them, after the commands that use them")
    stop.add_argument("--now", action="store_true", help="stop even while commands use them")
    commands.add_parser("env", help="print the variables of the running services for a shell")
    run = commands.add_parser("run", help="run a command with the services; stop what was started")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="and arguments")
    return parser


def _dispatch(options: argparse.Namespace) -> int:
    match options.command:
        case "install":
            packages.install(Path(__file__).resolve())
        case "start":
            _start()
        case "stop":
            _stop(now=options.now)
        case "env":
            _env()
        case _:
            argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
            if not argv:
                raise ServicesError("run: no command given")
            return _run(argv)
    return 0


def _start() -> None:
    services = control.wanted()
    if not services:
        say("both URLs are set in the environment: nothing to start")
        return
    with state.locked():
        current = state.load()
        control.start(services, current)
        current.keep = True
        current.save()
    say('running; `eval "$(tools/services.py env)"` gives a shell their URLs')


def _stop(*, now: bool) -> None:
    if not HOME.exists():
        return
    with state.locked():
        current = state.load()
        current.keep = False
        current.save()
        if not state.Usage().leave() and not now:
            say("a command still uses them; they stop with it (`stop --now` stops them at once)")
            return
        control.stop(control.SERVICES, current)


def _env() -> None:
    services = control.wanted()
    current = state.load()
    down = [service.title for service in services if not control.is_up(service, current)]
    if down:
        raise ServicesError(f"not running: {' and '.join(down)} (`make services` starts them)")
    for name, value in control.variables(current).items():
        print(f"export {name}={shlex.quote(value)}")


def _run(argv: Sequence[str]) -> int:
    services = control.wanted()
    if not services:
        return run_passing_signals(argv, os.environ)
    prepare_home()
    usage = state.Usage()
    try:
        with state.locked():
            usage.enter()
            current = state.load()
            control.start(services, current)
        return run_passing_signals(argv, os.environ | control.variables(current))
    finally:
        _leave(usage)


def _leave(usage: state.Usage) -> None:
    """The last command that used the services stops them, unless `start` was asked for them."""
    with signals_held(), state.locked():
        alone = usage.leave()
        current = state.load()
        if alone and not current.keep:
            control.stop(control.SERVICES, current)


if __name__ == "__main__":
    sys.exit(main())
