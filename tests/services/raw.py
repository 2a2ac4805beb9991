"""AMQP header values that no client library would send, but that any program can."""

import datetime
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pamqp.encode


class Encoded(datetime.datetime):
    """A field value as its bytes on the wire, kind first; pass it within headers.

    A datetime only so that libraries that look at header values let it through.
    """

    wire: bytes

    @classmethod
    def of(cls, wire: bytes) -> "Encoded":
        made = cls(2000, 1, 1, tzinfo=datetime.UTC)
        made.wire = wire
        return made


@contextmanager
def encoding() -> Iterator[None]:
    """While the block runs, :class:`Encoded` values can be published."""
    usual = pamqp.encode.encode_table_value

    def encode(value: Any) -> bytes:
        return value.wire if isinstance(value, Encoded) else usual(value)

    pamqp.encode.encode_table_value = encode
    try:
        yield
    finally:
        pamqp.encode.encode_table_value = usual


def timestamp(seconds: int) -> Encoded:
    """A moment, however far away."""
    return Encoded.of(b"T" + struct.pack(">Q", seconds))


def nested_table(depth: int) -> Encoded:
    """Tables within tables."""
    wire = b""
    for _ in range(depth):
        inner = b"\1a" + (b"F" + struct.pack(">I", len(wire)) + wire)
        wire = inner
    return Encoded.of(b"F" + struct.pack(">I", len(wire)) + wire)


def nested_array(depth: int) -> Encoded:
    """Arrays within arrays."""
    wire = b""
    for _ in range(depth):
        wire = b"A" + struct.pack(">I", len(wire)) + wire
    return Encoded.of(b"A" + struct.pack(">I", len(wire)) + wire)


def text(data: bytes) -> Encoded:
    """A long text of any bytes."""
    return Encoded.of(b"S" + struct.pack(">I", len(data)) + data)


def decimal(scale: int, value: int) -> Encoded:
    """A decimal with any scale."""
    return Encoded.of(b"D" + struct.pack(">Bi", scale, value))
