"""The arguments of a request, from what was typed: ``KEY=VALUE`` pairs and a JSON object."""

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final, NoReturn

import typer

from worker.cli import output

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib", "pib"), 1)},
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb", "pb"), 1)},
}
_OF_BYTES: Final = ("_bytes", "bytes_per_second")
_SIZE: Final = re.compile(r"(?P<number>\d{1,20}(?:\.\d{1,20})?)\s*(?P<unit>[A-Za-z]*)")


def parse(pairs: Sequence[str], as_json: str | None) -> dict[str, Any]:
    """The arguments; a pair wins over the same member of the JSON object.

    A value is JSON where it parses, else text. ``volume.name=v`` sets a member of an object, and
    what is in bytes, by its name, takes sizes such as ``1GiB``.

    Raises:
        BadParameter: one of them cannot be read, or they contradict each other.
    """
    found = {} if as_json is None else parse_object("--args", as_json)
    given: set[str] = set()
    for pair in pairs:
        key, equals, text = pair.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise typer.BadParameter(
                f"{output.plain(pair)!r} is no KEY=VALUE, such as volume.size_bytes=1GiB"
            )
        if key in given:
            raise typer.BadParameter(f"{output.plain(key)} is given twice")
        given.add(key)
        _put(found, path, _value(key, text))
    return found


def parse_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that was typed for an option.

    Raises:
        BadParameter: it is none.
    """
    try:
        data = read_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} is not JSON: {error}") from None
    except RecursionError:
        raise typer.BadParameter(f"{option} is nested too deeply") from None
    if not isinstance(data, dict):
        raise typer.BadParameter(f'{option} must be a JSON object, such as {{"volume_id": "…"}}')
    return data


def read_json(text: str | bytes) -> Any:
    """JSON data, of which each number is one of JSON's.

    Raises:
        ValueError: it is no JSON, or has a number that would become infinite.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_number)


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _put(into: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *outer, last = path
    for depth, name in enumerate(outer, 1):
        inner = into.setdefault(name, {})
        if not isinstance(inner, dict):
            raise typer.BadParameter(
                f"{output.plain('.'.join(path[:depth]))} is given as a value and as an object"
            )
        into = inner
    if isinstance(into.get(last), dict) and isinstance(value, dict):
        value = {**into[last], **value}
    into[last] = value


def _value(key: str, text: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        pass
    return parse_size(key, text) if key.endswith(_OF_BYTES) else text


def parse_size(key: str, text: str) -> int:
    """Bytes, from what was typed for ``key``: a number, or one with a unit.

    Raises:
        BadParameter: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise typer.BadParameter(
            f"{output.plain(key)}: {output.plain(text)!r} is no size; write bytes, or 512MiB, "
            "1GiB, 1.5TiB"
        )
    count = Decimal(match["number"]) * factor
    if count != int(count):
        raise typer.BadParameter(f"{output.plain(key)}: {output.plain(text)!r} is no whole number")
    return int(count)
