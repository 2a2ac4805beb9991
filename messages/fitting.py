"""Cutting what is too large for the broker, with a mark; the database keeps the whole.

RabbitMQ 4 takes 16 MiB in a message unless told otherwise (``max_message_size``), and many messages
may be on their way at a time.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

MOST: Final = 4 * 1024 * 1024
"""Bytes of JSON in one message."""
MARK: Final = "truncated"
_SHORTEST: Final = 64
"""A part smaller than this is never cut."""


def encode(body: Mapping[str, Any], *, within: str, most: int = MOST) -> bytes:
    """A message as JSON; one that is too large is cut in its member ``within``, which is marked."""
    data = json.dumps(body).encode()
    if len(data) <= most or not isinstance(body.get(within), Mapping):
        return data
    room = most - len(json.dumps({**body, within: {MARK: True}}))
    part = {**_cut(body[within], max(room, 0)), MARK: True}
    return json.dumps({**body, within: part}).encode()


def _cut(value: Any, room: int) -> Any:
    """As much of a value as there is room for, in bytes, of its small parts first."""
    size = len(json.dumps(value))
    if size <= max(room, _SHORTEST):
        return value
    match value:
        case Mapping():
            return _cut_members(value, room)
        case list():
            return _cut_list(value, room)
        case str():
            # Escaped, a character may take six bytes.
            return value[: room // 6]
        case _:
            return None


def _cut_members(value: Mapping[str, Any], room: int) -> dict[str, Any]:
    sizes = {name: len(json.dumps(member)) for name, member in value.items()}
    room -= len(json.dumps(dict.fromkeys(value, 0)))
    cut: dict[str, Any] = {}
    for name in sorted(value, key=lambda name: sizes[name]):
        cut[name] = _cut(value[name], room)
        room -= len(json.dumps(cut[name]))
    return {name: cut[name] for name in value}


def _cut_list(value: list[Any], room: int) -> list[Any]:
    kept = []
    room -= 2
    for member in value:
        room -= len(json.dumps(member)) + 2
        if room < 0:
            break
        kept.append(member)
    return kept
