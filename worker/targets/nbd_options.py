"""The NBD target's configuration: where it listens, and what it demands of who listens in."""

import ipaddress
import re
from typing import Annotated, Literal, NamedTuple

import pydantic

from worker.targets import base

_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class Address(NamedTuple):
    """A TCP address; an IPv6 host is without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Address:
    """Reads ``HOST:PORT``.

    Raises:
        ValueError: it is not that; an IPv6 address has to stand in brackets.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError("must be HOST:PORT with a port from 1 to 65535")
    return Address(_host(host, bracketed=True), int(port))


def _host(text: str, *, bracketed: bool) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        if bracketed and bare == text:
            raise ValueError("an IPv6 address must stand in brackets, such as [::1]:10809")
        return str(ipaddress.IPv6Address(bare))
    if bare != text or not _HOST_NAME.fullmatch(bare):
        raise ValueError(f"{text!r} is neither an address nor a host name")
    return bare


def _checked_listen(text: str) -> str:
    parse_listen(text)
    return text


class Options(base.Options):
    """Options of the NBD target."""

    target_listen: Annotated[str, pydantic.AfterValidator(_checked_listen)] = pydantic.Field(
        "127.0.0.1:10809", description="HOST:PORT where the target serves; IPv6 in brackets"
    )
    target_tls: Literal["psk", "x509"] | None = pydantic.Field(
        None, description="psk: a key of its own for each connection"
    )
    target_insecure: bool = pydantic.Field(
        default=False,
        description="allow to serve off loopback without TLS, to whoever reaches the port",
    )

    @property
    def listen(self) -> Address:
        """Where the server listens."""
        return parse_listen(self.target_listen)

    @property
    def address(self) -> Address:
        """What connections carry."""
        listen = self.listen
        given = self.target_address
        return Address(_host(given, bracketed=False), listen.port) if given else listen

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Options":
        host = self.listen.host
        if self.target_tls == "x509":
            raise ValueError('target_tls = "x509" is not supported yet; use "psk"')
        if self.target_address is not None:
            _host(self.target_address, bracketed=False)
        elif _is_wildcard(host):
            raise ValueError(
                f"target_listen {self.target_listen} is a wildcard: set target_address to what "
                "other hosts reach this one by"
            )
        if not (self.target_tls or self.target_insecure or _is_loopback(host)):
            raise ValueError(
                f"target_listen {self.target_listen} is off loopback, where anyone who reaches it "
                'can read and write every volume: set target_tls = "psk", or '
                "target_insecure = true if the network itself keeps others out"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
