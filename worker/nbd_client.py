"""A small NBD client: does a server have an export, can it be read, and is it flushed?

It speaks the fixed newstyle handshake with ``NBD_OPT_GO`` and simple replies, without TLS. See the
NBD project's ``doc/proto.md`` and ``doc/uri.md``; the names of constants are those used there.
"""

import asyncio
import contextlib
import dataclasses
import struct
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from typing import Final

from messages import errors

DEFAULT_PORT: Final = 10809
TIMEOUT: Final = 20.0
"""Seconds for the handshake, and for a read."""

_NBDMAGIC: Final = b"NBDMAGIC"
_IHAVEOPT: Final = b"IHAVEOPT"
_REPLY_MAGIC: Final = 0x3E889045565A9
_REQUEST_MAGIC: Final = 0x25609513
_SIMPLE_REPLY_MAGIC: Final = 0x67446698
_FLAG_FIXED_NEWSTYLE: Final = 1
_OPT_GO: Final = 7
_REP_ACK: Final = 1
_REP_INFO: Final = 3
_REP_ERR_BIT: Final = 1 << 31
_REP_ERR_TLS_REQD: Final = _REP_ERR_BIT + 5
_REP_ERR_UNKNOWN: Final = _REP_ERR_BIT + 6
_INFO_EXPORT: Final = 0
_EXPORT_READ_ONLY: Final = 2
_EXPORT_SEND_FLUSH: Final = 4
_CMD_READ: Final = 0
_CMD_DISC: Final = 2
_CMD_FLUSH: Final = 3
_LONGEST_REPLY: Final = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """What an NBD URI names."""

    export: str
    host: str | None = None
    port: int = DEFAULT_PORT
    socket: str | None = None


def parse_uri(uri: str) -> Location:
    """Reads ``nbd://HOST[:PORT]/EXPORT`` or ``nbd+unix:///EXPORT?socket=PATH``.

    Raises:
        ValueError: it is neither.
    """
    parts = urllib.parse.urlsplit(uri)
    export = urllib.parse.unquote(parts.path.removeprefix("/"))
    match parts.scheme:
        case "nbd" if parts.hostname:
            return Location(export, host=parts.hostname, port=parts.port or DEFAULT_PORT)
        case "nbd+unix" if sockets := urllib.parse.parse_qs(parts.query).get("socket"):
            return Location(export, socket=sockets[0])
        case _:
            raise ValueError(
                "an NBD URI is nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH"
            )


def tcp_uri(host: str, port: int, export: str, *, tls_user: str | None = None) -> str:
    """The URI of an export on a TCP port; for TLS with a pre-shared key with the key's name."""
    bracketed = f"[{host}]" if ":" in host else host
    scheme = "nbd://" if tls_user is None else f"nbds://{urllib.parse.quote(tls_user)}@"
    return f"{scheme}{bracketed}:{port}/{urllib.parse.quote(export)}"


def unix_uri(socket: str, export: str) -> str:
    """The URI of an export on a unix socket."""
    return f"nbd+unix:///{urllib.parse.quote(export)}?socket={urllib.parse.quote(socket)}"


