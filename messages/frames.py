"""A publish as the frames that go over the wire (AMQP 0-9-1, 2.3.5 and 4.2).

pamqp makes any frame, and takes longer for these three than all else that a publish takes; what a
worker sends all day is put together here, and the rest by pamqp.
"""

import dataclasses
import struct
from collections.abc import Iterable
from typing import Final

import aio_pika
from pamqp import encode, frame, header

_FRAME: Final = struct.Struct(">BHL")
_PUBLISH: Final = struct.Struct(">HHH")
_HEADER: Final = struct.Struct(">HHQH")
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_CLASS, _METHOD = 60, 40
_END: Final = b"\xce"
_MANDATORY: Final = b"\x01"
_NOTHING_SET: Final = b"\x00"

_JSON: Final = "application/json"
_CONTENT_TYPE: Final = 1 << 15
_HEADERS: Final = 1 << 13
_DELIVERY_MODE: Final = 1 << 12
_CORRELATION_ID: Final = 1 << 10
_REPLY_TO: Final = 1 << 9
_MESSAGE_ID: Final = 1 << 7
_TYPE: Final = 1 << 5


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


def publish(
    message: Message,
    exchange: str,
    routing_key: str,
    *,
    mandatory: bool,
    channel: int,
    most: int,
) -> bytes:
    """The frames of a publish on a channel, with bodies of at most ``most`` bytes in each.

    Raises: anything, where AMQP has no form for what the message holds.
    """
    body = message.body
    method = (
        _PUBLISH.pack(_CLASS, _METHOD, 0)
        + _short(exchange)
        + _short(routing_key)
        + (_MANDATORY if mandatory else _NOTHING_SET)
    )
    parts = [_FRAME.pack(_METHOD_FRAME, channel, len(method)), method, _END]
    parts.append(
        _plain_header(message, channel)
        if isinstance(message, Plain)
        else _content_header(message, channel)
    )
    for at in range(0, len(body), most):
        part = body[at : at + most]
        parts += (_FRAME.pack(_BODY_FRAME, channel, len(part)), part, _END)
    return b"".join(parts)


def _content_header(message: aio_pika.Message, channel: int) -> bytes:
    if (
        message.content_encoding
        or message.priority
        or message.expiration
        or message.timestamp
        or message.user_id
        or message.app_id
    ):
        general = header.ContentHeader(properties=message.properties, body_size=len(message.body))
        return frame.marshal(general, channel)
    flags, before = _DELIVERY_MODE, b""
    if message.content_type:
        flags |= _CONTENT_TYPE
        before += _short(message.content_type)
    if message.headers:
        flags |= _HEADERS
        before += encode.field_table(message.headers)
    texts = (
        (_CORRELATION_ID, message.correlation_id),
        (_REPLY_TO, message.reply_to),
        (_MESSAGE_ID, message.message_id),
        (_TYPE, message.type),
    )
    return _header(flags, before + bytes((message.delivery_mode,)), texts, message.body, channel)


_PLAIN: Final = bytes((len(_JSON),)) + _JSON.encode() + bytes((aio_pika.DeliveryMode.PERSISTENT,))


def _plain_header(message: Plain, channel: int) -> bytes:
    texts = (
        (_CORRELATION_ID, message.correlation_id),
        (_MESSAGE_ID, message.message_id),
        (_TYPE, message.type),
    )
    return _header(_CONTENT_TYPE | _DELIVERY_MODE, _PLAIN, texts, message.body, channel)


def _header(
    flags: int,
    properties: bytes,
    texts: Iterable[tuple[int, str | None]],
    body: bytes,
    channel: int,
) -> bytes:
    """A content header: properties in the order of their flags, then texts in that order too."""
    for flag, text in texts:
        if text:
            flags |= flag
            properties += _short(text)
    payload = _HEADER.pack(_CLASS, 0, len(body), flags) + properties
    return _FRAME.pack(_HEADER_FRAME, channel, len(payload)) + payload + _END


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
