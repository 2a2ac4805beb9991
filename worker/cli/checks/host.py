"""This host: the folder of the worker's state, and the port that it tells its health on."""

import asyncio
import contextlib
import json
import os
import pathlib
import pwd
import socket

from worker import settings
from worker.cli.checks import finding


async def look(configured: settings.Settings) -> list[finding.Finding]:
    """Findings about what all backends of this host share."""
    return [
        await asyncio.to_thread(_state_dir, configured.state_dir),
        await _http(configured.http_listen),
    ]


def _state_dir(path: pathlib.Path) -> finding.Finding:
    try:
        found = path.stat()
    except FileNotFoundError:
        return _parent(path)
    except OSError as error:
        return finding.fail("state_dir", f"{path} cannot be used: {error.strerror}")
    if not path.is_dir():
        return finding.fail("state_dir", f"{path} is no directory")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return finding.fail(
            "state_dir", f"{path} cannot be written by {_user(os.geteuid())}: give it to that user"
        )
    if found.st_uid != os.geteuid():
        owner = _user(found.st_uid)
        return finding.warn(
            "state_dir", f"{path} is {owner}'s: run this as {owner}, to see what the worker sees"
        )
    return finding.ok("state_dir", f"{path} can be written")


def _parent(path: pathlib.Path) -> finding.Finding:
    above = next(parent for parent in path.parents if parent.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return finding.ok("state_dir", f"{path} is made by the first volume-worker run")
    return finding.fail(
        "state_dir", f"{path} is not there and cannot be made in {above}: make it, or set state_dir"
    )


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


async def _http(listen: str) -> finding.Finding:
    if not listen:
        return finding.ok("http_listen", "off: no /livez and /readyz")
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        return finding.fail("http_listen", f"{listen!r} must be HOST:PORT")
    if (reason := bind_error(host, int(port))) is None:
        return finding.ok("http_listen", f"{listen} is free")
    if ready := await _ask(host, int(port)):
        return ready
    return finding.fail("http_listen", f"{listen} cannot be listened on: {reason}")


def bind_error(host: str, port: int) -> str | None:
    """Why a TCP address cannot be listened on, or None."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


async def _ask(host: str, port: int) -> finding.Finding | None:
    """What a worker that runs here already says of itself; None where none does."""
    wildcard = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - asked, not bound
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(wildcard.get(host, host), port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = await reader.read(64 * 1024)
            finally:
                writer.close()
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        ready, checks = body["ready"], body["checks"]
    except (OSError, TimeoutError, ValueError, KeyError, TypeError):
        return None
    if ready:
        return finding.ok("worker", "runs on this host, and is ready")
    down = ", ".join(str(name) for name, up in checks.items() if not up)
    return finding.warn("worker", f"runs on this host, and is not ready: {down}")