class Session:
    """A connection in the transmission phase; requests go one at a time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        size_bytes: int,
        flags: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.size_bytes = size_bytes
        self.read_only = bool(flags & _EXPORT_READ_ONLY)
        self._can_flush = bool(flags & _EXPORT_SEND_FLUSH)

    async def read(self, offset: int, length: int) -> bytes:
        """Reads ``length`` bytes at ``offset``.

        Raises:
            DeviceUnavailable: the server says no, or is gone.
        """
        return await self._request(_CMD_READ, offset, length)

    async def flush(self) -> None:
        """Makes every write that the server has answered durable; nothing where it has no cache.

        It takes as long as it takes: there may be much to write.

        Raises:
            DeviceUnavailable: the server could not.
        """
        if self._can_flush:
            await self._request(_CMD_FLUSH, 0, 0, timeout=None)

    async def _request(
        self, command: int, offset: int, length: int, *, timeout: float | None = TIMEOUT
    ) -> bytes:
        self._writer.write(_request(command, offset, length))
        with _errors("request"):
            async with asyncio.timeout(timeout):
                magic, error, _ = struct.unpack(">IIQ", await self._reader.readexactly(16))
                if magic != _SIMPLE_REPLY_MAGIC:
                    raise errors.DeviceUnavailable("the NBD server sent what is no simple reply")
                if error:
                    raise errors.DeviceUnavailable(f"the NBD server answered with error {error}")
                return await self._reader.readexactly(length)


@contextlib.asynccontextmanager
async def connect(uri: str) -> AsyncIterator[Session]:
    """A session with the export that ``uri`` names, for the time of an ``async with`` block.

    Raises:
        DeviceUnavailable: nobody answers, what answers is no NBD server, or has no such export.
    """
    location = parse_uri(uri)
    with _errors("handshake"):
        async with asyncio.timeout(TIMEOUT):
            if location.socket is not None:
                reader, writer = await asyncio.open_unix_connection(location.socket)
            else:
                reader, writer = await asyncio.open_connection(location.host, location.port)
    try:
        with _errors("handshake"):
            async with asyncio.timeout(TIMEOUT):
                size_bytes, flags = await _handshake(reader, writer, location.export)
        yield Session(reader, writer, size_bytes=size_bytes, flags=flags)
        writer.write(_request(_CMD_DISC, 0, 0))
    finally:
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.wait_closed()


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, export: str
) -> tuple[int, int]:
    """Negotiates the export; returns its size in bytes and its transmission flags."""
    greeting = await reader.readexactly(18)
    flags = int.from_bytes(greeting[16:])
    if greeting[:16] != _NBDMAGIC + _IHAVEOPT or not flags & _FLAG_FIXED_NEWSTYLE:
        raise errors.DeviceUnavailable("what answers there is no NBD server of the newstyle kind")
    name = export.encode()
    # The export's name, and that no information is asked for beyond what is always sent.
    option = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    writer.write(struct.pack(">I", _FLAG_FIXED_NEWSTYLE))
    writer.write(_IHAVEOPT + struct.pack(">II", _OPT_GO, len(option)) + option)
    found: tuple[int, int] | None = None
    while True:
        magic, _, kind, length = struct.unpack(">QIII", await reader.readexactly(20))
        if magic != _REPLY_MAGIC or length > _LONGEST_REPLY:
            raise errors.DeviceUnavailable("the NBD server does not keep to the protocol")
        payload = await reader.readexactly(length)
        if kind & _REP_ERR_BIT:
            raise errors.DeviceUnavailable(_refusal(kind, export, payload))
        if kind == _REP_INFO and length >= 12 and int.from_bytes(payload[:2]) == _INFO_EXPORT:
            found = struct.unpack(">QH", payload[2:12])
        if kind == _REP_ACK:
            if found is None:
                raise errors.DeviceUnavailable("the NBD server did not tell the export's size")
            return found


def _refusal(kind: int, export: str, payload: bytes) -> str:
    match kind:
        case code if code == _REP_ERR_UNKNOWN:
            return f"the NBD server has no export {export!r}"
        case code if code == _REP_ERR_TLS_REQD:
            return "the NBD server demands TLS"
        case _:
            words = payload.decode("utf-8", "replace").replace("\0", "") or f"error {kind:#x}"
            return f"the NBD server refused export {export!r}: {words}"


def _request(command: int, offset: int, length: int) -> bytes:
    return struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, 0, offset, length)


@contextlib.contextmanager
def _errors(phase: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise errors.DeviceUnavailable(
            f"the NBD server did not answer the {phase} in time"
        ) from None
    except asyncio.IncompleteReadError:
        raise errors.DeviceUnavailable(f"the NBD server hung up during the {phase}") from None
    except OSError as error:
        raise errors.DeviceUnavailable(f"the NBD server cannot be reached: {error}") from error
