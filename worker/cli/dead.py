"""``volume-worker dead``: what could not be carried out, kept as it came."""

import asyncio
import datetime
import re
from typing import Annotated, Final

import typer

from worker import settings
from worker.cli import dead_queue, failures, letter, options, output

commands = typer.Typer(
    help="Dead letters: requests that failed, with the reason.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_AGO: Final = re.compile(r"(\d{1,9})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Method = Annotated[str | None, typer.Option("--method", help="Only of this method.")]
Origin = Annotated[
    str | None, typer.Option("--origin", metavar="HOST@BACKEND", help="Only of this address.")
]
Reason = Annotated[str | None, typer.Option("--reason", help="Only with this code.")]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Only newer ones: 2h, 7d or 2026-01-31T12:00Z."),
]
Id = Annotated[
    str | None, typer.Option("--id", metavar="ID", help="Only this message's or job's id.")
]
Everything = Annotated[bool, typer.Option("--all", help="Without a limit.")]


@commands.command("list")
def list_(
    *,
    method: Method = None,
    origin: Origin = None,
    reason: Reason = None,
    since: Since = None,
    id_: Id = None,
    limit: options.Limit = 100,
    everything: Everything = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Lists dead letters, the oldest first; every one stays where it is."""
    wanted = dead_queue.Filter(method, origin, reason, moment(since), id_)
    configured = settings.load(config)
    cap = None if everything else limit
    found = asyncio.run(dead_queue.look(configured, wanted, limit=cap))
    if as_json:
        output.print_json({"letters": [one.summary() for one in found]})
        return
    output.print_table(
        ("id", "method", "origin", "reason", "attempts", "failed", "last error"),
        [
            [
                output.cell(one.message_id or "-"),
                output.cell(one.method or "?"),
                output.cell(one.origin),
                output.cell(one.reason, "red"),
                output.cell(one.attempts),
                output.cell(output.moment(one.summary()["first_failed_at"])),
                output.cell(one.last_error),
            ]
            for one in found
        ],
    )
    if len(found) == cap:
        output.note("there may be more: see --limit and --all")


@commands.command("show")
def show(
    letter_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The message's or the job's id.")
    ] = None,
    *,
    method: Method = None,
    origin: Origin = None,
    reason: Reason = None,
    since: Since = None,
    id_: Id = None,
    limit: options.Limit = 10,
    everything: Everything = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Prints dead letters whole, their secrets masked; every one stays where it is."""
    if letter_id is not None and id_ is not None and letter_id != id_:
        raise typer.BadParameter("ID and --id name two letters")
    wanted = dead_queue.Filter(method, origin, reason, moment(since), letter_id or id_)
    configured = settings.load(config)
    found = asyncio.run(dead_queue.look(configured, wanted, limit=None if everything else limit))
    if as_json:
        output.print_json({"letters": [one.to_wire() for one in found]})
    elif found:
        for one in found:
            _print(one)
    if not found:
        output.fail("there is no such dead letter; volume-worker dead list shows those there are")
        raise typer.Exit(failures.ExitCode.FAILED)


def _print(one: letter.Letter) -> None:
    members = {**one.to_wire(), "first_failed_at": output.moment(one.summary()["first_failed_at"])}
    del members["body" if one.body_text is not None else "body_text"]
    output.print_record(members.items())
    output.say("")


def moment(text: str | None) -> datetime.datetime | None:
    """The moment that ``--since`` names.

    Raises:
        BadParameter: it names none.
    """
    if text is None:
        return None
    if ago := _AGO.fullmatch(text):
        seconds = int(ago[1]) * _SECONDS[ago[2]]
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"--since: {output.plain(text)!r} is neither a time (2026-01-31T12:00Z) nor an age "
            "(30m, 2h, 7d)"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
