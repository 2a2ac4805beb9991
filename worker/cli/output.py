"""What the commands print.

Names, errors and whole letters come from outside: nothing of them reaches the terminal that could
move its cursor, change its colours or reverse the reading direction.
"""

import datetime
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO

import rich.console
import rich.table
import rich.text

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PIPE_WIDTH: Final = 1000
"""Columns where nobody looks: a line is a row, whatever its length."""
_NOT_PLAIN_ASCII: Final = re.compile(r"[^ -~\n]")


def plain(value: object) -> str:
    """One line of text in which everything that is not printable is escaped."""
    return "".join(c if c.isprintable() else _escape(c) for c in str(value))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def to_json(data: Any, *, indent: int | None = 2) -> str:
    """JSON without any character that is not printable, save the line ends between members."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(data, indent=indent, ensure_ascii=not is_unicode, default=str)
    return _NOT_PLAIN_ASCII.sub(_json_character, text)


def _json_character(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    _write(sys.stdout, to_json(data))


def say(text: object) -> None:
    """One line on stdout."""
    _write(sys.stdout, plain(text))


def note(text: object) -> None:
    """One line for people on stderr."""
    _write(sys.stderr, plain(text))


def fail(text: object) -> None:
    """The line that says what went wrong."""
    note(f"volume-worker: {text}")


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def console(stream: TextIO | None = None) -> rich.console.Console:
    """A console that takes text as it is: no markup, no emoji names, no guessed colours."""
    file = stream or sys.stdout
    return rich.console.Console(
        file=file,
        width=None if file.isatty() else _PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not file.isatty(),
    )


def cell(value: object, style: str = "") -> rich.text.Text:
    """A value in a table; None is empty."""
    return rich.text.Text("" if value is None else plain(value), style=style)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[rich.text.Text]]) -> None:
    """A table on stdout."""
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_record(members: Iterable[tuple[str, object]]) -> None:
    """Names and values, one under the other; objects and lists as JSON."""
    table = rich.table.Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in members:
        table.add_row(cell(name), _value(value))
    console().print(table)


def _value(value: object) -> rich.text.Text:
    match value:
        case rich.text.Text():
            return value
        case None:
            return cell("-", "dim")
        case dict() | list():
            return rich.text.Text(to_json(value) if value else "-")
        case _:
            return cell(value)


def size(count: float | None) -> str:
    """Bytes for people: ``1.5 GiB``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes all")


def now() -> str:
    """The present moment as records have it: RFC 3339 in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment(text: str | None) -> str:
    """A time of a record for people, in UTC, without its fraction."""
    if text is None:
        return "-"
    try:
        value = datetime.datetime.fromisoformat(text)
        value = value.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        # The second: in UTC it is before the year 1, or after 9999.
        return text
    return value.strftime("%Y-%m-%d %H:%M:%SZ")


def duration(seconds: float) -> str:
    """``5 s``, ``2:05`` or ``1:02:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
