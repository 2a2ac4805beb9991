"""Health over HTTP: ``/livez`` and ``/readyz``, for GET and HEAD only."""

import asyncio
import contextlib
import http
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import structlog

from messages import errors

log = structlog.get_logger(__name__)

REQUEST_TIMEOUT: Final = 5.0
MAX_REQUEST: Final = 8 * 1024

Checks = Callable[[], Mapping[str, bool]]


class Server:
    """Answers the two paths.

    Args:
        checks: what has to be true for the worker to be ready, by name.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    @contextlib.asynccontextmanager
    async def serve(self, listen: str) -> AsyncIterator[None]:
        """Serves on ``HOST:PORT`` for as long as the block runs; an empty text serves nothing.

        Raises:
            InvalidRequest: the address cannot be listened on.
        """
        if not listen:
            yield
            return
        host, _, port = listen.rpartition(":")
        try:
            server = await asyncio.start_server(
                self._answer, host.strip("[]"), int(port), limit=MAX_REQUEST
            )
        except (OSError, ValueError, OverflowError) as error:
            raise errors.InvalidRequest(
                f"http_listen {listen!r} cannot be listened on: {error}"
            ) from None
        async with server:
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that does not speak HTTP is let go
        finally:
            writer.close()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        status, body = self._route(method, path)
        text = json.dumps(body).encode() + b"\n"
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
            "Connection: close",
            "",
            "",
        )
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else text)

    def _route(self, method: str, path: str) -> tuple[http.HTTPStatus, Mapping[str, object]]:
        if method not in ("GET", "HEAD"):
            return http.HTTPStatus.METHOD_NOT_ALLOWED, {"error": "GET only"}
        match path:
            case "/livez":
                return http.HTTPStatus.OK, {"live": True}
            case "/readyz":
                checks = dict(self._checks())
                ready = all(checks.values())
                status = http.HTTPStatus.OK if ready else http.HTTPStatus.SERVICE_UNAVAILABLE
                return status, {"ready": ready, "checks": checks}
            case _:
                return http.HTTPStatus.NOT_FOUND, {"error": "/livez or /readyz"}
