"""``volume-worker dead``: what could not be carried out, kept as it came."""

import asyncio
import datetime
import re
from collections.abc import Coroutine
from typing import Annotated, Any, Final

import rich.text
import typer

from worker import settings
from worker.cli import arguments, dead_queue, dead_work, failures, letter, options, output
from worker.cli.dead_replay import Outcome

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
EachOne = Annotated[bool, typer.Option("--all", help="Every letter, where no filter is given.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done, and change nothing.")
]
Edit = Annotated[
    str | None,
    typer.Option(
        "--edit",
        metavar="JSON",
        help="Change the request first: a merge patch of its args, or of all where it has method, "
        "version or args. For one letter.",
    ),
]


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
    seen = asyncio.run(dead_queue.look(configured, wanted, limit=cap))
    found = seen.letters
    _warn_of_others(seen)
    if as_json:
        output.print_json({"letters": [one.summary() for one in found], "is_all": seen.is_all})
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
    seen = asyncio.run(dead_queue.look(configured, wanted, limit=None if everything else limit))
    found = seen.letters
    _warn_of_others(seen)
    if as_json:
        output.print_json({"letters": [one.to_wire() for one in found], "is_all": seen.is_all})
    elif found:
        for one in found:
            _print(one)
    if not found:
        output.fail("there is no such dead letter; volume-worker dead list shows those there are")
        raise typer.Exit(failures.ExitCode.FAILED)


@commands.command("replay")
def replay(
    *,
    method: Method = None,
    origin: Origin = None,
    reason: Reason = None,
    since: Since = None,
    id_: Id = None,
    each: EachOne = False,
    edit: Edit = None,
    dry_run: DryRun = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Has requests carried out after all; a letter goes once that is sure to happen."""
    wanted = _some(dead_queue.Filter(method, origin, reason, moment(since), id_), each=each)
    changes = None if edit is None else arguments.parse_object("--edit", edit)
    work = dead_work.Work(settings.load(config), wanted, dry_run)
    _carry_out(work, work.replay(changes), as_json=as_json)


@commands.command("discard")
def discard(
    *,
    method: Method = None,
    origin: Origin = None,
    reason: Reason = None,
    since: Since = None,
    id_: Id = None,
    each: EachOne = False,
    dry_run: DryRun = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Removes letters for good; the records of their jobs stay as they are."""
    wanted = _some(dead_queue.Filter(method, origin, reason, moment(since), id_), each=each)
    work = dead_work.Work(settings.load(config), wanted, dry_run)
    _carry_out(work, work.discard(), as_json=as_json)


def _some(wanted: dead_queue.Filter, *, each: bool) -> dead_queue.Filter:
    if wanted == dead_queue.Filter() and not each:
        raise typer.BadParameter(
            "say which letters: --id, --method, --origin, --reason, --since, or --all"
        )
    return wanted


def _carry_out(work: dead_work.Work, doing: Coroutine[Any, Any, None], *, as_json: bool) -> None:
    try:
        asyncio.run(doing)
    finally:
        # However it ends: what was done by then is done.
        if work.total is not None:
            _print_work(work, as_json=as_json)
    if work.wanted.id is not None and not work.done:
        output.fail("there is no such dead letter; volume-worker dead list shows those there are")
        raise typer.Exit(failures.ExitCode.FAILED)
    if work.count(Outcome.REFUSED):
        raise typer.Exit(failures.ExitCode.FAILED)


def _print_work(work: dead_work.Work, *, as_json: bool) -> None:
    if as_json:
        output.print_json(work.to_wire())
        return
    output.print_table(
        ("id", "method", "outcome", "because"),
        [
            [
                output.cell(one.message_id or "-"),
                output.cell(one.method or "?"),
                _outcome(done.outcome, dry_run=work.dry_run),
                output.cell(done.text),
            ]
            for one, done in work.done
        ],
    )
    counts = [f"{n} {outcome}" for outcome in Outcome if (n := work.count(outcome))]
    totals = ", ".join([f"{work.total} in", *counts, f"{work.left} left"])
    output.say(f"nothing was changed; it would be: {totals}" if work.dry_run else totals)
    if (work.total or 0) > dead_queue.MOST:
        output.note(f"{dead_queue.MOST} letters are looked at in one go: run it again for the rest")


def _outcome(outcome: Outcome, *, dry_run: bool) -> rich.text.Text:
    would_be = dry_run and outcome is not Outcome.ALREADY_REPLAYED
    style = "red" if outcome is Outcome.REFUSED else "green"
    return output.cell(f"would be {outcome}" if would_be else outcome, style)


def _warn_of_others(seen: dead_queue.Seen) -> None:
    if not seen.is_all:
        output.note(
            "somebody else has letters in their hands just now (dead replay, dead discard?): this "
            "is not all; try again when that is over"
        )


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
        try:
            return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
        except OverflowError:
            return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"--since: {output.plain(text)!r} is neither a time (2026-01-31T12:00Z) nor an age "
            "(30m, 2h, 7d)"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
