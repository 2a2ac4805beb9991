"""What tests of connectors share: an NBD server, and looks at what was attached."""

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from messages import errors
from tests.services import leftovers, tgtd
from worker import process
from worker.connectors import base, bridge
from worker.storage_daemon import daemon, server
from worker.targets import nbd_keys

MIB = 1024 * 1024
PSK = "5a" * 32


@contextlib.contextmanager
def nothing_left(tmp_path: pathlib.Path) -> Iterator[None]:
    """Fails where the block leaves a process, a mount, or a file of an attachment."""
    tgtd.require_program("qemu-storage-daemon", "qemu-io", "nbdinfo", "setpriv", "sync", "dd")
    with leftovers.none(tmp_path):
        yield
    for kind in ("iscsi", "nbd"):
        if (tmp_path / "state" / kind).exists():
            assert leftovers.entries(tmp_path / "state" / kind) == []


def new_context(tmp_path: pathlib.Path) -> base.Context:
    (tmp_path / "state").mkdir()
    return base.Context("host-a", process.Executor(), tmp_path / "state")


def new_volume(tmp_path: pathlib.Path) -> pathlib.Path:
    """A sparse file of 4 MiB."""
    path = tmp_path / "volume"
    path.touch()
    os.truncate(path, 4 * MIB)
    return path


@contextlib.asynccontextmanager
async def nbd_server(
    folder: pathlib.Path, backing: pathlib.Path, *, psk: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """Connection info of a server that serves ``backing`` as rw and ro."""
    port = tgtd.free_port()
    listen = f"addr.type=inet,addr.host=127.0.0.1,addr.port={port}"
    arguments = ["--nbd-server", listen]
    if psk:
        keys = nbd_keys.Keys(folder / "keys")
        await keys.write([{"username": "c-1", "psk_key": PSK}])
        arguments = ["--object", daemon.json_argument(keys.server_object("tls"))]
        arguments += ["--nbd-server", f"{listen},tls-creds=tls"]
    started = daemon.StorageDaemon(process.Executor(), folder / "server")
    await started.start(*arguments)
    served = server.Server(started)
    await served.add_node("v", backing)
    await served.add_export("rw-1", "v", name="rw", writable=True)
    await served.add_export("ro-1", "v", name="ro", writable=False)
    tls = {"tls": {"type": "psk", "username": "c-1", "psk_key": PSK}} if psk else {}
    try:
        yield {
            "host": "127.0.0.1",
            "port": port,
            "export": "rw",
            "access_mode": "rw",
            "pid": started.pid,
            **tls,
        }
    finally:
        await started.stop()


def where(device: base.Device) -> str | pathlib.Path:
    found = device.nbd_uri or device.path
    assert found is not None
    return found


def need_fuse(access: base.Access) -> None:
    if access is base.Access.PATH:
        try:
            bridge.check_fuse()
        except errors.DeviceUnavailable as error:
            if os.environ.get("CI"):
                pytest.fail(error.message)
            pytest.skip(error.message)


def allocated(path: pathlib.Path) -> int:
    return path.stat().st_blocks * 512


def holes(path: pathlib.Path) -> list[tuple[int, int]]:
    """The ranges with data."""
    handle = os.open(path, os.O_RDONLY)
    try:
        found, end = [], 0
        with contextlib.suppress(OSError):
            while True:
                start = os.lseek(handle, end, os.SEEK_DATA)
                end = os.lseek(handle, start, os.SEEK_HOLE)
                found.append((start, end))
        return found
    finally:
        os.close(handle)


def files_with(folder: pathlib.Path, text: str) -> list[pathlib.Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != bridge.NODE and text in path.read_text(errors="replace")
    ]


async def until(stream: asyncio.StreamReader, start: bytes) -> AsyncIterator[bytes]:
    async for line in stream:
        if line.startswith(start):
            yield line
            return


@contextlib.contextmanager
def hanging(pid: int) -> Iterator[None]:
    """Stops a process for the time of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
