"""AMQP frames made by hand, for what no client library would send (AMQP 0-9-1, 4.2)."""

import asyncio
import contextlib
import struct
import urllib.parse
from collections.abc import AsyncIterator
from typing import Final

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
FRAME_END: Final = b"\xce"
MOST: Final = 131072 - 8
"""Bytes of a body that one frame holds."""


def short(text: bytes) -> bytes:
    """A short string."""
    return bytes([len(text)]) + text


def long(data: bytes) -> bytes:
    """A long string, or a table that is encoded already."""
    return struct.pack(">I", len(data)) + data


class Publisher:
    """A channel on which anything can be published."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def open(self, user: bytes, password: bytes) -> None:
        """Goes through the handshake, as far as an open channel."""
        self._writer.write(b"AMQP\x00\x00\x09\x01")
        await self._frame()
        plain = b"\0" + user + b"\0" + password
        self._send(0, 10, 11, long(b"") + short(b"PLAIN") + long(plain) + short(b"en_US"))
        await self._frame()
        self._send(0, 10, 31, struct.pack(">HIH", 2047, 131072, 0))
        self._send(0, 10, 40, short(b"/") + short(b"") + b"\0")
        await self._frame()
        self._send(1, 20, 10, short(b""))
        await self._frame()
        self._send(1, 85, 10, b"\0")  # confirms
        await self._frame()

    async def publish(
        self, exchange: str, routing_key: str, flags: int, properties: bytes, body: bytes
    ) -> None:
        """Publishes with encoded properties, and waits for the confirm."""
        arguments = b"\0\0" + short(exchange.encode()) + short(routing_key.encode()) + b"\0"
        self._send(1, 60, 40, arguments)
        header = struct.pack(">HHQH", 60, 0, len(body), flags) + properties
        self._write(HEADER, 1, header)
        for at in range(0, len(body), MOST):
            self._write(BODY, 1, body[at : at + MOST])
        assert (await self._frame())[:4] == struct.pack(">HH", 60, 80), "the broker took it not"

    def _send(self, channel: int, class_id: int, method: int, arguments: bytes) -> None:
        self._write(METHOD, channel, struct.pack(">HH", class_id, method) + arguments)

    def _write(self, kind: int, channel: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END)

    async def _frame(self) -> bytes:
        _, _, size = struct.unpack(">BHI", await self._reader.readexactly(7))
        return (await self._reader.readexactly(size + 1))[:-1]


@contextlib.asynccontextmanager
async def publisher(broker_url: str) -> AsyncIterator[Publisher]:
    """Connects to the broker."""
    url = urllib.parse.urlparse(broker_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        made = Publisher(reader, writer)
        user, password = url.username or "guest", url.password or "guest"
        await made.open(
            urllib.parse.unquote(user).encode(), urllib.parse.unquote(password).encode()
        )
        yield made
    finally:
        writer.close()
        await writer.wait_closed()
