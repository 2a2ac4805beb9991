"""What connectors ask of an NBD export, of a server that can lack, refuse or break anything."""

import asyncio
import contextlib
import errno
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from messages import errors
from tests.services.nbd_server import FLUSH, READ, Server
from worker import process
from worker.connectors import base, devices, exports
from worker.nbd import session

MIB = 1024 * 1024

Serve = Callable[[Server], base.Device]


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:
        yield lambda server: base.Device(
            nbd_uri=stack.enter_context(server.listening(tmp_path)).uri
        )


@pytest.fixture
def execute() -> process.Executor:
    return process.Executor()


@pytest.fixture(autouse=True)
async def _no_thread_stays_busy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Fails where a thread still waits for a server, before the loop's end would wait for it."""
    working: set[int] = set()
    run = exports._Visit.run

    def watched(self: exports._Visit[object]) -> object:
        working.add(threading.get_ident())
        try:
            return run(self)
        finally:
            working.discard(threading.get_ident())

    monkeypatch.setattr(exports._Visit, "run", watched)
    yield
    async with asyncio.timeout(3):
        while working:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [1, 4096, 100_000])
@pytest.mark.parametrize("blocks", [None, (65536, 65536, MIB), (512, 512, 1024)])
async def test_a_readable_export_is_valid(
    serve: Serve, execute: process.Executor, size: int, blocks: tuple[int, int, int] | None
) -> None:
    device = serve(Server(bytearray(size), blocks=blocks if size > 65536 else None))
    assert await devices.is_valid(execute, device)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_an_export_that_cannot_be_read_is_not_valid(
    serve: Serve, execute: process.Executor, number: int
) -> None:
    device = serve(Server(bytearray(MIB), fails={READ: number}))
    assert not await devices.is_valid(execute, device)


async def test_an_empty_export_is_not_valid(serve: Serve, execute: process.Executor) -> None:
    assert not await devices.is_valid(execute, serve(Server(bytearray())))


async def test_a_flush_is_asked_for_where_there_is_a_cache(
    serve: Serve, execute: process.Executor
) -> None:
    server = Server(bytearray(MIB))
    await devices.flush(execute, serve(server))
    assert server.count(FLUSH) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_flush_that_fails_is_an_error_unless_forced(
    serve: Serve, execute: process.Executor, number: int
) -> None:
    device = serve(Server(bytearray(MIB), fails={FLUSH: number}))
    with pytest.raises(errors.DeviceUnavailable, match="cannot be flushed"):
        await devices.flush(execute, device)
    await devices.flush(execute, device, force=True)


async def test_a_flush_may_take_longer_than_another_answer(
    serve: Serve, execute: process.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "PATIENCE", 0.3)
    device = serve(Server(bytearray(MIB), delay=lambda _: 1.0))
    await devices.flush(execute, device)
    assert not await devices.is_valid(execute, device)


@pytest.mark.parametrize("force", [False, True])
async def test_a_server_that_hangs_is_given_up_and_so_is_its_thread(
    serve: Serve, execute: process.Executor, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    limits = {"FLUSH_TIMEOUT": 60.0, "FORCED_FLUSH_TIMEOUT": 60.0, "READ_TIMEOUT": 0.3}
    limits["FORCED_FLUSH_TIMEOUT" if force else "FLUSH_TIMEOUT"] = 0.3
    for name, seconds in limits.items():
        monkeypatch.setattr(devices, name, seconds)
    device = serve(Server(bytearray(MIB), delay=lambda _: 10.0))
    started = time.monotonic()
    assert not await devices.is_valid(execute, device)
    told = contextlib.nullcontext() if force else pytest.raises(errors.DeviceUnavailable)
    with told:
        await devices.flush(execute, device, force=force)
    assert time.monotonic() - started < 5


async def test_a_server_that_hangs_in_the_handshake_is_given_up(
    serve: Serve, execute: process.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "PATIENCE", 0.3)
    device = serve(Server(bytearray(MIB), greeting=b"NBD"))
    with pytest.raises(errors.DeviceUnavailable, match="no answer in time"):
        await devices.flush(execute, device)


async def test_a_cancelled_visit_takes_the_connection_from_its_thread(serve: Serve) -> None:
    device = serve(Server(bytearray(MIB), delay=lambda _: 10.0))
    assert device.nbd_uri is not None
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(opened: session.Session) -> None:
        loop.call_soon_threadsafe(begun.set)
        opened.flush()

    visiting = asyncio.create_task(devices.within(60, exports.visit(device.nbd_uri, work)))
    await begun.wait()
    visiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visiting


async def test_a_visit_given_up_before_it_is_connected_ends(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = serve(Server(bytearray(MIB), greeting=b"NBD"))
    assert device.nbd_uri is not None
    visit = exports._Visit(device.nbd_uri, session.Session.flush)
    visit.give_up()
    with pytest.raises(errors.DeviceUnavailable):
        await asyncio.wait_for(asyncio.to_thread(visit.run), 5)


def test_the_copier_loads_little() -> None:
    heavy = {"asyncio", "pydantic", "structlog", "ssl", "dataclasses"}
    program = f"import sys, worker.transfer.copier; print(*sorted({heavy!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.split() == []
