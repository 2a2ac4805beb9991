"""The NBD target's configuration."""

import base64
import pathlib
from typing import Any

import pydantic
import pytest

from messages import errors
from worker import process
from worker.targets import base, nbd, nbd_keys, nbd_options


def options(**given: Any) -> nbd_options.Options:
    return nbd_options.Options(**given)


def test_the_default_is_loopback() -> None:
    assert str(options().listen) == "127.0.0.1:10809"
    assert options().address == options().listen


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:1", "::1", 1),
        ("localhost:65535", "localhost", 65535),
        ("127.0.0.9:9", "127.0.0.9", 9),
    ],
)
def test_a_listen_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert options(target_listen=text).listen == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:",
        ":10809",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:x",
        "::1:10809",
        "[::1]",
        "[x]:1",
        "a b:1",
        "*:10809",
        "a,b=c:1",
        "127.0.0.1:1 ",
        "h/x:1",
    ],
)
def test_what_is_no_listen_address_is_refused(text: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="target_listen"):
        options(target_listen=text)


@pytest.mark.parametrize("host", ["192.0.2.1", "storage-1", "[2001:db8::1]"])
def test_listening_off_loopback_needs_tls_or_consent(host: str) -> None:
    listen = f"{host}:10809"
    with pytest.raises(
        pydantic.ValidationError, match='set target_tls = "psk", or target_insecure'
    ):
        options(target_listen=listen)
    assert options(target_listen=listen, target_tls="psk").target_tls == "psk"
    assert options(target_listen=listen, target_insecure=True).target_insecure


@pytest.mark.parametrize("listen", ["0.0.0.0:10809", "[::]:10809"])
def test_a_wildcard_needs_an_address_for_connections(listen: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="set target_address"):
        options(target_listen=listen, target_insecure=True)
    given = options(target_listen=listen, target_insecure=True, target_address="192.0.2.7")
    assert given.address == ("192.0.2.7", 10809)
    # An address does not make a wildcard safe.
    with pytest.raises(pydantic.ValidationError, match="target_insecure"):
        options(target_listen=listen, target_address="192.0.2.7")


@pytest.mark.parametrize(
    ("given", "host"), [("[2001:db8::7]", "2001:db8::7"), ("2001:db8::7",) * 2]
)
def test_an_ipv6_target_address_may_stand_in_brackets(given: str, host: str) -> None:
    made = options(target_address=given)
    assert made.address.host == host
    assert str(made.address) == "[2001:db8::7]:10809"


@pytest.mark.parametrize("address", ["a b", "nbd://x", "", "192.0.2.1:10809"])
def test_what_is_no_target_address_is_refused(address: str) -> None:
    with pytest.raises(pydantic.ValidationError):
        options(target_address=address, target_listen="0.0.0.0:1", target_insecure=True)


def test_x509_says_that_it_is_not_there_yet() -> None:
    with pytest.raises(pydantic.ValidationError, match="not supported yet"):
        options(target_tls="x509")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="target_lisen"):
        options(target_lisen="127.0.0.1:1")


@pytest.mark.parametrize(
    "connector", [{}, {"host": ""}, {"host": " "}, {"host": None}, {"host": 7}]
)
def test_a_connector_needs_a_host(connector: dict[str, Any], tmp_path: pathlib.Path) -> None:
    context = base.Context("host-a", "fast", options(), process.Executor(), tmp_path)
    target = nbd.NbdTarget(context)
    with pytest.raises(errors.InvalidConnector, match="host"):
        target.validate_connector(connector)
    target.validate_connector({"host": "client"})


def test_the_prime_is_the_one_of_rfc_7919() -> None:
    lines = nbd_keys.DH_PARAMETERS.splitlines()
    encoded = base64.b64decode(b"".join(lines[1:-1]))
    # A sequence of two integers: the prime of 256 bytes after a zero, and the generator 2.
    prime = int.from_bytes(encoded[9:-3])
    assert encoded[-3:] == bytes.fromhex("020102")
    assert prime == 2**2048 - 2**1984 + (_e_times_2_to(1918) + 560316) * 2**64 - 1


def _e_times_2_to(exponent: int) -> int:
    term = total = 1 << (exponent + 64)
    divisor = 1
    while term:
        term //= divisor
        total += term
        divisor += 1
    return total >> 64
