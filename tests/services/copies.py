"""What tests of copies share: sources, real NBD servers, and a copier between them."""

import hashlib
import json
import pathlib
import random
import socket
import subprocess
import time
import urllib.parse

from worker import process
from worker.connectors import base
from worker.transfer import copying

MIB = 1024 * 1024
QEMU_NBD = pathlib.Path("/usr/bin/qemu-nbd")


class Servers:
    """qemu-nbd processes, ended together."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def serve(self, path: pathlib.Path, *options: str) -> base.Device:
        """Serves a file on a unix socket."""
        return self._start({"driver": "file", "filename": str(path)}, *options)

    def serve_failing(self, path: pathlib.Path, number: int) -> base.Device:
        """Serves a file all of whose writes fail."""
        rule = {"event": "none", "iotype": "write", "errno": number}
        image = {"driver": "file", "filename": str(path)}
        return self._start({"driver": "blkdebug", "inject-error": [rule], "image": image})

    def _start(self, node: dict[str, object], *options: str) -> base.Device:
        listen = self._folder / f"nbd-{len(self.processes)}.sock"
        image = "json:" + json.dumps({"driver": "raw", "file": node})
        self.processes.append(subprocess.Popen([QEMU_NBD, "-t", "-k", listen, *options, image]))
        deadline = time.monotonic() + 20
        while not _accepts(listen):
            assert self.processes[-1].poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return base.Device(nbd_uri=f"nbd+unix:///?socket={urllib.parse.quote(str(listen))}")

    def stop(self) -> None:
        for server in self.processes:
            server.kill()
            server.wait()
        self.processes.clear()


def _accepts(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def digest_of(data: bytes) -> str:
    pieces = (data[at : at + 4 * MIB] for at in range(0, len(data), 4 * MIB))
    joined = b"".join(hashlib.blake2b(piece, digest_size=32).digest() for piece in pieces)
    return f"blake2b-4m:{hashlib.blake2b(joined, digest_size=32).hexdigest()}"


def write_source(path: pathlib.Path, size: int, islands: list[tuple[int, int]]) -> bytes:
    """A sparse file with some runs of data; returns its content."""
    rng = random.Random(repr(islands))
    with path.open("wb") as source:
        source.truncate(size)
        for offset, length in islands:
            if offset < size:
                source.seek(offset)
                source.write(rng.randbytes(min(length, size - offset)))
    return path.read_bytes()


def data_bytes(path: pathlib.Path) -> int:
    return path.stat().st_blocks * 512


class Copier:
    """Copies between files, either of them behind an NBD server."""

    def __init__(self, folder: pathlib.Path, servers: Servers) -> None:
        self.source = folder / "source"
        self.destination = folder / "destination"
        self._servers = servers
        self._executor = process.Executor()

    async def copy(
        self,
        kinds: tuple[str, str],
        size: int,
        *,
        verify: bool = True,
        source_changes: bool = False,
        bytes_per_second: int | copying.Rate | None = None,
        on_progress: copying.OnProgress | None = None,
        resume_from: int = 0,
        on_mark: copying.OnMark | None = None,
        on_child: copying.OnChild | None = None,
    ) -> copying.Copied:
        source, destination = (
            base.Device(path=path) if kind == "file" else self._servers.serve(path, *options)
            for kind, path, options in (
                (kinds[0], self.source, ("-r",)),
                (kinds[1], self.destination, ("--discard=unmap",)),
            )
        )
        return await copying.copy(
            self._executor,
            source,
            destination,
            size_bytes=size,
            verify=verify,
            source_changes=source_changes,
            bytes_per_second=bytes_per_second,
            on_progress=on_progress,
            resume_from=resume_from,
            on_mark=on_mark,
            on_child=on_child,
        )
