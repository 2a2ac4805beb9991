"""The contract's checked-in schemas, and as much of JSON Schema as they use."""

import datetime
import functools
import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import contract_schemas

Schema = Mapping[str, Any]


@functools.cache
def document() -> dict[str, Any]:
    """The file as it is checked in."""
    found: dict[str, Any] = json.loads(contract_schemas.FILE.read_text("utf-8"))
    return found


def definition(name: str) -> Schema:
    """A record's schema."""
    found: Schema = document()["$defs"][name]
    return found


def message(name: str) -> Schema:
    """A message's schema."""
    found: Schema = document()["messages"][name]
    return found


def args(method: str) -> Schema:
    """The schema of a method's arguments."""
    found: Schema = document()["methods"][method]["args"]
    return found


def result(method: str) -> Schema:
    """The schema of a method's result."""
    found: Schema = document()["methods"][method]["result"]
    return found


def faults(value: Any, schema: Schema, place: str = "$") -> list[str]:
    """What is wrong with JSON data, each fault with its place; nothing: it is valid."""
    found = []
    for keyword, demand in schema.items():
        if keyword in _NO_DEMANDS:
            continue
        found += [f"{place}: {fault}" for fault in _KEYWORDS[keyword](value, demand, schema)]
    return found


_NO_DEMANDS = frozenset({"title", "description", "default", "examples", "propertyNames"})

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def _type(value: Any, demand: str, _: Schema) -> list[str]:
    return [] if _TYPES[demand](value) else [f"{value!r} is no {demand}"]


def _ref(value: Any, demand: str, _: Schema) -> list[str]:
    return faults(value, definition(demand.removeprefix("#/$defs/")), demand)


def _any_of(value: Any, demand: list[Schema], _: Schema) -> list[str]:
    tried = [faults(value, one) for one in demand]
    return [] if [] in tried else [f"{value!r} is none of these: {tried}"]


def _enum(value: Any, demand: list[Any], _: Schema) -> list[str]:
    return [] if value in demand else [f"{value!r} is none of {demand}"]


def _const(value: Any, demand: Any, _: Schema) -> list[str]:
    return [] if value == demand and type(value) is type(demand) else [f"{value!r} ≠ {demand!r}"]


def _properties(value: Any, demand: Mapping[str, Schema], _: Schema) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [
        fault
        for name, schema in demand.items()
        if name in value
        for fault in faults(value[name], schema, name)
    ]


def _required(value: Any, demand: list[str], _: Schema) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [f"lacks {name}" for name in demand if name not in value]


def _additional(value: Any, demand: bool | Schema, schema: Schema) -> list[str]:
    if not isinstance(value, dict):
        return []
    others = (
        {name: member for name, member in value.items() if name not in schema["properties"]}
        if "properties" in schema
        else value
    )
    if isinstance(demand, bool):
        return [] if demand else [f"unknown member {name}" for name in others]
    return [fault for name, member in others.items() for fault in faults(member, demand, name)]


def _items(value: Any, demand: Schema, _: Schema) -> list[str]:
    if not isinstance(value, list):
        return []
    return [fault for i, one in enumerate(value) for fault in faults(one, demand, str(i))]


def _pattern(value: Any, demand: str, _: Schema) -> list[str]:
    if isinstance(value, str) and not re.search(demand, value):
        return [f"{value!r} does not match {demand}"]
    return []


def _format(value: Any, demand: str, _: Schema) -> list[str]:
    if not isinstance(value, str):
        return []
    if demand == "uuid":
        good = _is_canonical_id(value)
    else:
        assert demand == "date-time"
        good = _is_time(value)
    return [] if good else [f"{value!r} is no {demand}"]


def _is_canonical_id(value: str) -> bool:
    try:
        return str(uuid.UUID(value)) == value
    except ValueError:
        return False


def _is_time(value: str) -> bool:
    # RFC 3339 in UTC.
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", value):
        return False
    return datetime.datetime.fromisoformat(value).utcoffset() == datetime.timedelta(0)


def _bound(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any, Schema], list[str]]:
    def check(value: Any, demand: Any, _: Schema) -> list[str]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return []
        return [] if holds(value, demand) else [f"{value} is out of range ({demand})"]

    return check


def _length(holds: Callable[[int, int], bool], of: type) -> Callable[[Any, Any, Schema], list[str]]:
    def check(value: Any, demand: int, _: Schema) -> list[str]:
        if not isinstance(value, of) or holds(len(value), demand):  # type: ignore[arg-type]
            return []
        return [f"has the size {len(value)} ({demand})"]  # type: ignore[arg-type]

    return check


def _at_least(value: Any, demand: Any) -> bool:
    return bool(value >= demand)


def _at_most(value: Any, demand: Any) -> bool:
    return bool(value <= demand)


_KEYWORDS: Mapping[str, Callable[[Any, Any, Schema], list[str]]] = {
    "$ref": _ref,
    "additionalProperties": _additional,
    "anyOf": _any_of,
    "const": _const,
    "enum": _enum,
    "format": _format,
    "items": _items,
    "maxLength": _length(_at_most, str),
    "maxProperties": _length(_at_most, dict),
    "maximum": _bound(_at_most),
    "minLength": _length(_at_least, str),
    "minimum": _bound(_at_least),
    "pattern": _pattern,
    "properties": _properties,
    "required": _required,
    "type": _type,
}
