"""A publish as the frames that go over the wire (AMQP 0-9-1, 2.3.5 and 4.2).

pamqp makes any frame, and takes longer for these three than all else that a publish takes; so they
are put together here. It also writes a header's number as a float of 32 bits, which most do not fit
into, and cuts long names; a letter is to hold what its sender wrote.
"""

import dataclasses
import struct
from collections.abc import Iterable
from typing import Any, Final

import aio_pika
from pamqp import encode

_FRAME: Final = struct.Struct(">BHL")
_PUBLISH: Final = struct.Struct(">HHH")
_HEADER: Final = struct.Struct(">HHQH")
_LENGTH: Final = struct.Struct(">I")
_DOUBLE: Final = struct.Struct(">d")
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_CLASS, _METHOD = 60, 40
_END: Final = b"\xce"
_ALWAYS_FITS: Final = 4096 - 8
"""Bytes that a frame may hold whatever the two sides have agreed on (frame-min-size)."""
_MANDATORY: Final = b"\x01"
_NOTHING_SET: Final = b"\x00"

_JSON: Final = "application/json"
_CONTENT_TYPE: Final = 1 << 15
_CONTENT_ENCODING: Final = 1 << 14
_HEADERS: Final = 1 << 13
_DELIVERY_MODE: Final = 1 << 12
_PRIORITY: Final = 1 << 11
_CORRELATION_ID: Final = 1 << 10
_REPLY_TO: Final = 1 << 9
_EXPIRATION: Final = 1 << 8
_MESSAGE_ID: Final = 1 << 7
_TIMESTAMP: Final = 1 << 6
_TYPE: Final = 1 << 5
_USER_ID: Final = 1 << 4
_APP_ID: Final = 1 << 3


@dataclasses.dataclass(slots=True)
class Plain:
    """A persistent message with JSON in it and no headers, which most are that a worker sends.

    Its attributes are named like those of ``aio_pika.Message``, which takes longer to make.
    """

    body: bytes
    message_id: str | None
    type: str | None = None
    correlation_id: str | None = None


Message = aio_pika.Message | Plain


class TooLarge(ValueError):
    """The properties do not fit into a frame, and cannot be spread over many as a body is."""


def publish(
    message: Message,
    exchange: str,
    routing_key: str,
    *,
    mandatory: bool,
    channel: int,
    most: int,
) -> bytes:
    """The frames of a publish on a channel, with at most ``most`` bytes in each.

    Raises: anything, where AMQP has no form for what the message holds.
    """
    body = message.body
    method = (
        _PUBLISH.pack(_CLASS, _METHOD, 0)
        + _short(exchange)
        + _short(routing_key)
        + (_MANDATORY if mandatory else _NOTHING_SET)
    )
    head = _plain_header(message) if isinstance(message, Plain) else _content_header(message)
    if len(head) > max(most, _ALWAYS_FITS):
        # The broker would end the connection, and with it all that is on its way.
        raise TooLarge(f"the properties take {len(head)} bytes, and a frame holds {most}")
    parts = [_FRAME.pack(_METHOD_FRAME, channel, len(method)), method, _END]
    parts += (_FRAME.pack(_HEADER_FRAME, channel, len(head)), head, _END)
    for at in range(0, len(body), most):
        part = body[at : at + most]
        parts += (_FRAME.pack(_BODY_FRAME, channel, len(part)), part, _END)
    return b"".join(parts)


def _content_header(message: aio_pika.Message) -> bytes:
    flags, before = _DELIVERY_MODE, b""
    for flag, text in (
        (_CONTENT_TYPE, message.content_type),
        (_CONTENT_ENCODING, message.content_encoding),
    ):
        if text:
            flags |= flag
            before += _short(text)
    if message.headers:
        flags |= _HEADERS
        before += _table(message.headers)
    before += bytes((message.delivery_mode,))
    if message.priority:
        flags |= _PRIORITY
        before += bytes((message.priority,))
    moment = encode.timestamp(message.timestamp) if message.timestamp else None
    # As aio-pika writes it: whole milliseconds.
    expiration = message.properties.expiration if message.expiration else None
    others = (
        (_CORRELATION_ID, message.correlation_id),
        (_REPLY_TO, message.reply_to),
        (_EXPIRATION, expiration),
        (_MESSAGE_ID, message.message_id),
        (_TIMESTAMP, moment),
        (_TYPE, message.type),
        (_USER_ID, message.user_id),
        (_APP_ID, message.app_id),
    )
    return _header(flags, before, others, message.body)


_PLAIN: Final = bytes((len(_JSON),)) + _JSON.encode() + bytes((aio_pika.DeliveryMode.PERSISTENT,))


def _plain_header(message: Plain) -> bytes:
    texts = (
        (_CORRELATION_ID, message.correlation_id),
        (_MESSAGE_ID, message.message_id),
        (_TYPE, message.type),
    )
    return _header(_CONTENT_TYPE | _DELIVERY_MODE, _PLAIN, texts, message.body)


def _header(
    flags: int, properties: bytes, others: Iterable[tuple[int, str | bytes | None]], body: bytes
) -> bytes:
    """A content header: properties in the order of their flags, then others in that order too."""
    for flag, other in others:
        if other:
            flags |= flag
            properties += other if isinstance(other, bytes) else _short(other)
    return _HEADER.pack(_CLASS, 0, len(body), flags) + properties


def _table(headers: Any) -> bytes:
    data = b"".join(_short(name) + _field(value) for name, value in headers.items())
    return _LENGTH.pack(len(data)) + data


def _field(value: Any) -> bytes:
    """A value of a table, behind the letter of its kind."""
    match value:
        case float():
            return b"d" + _DOUBLE.pack(value)
        case dict():
            return b"F" + _table(value)
        case list():
            data = b"".join(map(_field, value))
            return b"A" + _LENGTH.pack(len(data)) + data
        case _:
            return encode.encode_table_value(value)


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
