"""NBD URIs (the NBD project's doc/uri.md)."""

import urllib.parse
from typing import Final, NamedTuple

from messages import errors

DEFAULT_PORT: Final = 10809


class Location(NamedTuple):
    """Where an export is: on a unix socket, or at a host and port."""

    export: str
    socket: str | None
    host: str
    port: int

    @property
    def server(self) -> str:
        """The server, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.socket or f"{host}:{self.port}"


def parse(uri: str) -> Location:
    """Reads ``nbd://HOST[:PORT]/EXPORT`` or ``nbd+unix:///EXPORT?socket=PATH``; no TLS.

    The export's name is what follows the first ``/`` of the path, percent-decoded.

    Raises:
        InvalidRequest: it is neither.
    """
    try:
        parts = urllib.parse.urlsplit(uri)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise errors.InvalidRequest(f"{uri} is not an NBD URI: {error}", uri=uri) from error
    export = urllib.parse.unquote(parts.path.removeprefix("/"))
    if parts.scheme == "nbd" and host:
        return Location(export, None, urllib.parse.unquote(host), port or DEFAULT_PORT)
    if parts.scheme == "nbd+unix" and not parts.netloc:
        sockets = urllib.parse.parse_qs(parts.query).get("socket", [])
        if len(sockets) == 1:
            return Location(export, sockets[0], "", 0)
    raise errors.InvalidRequest(
        f"{uri} is neither nbd://HOST:PORT/EXPORT nor nbd+unix:///EXPORT?socket=PATH", uri=uri
    )


def tcp_uri(host: str, port: int, export: str, *, tls_user: str | None = None) -> str:
    """The URI of an export on a TCP port; for TLS with a pre-shared key with the key's name."""
    quoted = urllib.parse.quote(host, safe=":")
    bracketed = f"[{quoted}]" if ":" in host else quoted
    scheme = "nbd://" if tls_user is None else f"nbds://{urllib.parse.quote(tls_user)}@"
    return f"{scheme}{bracketed}:{port}/{urllib.parse.quote(export)}"


def unix_uri(socket: str, export: str) -> str:
    """The URI of an export on a unix socket."""
    return f"nbd+unix:///{urllib.parse.quote(export)}?socket={urllib.parse.quote(socket)}"
