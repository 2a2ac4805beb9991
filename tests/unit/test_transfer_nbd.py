"""The NBD client against a server that can lack, refuse or break anything."""

import contextlib
import errno
import os
import pathlib
import random
import struct
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Protocol

import pytest

from messages import errors
from tests.services.nbd_server import (
    FLUSH,
    READ,
    SIMPLE,
    STATUS,
    STRUCTURED,
    WRITE,
    WRITE_ZEROES,
    Server,
)
from worker.nbd import link
from worker.transfer import endpoint, nbd

MIB = 1024 * 1024

Serve = Callable[[Server], Server]


class Connect(Protocol):
    def __call__(self, server: Server, *, writable: bool = False) -> nbd.Nbd: ...


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(server.listening(tmp_path))


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(server: Server, *, writable: bool = False) -> nbd.Nbd:
            export = nbd.Nbd(server.uri, writable=writable)
            stack.callback(export.close)
            return export

        yield connect


def read(export: nbd.Nbd, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    export.read_into(offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("can_structured", [True, False])
@pytest.mark.parametrize("can_go", [True, False])
def test_what_is_written_is_read_back(
    serve: Serve, connect: Connect, can_structured: bool, can_go: bool
) -> None:
    content = random.Random(1).randbytes(3 * MIB)
    server = serve(Server(bytearray(content), can_structured=can_structured, can_go=can_go))
    export = connect(server, writable=True)
    assert export.size == 3 * MIB
    data = os.urandom(MIB)
    export.write(MIB, memoryview(data))
    export.zero(0, MIB)
    export.flush()
    export.close()
    assert server.content == bytes(MIB) + data + content[2 * MIB :]
    assert read(connect(server), 0, 3 * MIB) == server.content


def test_replies_may_come_out_of_order_to_many_threads(serve: Serve, connect: Connect) -> None:
    content = random.Random(2).randbytes(4 * MIB)
    server = serve(Server(bytearray(content), delay=lambda n: (7 * n % 5) / 200))
    export = connect(server)
    with futures.ThreadPoolExecutor(8) as pool:
        offsets = range(0, 4 * MIB, 64 * 1024)
        parts = pool.map(lambda at: read(export, at, 64 * 1024), offsets)
    assert b"".join(parts) == content


def test_zeroing_lets_the_server_free_the_space(serve: Serve, connect: Connect) -> None:
    server = serve(Server(bytearray(b"x" * MIB)))
    connect(server, writable=True).zero(0, MIB)
    assert server.seen == [(WRITE_ZEROES, 0, 0, MIB)]


@pytest.mark.parametrize("how", ["not offered", "refused"])
def test_zeros_are_written_where_the_server_cannot_make_them(
    serve: Serve, connect: Connect, how: str
) -> None:
    server = Server(bytearray(b"x" * 3 * MIB), can_zero=how == "refused")
    server.fails[WRITE_ZEROES] = errno.EOPNOTSUPP
    serve(server)
    connect(server, writable=True).zero(512, 2 * MIB)
    assert server.content == b"x" * 512 + bytes(2 * MIB) + b"x" * (MIB - 512)


def test_a_server_without_flush_is_not_asked_to(serve: Serve, connect: Connect) -> None:
    server = serve(Server(bytearray(MIB), can_flush=False))
    connect(server, writable=True).flush()
    assert server.count(FLUSH) == 0


def test_block_status_tells_zeros_from_data(serve: Serve, connect: Connect) -> None:
    # A hole (1) that does not read as zeros (2) is data.
    pairs = [(MIB, 0), (MIB, 1), (MIB, 2), (10 * MIB, 3)]
    server = serve(Server(bytearray(5 * MIB), extents=lambda *_: pairs))
    export = connect(server)
    assert export.extents(0, 5 * MIB) == [(0, 2 * MIB, False), (2 * MIB, 3 * MIB, True)]


@pytest.mark.parametrize("how", ["no structured replies", "no context", "error"])
def test_without_block_status_all_is_data(serve: Serve, connect: Connect, how: str) -> None:
    server = Server(
        bytearray(MIB),
        can_structured=how != "no structured replies",
        can_status=how != "no context",
        fails={STATUS: errno.EINVAL},
    )
    serve(server)
    export = connect(server)
    assert export.extents(0, MIB) == [endpoint.Extent(0, MIB, zero=False)]


def test_the_servers_block_sizes_are_kept_to(serve: Serve, connect: Connect) -> None:
    content = random.Random(3).randbytes(MIB)
    server = serve(Server(bytearray(content), blocks=(4096, 4096, 64 * 1024)))
    export = connect(server, writable=True)
    assert read(export, 1000, 300_000) == content[1000:301_000]
    data = os.urandom(100_001)
    export.write(777, memoryview(data))
    export.zero(200_001, 50_000)
    expected = bytearray(content)
    expected[777 : 777 + len(data)] = data
    expected[200_001:250_001] = bytes(50_000)
    assert server.content == expected


def test_an_export_of_an_odd_size_is_read_and_written_to_its_end(
    serve: Serve, connect: Connect
) -> None:
    content = random.Random(4).randbytes(1000)
    server = serve(Server(bytearray(content)))
    export = connect(server, writable=True)
    export.write(990, memoryview(b"0123456789"))
    export.zero(900, 50)
    assert read(export, 0, 1000) == content[:900] + bytes(50) + content[950:990] + b"0123456789"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, errors.DeviceUnavailable),
        (errno.EPERM, errors.DeviceUnavailable),
        (errno.ESHUTDOWN, errors.DeviceUnavailable),
        (errno.ENOSPC, errors.InsufficientSpace),
    ],
)
def test_an_error_from_the_server_is_told_with_its_place(
    serve: Serve, connect: Connect, number: int, kind: type[errors.VolumeWorkerError]
) -> None:
    server = serve(Server(bytearray(MIB), fails={WRITE: number, READ: errno.EIO}))
    export = connect(server, writable=True)
    with pytest.raises(kind, match=r"cannot be written at byte 512: ") as caught:
        export.write(512, memoryview(bytes(512)))
    assert caught.value.details["errno"] == number
    with pytest.raises(errors.DeviceUnavailable, match=r"Input/output error \(as told\)"):
        read(export, 0, 512)


