"""AMQP properties that are not what they should be.

A broker passes on properties that it does not look at: text that is not UTF-8, a moment out of
range, a broken table. pamqp raises then, in the middle of aiormq's reader, and the connection ends;
the message comes again with the next one, and again, and takes along whatever was delivered beside
it. So what cannot be decoded is replaced, and named in a header, by which it can be refused.
"""

import datetime
import struct
from typing import Any, Final

import pamqp.base
import pamqp.decode
import pamqp.header

UNDECODABLE: Final = "x-undecodable"
"""The header that names the properties which were replaced."""

_strict = pamqp.header.ContentHeader.unmarshal


def tolerate() -> None:
    """Makes pamqp, in this process, decode what it can of a message instead of raising."""
    pamqp.header.ContentHeader.unmarshal = _unmarshal  # type: ignore[assignment,method-assign]


def _unmarshal(header: pamqp.header.ContentHeader, data: bytes) -> None:
    try:
        _strict(header, data)
    except Exception:
        # Whatever it was: flags and lengths still tell where each property begins.
        offset, flags = header._get_flags(data[12:])  # noqa: SLF001 - nothing public gives them
        header.properties = type(header.properties)()
        _decode(header.properties, flags, data[12 + offset :])


def _decode(properties: pamqp.base.BasicProperties, flags: int, data: bytes) -> None:
    replaced: list[str] = []
    headers: dict[str, Any] = {}
    for name in properties.__slots__:
        if not flags & properties.flags[name]:
            continue
        kind = getattr(type(properties), f"_{name}")
        size = _size(kind, data)
        try:
            value = pamqp.decode.by_type(data[:size], kind)[1]
        except Exception:
            value = _instead(kind, data[:size])
            replaced.append(name)
        if name == "headers":
            headers = value if isinstance(value, dict) else {}
        else:
            setattr(properties, name, value)
        data = data[size:]
    setattr(properties, "headers", {**headers, UNDECODABLE: ", ".join(replaced)})  # noqa: B010 - a subclass has it


def _size(kind: str, data: bytes) -> int:
    match kind:
        case "shortstr":
            return 1 + data[0] if data else 0
        case "table":
            return 4 + int(struct.unpack(">I", data[:4])[0]) if len(data) >= 4 else len(data)
        case "timestamp":
            return 8
        case _:
            return 1


def _instead(kind: str, data: bytes) -> Any:
    match kind:
        case "shortstr":
            # Cut to what a short text holds, since it is sent on in replies and letters.
            text = data[1:].decode("utf-8", "backslashreplace")
            return text.encode()[:255].decode("utf-8", "ignore")
        case "timestamp":
            return datetime.datetime.fromtimestamp(0, datetime.UTC)
        case "table":
            return {}
        case _:
            return 0
