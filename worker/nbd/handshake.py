"""The handshake of the NBD protocol (doc/proto.md of the NBD project): fixed newstyle, no TLS."""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from worker.nbd import link as links

_READ_ONLY: Final = 1 << 1
_SEND_FLUSH: Final = 1 << 2
_SEND_WRITE_ZEROES: Final = 1 << 6

_GREETING: Final = b"NBDMAGIC"
_OPTION: Final = b"IHAVEOPT"
_OPTION_REPLY: Final = 0x3E889045565A9
_FIXED_NEWSTYLE: Final = 1 << 0
_NO_ZEROES: Final = 1 << 1

_OPT_EXPORT_NAME: Final = 1
_OPT_GO: Final = 7
_OPT_STRUCTURED_REPLY: Final = 8
_OPT_SET_META_CONTEXT: Final = 10

_REP_ACK: Final = 1
_REP_INFO: Final = 3
_REP_META_CONTEXT: Final = 4
_REP_ERROR: Final = 1 << 31
_REP_ERR_UNSUP: Final = _REP_ERROR + 1
_REFUSALS: Final = {
    _REP_ERROR + 2: "refuses it by policy",
    _REP_ERROR + 5: "requires TLS",
    _REP_ERROR + 6: "has no such export",
    _REP_ERROR + 7: "is shutting down",
}

_INFO_EXPORT: Final = 0
_INFO_BLOCK_SIZE: Final = 3
_ALLOCATION: Final = b"base:allocation"
_LONGEST_REPLY: Final = 64 * 1024
_MOST_REPLIES: Final = 64

# What a client should keep to where the server does not say: "Block size constraints".
_MINIMUM_BLOCK: Final = 512
_MAXIMUM_BLOCK: Final = 32 * 1024 * 1024


class Export(NamedTuple):
    """What a server says of an export, and what was agreed with it."""

    size: int
    flags: int
    minimum: int = _MINIMUM_BLOCK
    """Bytes to which requests must be aligned, but for the end of the export."""
    maximum: int = _MAXIMUM_BLOCK
    """Bytes that one read or write may have."""
    structured: bool = False
    allocation: int | None = None
    """The id of the context ``base:allocation``, where there is one."""

    @property
    def read_only(self) -> bool:
        return bool(self.flags & _READ_ONLY)

    @property
    def can_flush(self) -> bool:
        return bool(self.flags & _SEND_FLUSH)

    @property
    def can_zero(self) -> bool:
        return bool(self.flags & _SEND_WRITE_ZEROES)


def negotiate(link: links.Link, name: str) -> Export:
    """Takes a new connection to the transmission phase of an export.

    Raises:
        DeviceUnavailable: the server has no such export, refuses it, or speaks something else.
    """
    if link.receive_bytes(8) != _GREETING or link.receive_bytes(8) != _OPTION:
        link.fail("does not speak the NBD protocol's newstyle")
    (flags,) = struct.unpack(">H", link.receive_bytes(2))
    if not flags & _FIXED_NEWSTYLE:
        link.fail("does not speak the NBD protocol's fixed newstyle")
    no_zeroes = flags & _NO_ZEROES
    link.send(struct.pack(">I", _FIXED_NEWSTYLE | no_zeroes))
    export_name = name.encode()
    structured = _ask_structured(link)
    allocation = _ask_allocation(link, export_name) if structured else None
    export = _go(link, export_name) or _export_name(link, export_name, padded=not no_zeroes)
    return export._replace(structured=structured, allocation=allocation)


def _ask_structured(link: links.Link) -> bool:
    return any(kind == _REP_ACK for kind, _ in _ask(link, _OPT_STRUCTURED_REPLY, b""))


def _ask_allocation(link: links.Link, name: bytes) -> int | None:
    query = struct.pack(">I", len(name)) + name + struct.pack(">II", 1, len(_ALLOCATION))
    context: int | None = None
    for kind, data in _ask(link, _OPT_SET_META_CONTEXT, query + _ALLOCATION):
        if kind == _REP_META_CONTEXT and data[4:] == _ALLOCATION:
            (context,) = struct.unpack_from(">I", data)
    return context


def _go(link: links.Link, name: bytes) -> Export | None:
    """Returns None where the server does not know this option."""
    export: Export | None = None
    minimum, maximum = _MINIMUM_BLOCK, _MAXIMUM_BLOCK
    query = struct.pack(">I", len(name)) + name + struct.pack(">HH", 1, _INFO_BLOCK_SIZE)
    for kind, data in _ask(link, _OPT_GO, query):
        if kind == _REP_ERR_UNSUP:
            return None
        if kind >= _REP_ERROR:
            said = data.decode("utf-8", "replace").strip()
            reason = _REFUSALS.get(kind, f"refuses it with error {kind - _REP_ERROR}")
            link.fail(f"{reason}: export {name.decode()!r}" + (f" ({said})" if said else ""))
        info = struct.unpack_from(">H", data)[0] if kind == _REP_INFO and len(data) >= 2 else None
        if info == _INFO_EXPORT and len(data) == 12:
            export = Export(*struct.unpack_from(">QH", data, 2))
        elif info == _INFO_BLOCK_SIZE and len(data) == 14:
            minimum, maximum = _block_sizes(link, data)
    if export is None:
        link.fail("did not describe the export that it granted")
    return export._replace(minimum=minimum, maximum=maximum)


def _block_sizes(link: links.Link, data: bytes) -> tuple[int, int]:
    minimum, _, maximum = struct.unpack_from(">III", data, 2)
    if not 1 <= minimum <= 64 * 1024 or minimum & (minimum - 1) or maximum < minimum:
        link.fail(f"asks for blocks of {minimum} to {maximum} bytes, which cannot be")
    return minimum, min(maximum, _MAXIMUM_BLOCK) // minimum * minimum


def _export_name(link: links.Link, name: bytes, *, padded: bool) -> Export:
    link.send(_OPTION + struct.pack(">II", _OPT_EXPORT_NAME, len(name)) + name)
    size, flags = struct.unpack(">QH", link.receive_bytes(10))
    if padded:
        link.receive_bytes(124)
    return Export(size, flags)


def _ask(link: links.Link, option: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Sends an option; gives each reply to it, up to the one that ends it."""
    link.send(_OPTION + struct.pack(">II", option, len(data)) + data)
    for _ in range(_MOST_REPLIES):
        magic, answered, kind, length = struct.unpack(">QIII", link.receive_bytes(20))
        if magic != _OPTION_REPLY or answered != option or length > _LONGEST_REPLY:
            link.fail("broke the NBD protocol in the handshake")
        yield kind, link.receive_bytes(length)
        if kind == _REP_ACK or kind >= _REP_ERROR:
            return
    link.fail("does not come to an end of the handshake")