def test_a_read_only_export_cannot_be_a_destination(serve: Serve, connect: Connect) -> None:
    server = serve(Server(bytearray(MIB), read_only=True))
    connect(server).close()
    with pytest.raises(errors.DeviceUnavailable, match="for reading only"):
        connect(server, writable=True)


def test_an_unknown_export_is_told_by_its_name(serve: Serve, connect: Connect) -> None:
    server = serve(Server(bytearray(MIB)))
    with pytest.raises(errors.DeviceUnavailable, match="no such export: export 'other'"):
        nbd.Nbd(server.uri.replace("vol%20ume", "other"), writable=True)


def test_no_server_is_unavailable(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.DeviceUnavailable, match="cannot be reached: No such file"):
        nbd.Nbd(f"nbd+unix:///?socket={tmp_path}/none", writable=False)


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53" + bytes(140),
        b"NBDMAGICIHAVEOPT\x00\x00",
        b"NBD",
    ],
)
def test_a_server_of_another_protocol_is_unavailable(
    serve: Serve, connect: Connect, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.3)
    server = serve(Server(bytearray(MIB), greeting=greeting))
    with pytest.raises(errors.DeviceUnavailable, match=r"does not speak|no answer in time"):
        connect(server)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage" * 100,
        struct.pack(">IIQ", SIMPLE, 0, 999),
        struct.pack(">IHHQI", STRUCTURED, 1, 1, 1, 8 + 4096) + bytes(8 + 4096),
        struct.pack(">IHHQI", STRUCTURED, 1, 1, 1, 0xFFFFFFFF) + bytes(4096),
        struct.pack(">IHHQI", STRUCTURED, 1, 0, 1, 0),
        struct.pack(">IHHQI", STRUCTURED, 1, 77, 1, 4) + bytes(4),
        struct.pack(">IHHQI", STRUCTURED, 1, 32769, 1, 2) + bytes(2),
        struct.pack(">IIQ", SIMPLE, 0, 1) + bytes(512),
    ],
    ids=[
        "closed",
        "noise",
        "unknown cookie",
        "too many bytes",
        "length",
        "no bytes",
        "unknown chunk",
        "short error",
        "simple",
    ],
)
def test_a_server_that_breaks_the_protocol_is_unavailable_from_then_on(
    serve: Serve, connect: Connect, answer: bytes
) -> None:
    server = serve(Server(bytearray(MIB), answers={READ: answer}))
    export = connect(server, writable=True)
    for _ in range(2):
        with pytest.raises(errors.DeviceUnavailable, match=r"broke the NBD protocol|closed the"):
            read(export, 0, 512)
    with pytest.raises(errors.DeviceUnavailable):
        export.write(0, memoryview(bytes(512)))
    export.close()


def test_an_extent_of_no_bytes_is_no_endless_loop(serve: Serve, connect: Connect) -> None:
    server = serve(Server(bytearray(MIB), extents=lambda *_: [(0, 0)]))
    with pytest.raises(errors.DeviceUnavailable, match="extent of no bytes"):
        connect(server).extents(0, MIB)


def test_a_stalled_server_is_an_error(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.3)
    server = serve(Server(bytearray(MIB), delay=lambda _: 5.0))
    export = connect(server)
    with pytest.raises(errors.DeviceUnavailable, match="no answer in time"):
        read(export, 0, 512)
