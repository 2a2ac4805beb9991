"""Other people's NBD clients: qemu-io and nbdinfo."""

import asyncio
import json
import pathlib
from typing import NamedTuple


class Outcome(NamedTuple):
    """How a program ended."""

    code: int
    text: str


async def run(*argv: str | pathlib.Path) -> Outcome:
    """Runs a program; both its pipes together."""
    child = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), 30)
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    assert child.returncode is not None
    return Outcome(child.returncode, out.decode())


async def io(target: str | pathlib.Path, *commands: str, read_only: bool = False) -> Outcome:
    """Runs qemu-io's commands (write -P 7 0 64k, read -P …) on a URI or a file."""
    options = [option for command in commands for option in ("-c", command)]
    return await run("qemu-io", "-f", "raw", *(["-r"] if read_only else []), *options, str(target))


async def works(target: str | pathlib.Path, *commands: str, read_only: bool = False) -> bool:
    """Whether every command succeeded; a read whose pattern differs did not."""
    outcome = await io(target, *commands, read_only=read_only)
    return outcome.code == 0 and "failed" not in outcome.text


async def names(uri: str) -> list[str]:
    """The names of a server's exports; [] where the server is away."""
    outcome = await run("nbdinfo", "--json", "--list", uri)
    if outcome.code:
        return []
    return sorted(export["export-name"] for export in json.loads(outcome.text)["exports"])


async def size(uri: str) -> int:
    """The size of an export, in bytes."""
    outcome = await run("nbdinfo", "--size", uri)
    assert outcome.code == 0, outcome.text
    return int(outcome.text)


def psk_uri(uri: str, keys: pathlib.Path, username: str, key: str) -> str:
    """The URI with which libnbd finds the key."""
    keys.write_text(f"{username}:{key}\n")
    return f"{uri}?tls-psk-file={keys}"
