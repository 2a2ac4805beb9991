"""Clients of exports that other people wrote: one qemu-io for as long as a session lasts."""

import asyncio
import contextlib
import pathlib
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.services import tgtd, volumes


class Session:
    """A client that stays connected, and reads and writes on command."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    async def reads(self, pattern: int, offset: int, length: int) -> bool:
        """Whether ``length`` bytes from ``offset`` on can be read and are all ``pattern``."""
        answer = await self._do(f"read -P {pattern} {offset} {length}")
        return f"read {length}/{length}" in answer and "failed" not in answer

    async def writes(self, pattern: int, offset: int, length: int) -> bool:
        """Whether ``length`` bytes ``pattern`` can be written, down to the disk."""
        answer = await self._do(f"write -f -P {pattern} {offset} {length}")
        return f"wrote {length}/{length}" in answer and "failed" not in answer

    async def is_open(self) -> bool:
        """Whether the client got in."""
        return "iB" in await self._do("length")

    async def _do(self, command: str) -> str:
        """Runs a command and returns what it prints; "" where the client has ended."""
        try:
            async with asyncio.timeout(30):
                await self._say(command)
                answer = line = await self._hear()
                # Only now: qemu-io looks at a second line of input only when a third comes.
                await self._say(f"help {_MARK}")
                while line and _MARK not in (line := await self._hear()):
                    answer += line
        except (BrokenPipeError, ConnectionResetError):
            return ""
        return answer

    async def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n".encode())
        await self._child.stdin.drain()

    async def _hear(self) -> str:
        assert self._child.stdout is not None
        return (await self._child.stdout.readline()).decode()


_MARK = "no-such-command"


@contextlib.asynccontextmanager
async def session(
    info: Mapping[str, Any],
    folder: pathlib.Path,
    *,
    initiator: str = volumes.INITIATOR,
    read_only: bool = False,
) -> AsyncIterator[Session]:
    """A session by the connection info that initialize_connection gave.

    Raises:
        ConnectionError: the target does not let the client in.
    """
    tgtd.require_program("qemu-io", "stdbuf")
    # Line by line, though it is no terminal that it prints to.
    argv = [
        "stdbuf",
        "-oL",
        "qemu-io",
        *(["-r"] if read_only else []),
        *_image(info, folder, initiator),
    ]
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    made = Session(child)
    try:
        if not await made.is_open():
            raise ConnectionError("the target does not let the client in")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        # To its end, so that the pipes are closed with it.
        await child.communicate()


async def gets_in(
    info: Mapping[str, Any],
    folder: pathlib.Path,
    *,
    initiator: str = volumes.INITIATOR,
    read_only: bool = False,
) -> bool:
    """Whether a client gets in by a connection info."""
    try:
        async with session(info, folder, initiator=initiator, read_only=read_only):
            return True
    except ConnectionError:
        return False


def _image(info: Mapping[str, Any], folder: pathlib.Path, initiator: str) -> list[str]:
    data = info["data"]
    match info["driver_volume_type"]:
        case "nbd":
            return ["-f", "raw", data["uri"]]
        case "iscsi":
            assert data["auth_method"] == "CHAP"
            secret = folder / f"secret-{uuid.uuid4().hex}"
            secret.touch(0o600)
            secret.write_text(data["auth_password"])
            options = {
                "driver": "raw",
                "file.driver": "iscsi",
                "file.transport": "tcp",
                "file.portal": data["target_portal"],
                "file.target": data["target_iqn"],
                "file.lun": data["target_lun"],
                "file.user": data["auth_username"],
                "file.password-secret": "secret",
                "file.initiator-name": initiator,
            }
            joined = ",".join(f"{name}={value}" for name, value in options.items())
            return ["--object", f"secret,id=secret,file={secret}", "--image-opts", joined]
        case other:
            raise AssertionError(f"no client for {other}")
