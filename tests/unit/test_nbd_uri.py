"""NBD URIs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import errors
from worker.nbd import uri as uris


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("nbd://10.0.0.1:10810/volume-1", ("volume-1", None, "10.0.0.1", 10810)),
        ("nbd://storage.example/", ("", None, "storage.example", 10809)),
        ("nbd://storage.example", ("", None, "storage.example", 10809)),
        ("nbd://[::1]:77/a%2Fb/c%20d", ("a/b/c d", None, "::1", 77)),
        ("nbd://h:1//leading", ("/leading", None, "h", 1)),
        ("nbd+unix:///e?socket=/run/nbd.sock", ("e", "/run/nbd.sock", "", 0)),
        ("nbd+unix:///?socket=/run/a%20b%26c", ("", "/run/a b&c", "", 0)),
        ("nbd+unix:///%C3%A9?socket=/s", ("é", "/s", "", 0)),
    ],
)
def test_a_uri_names_a_server_and_an_export(uri: str, expected: tuple[object, ...]) -> None:
    assert uris.parse(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/dev/sda",
        "nbds://host/export",
        "nbd://host:port/export",
        "nbd://host:99999/export",
        "nbd://[::1/export",
        "nbd:///export",
        "nbd+unix:///export",
        "nbd+unix://host/export?socket=/s",
        "http://host/export",
    ],
)
def test_anything_else_is_refused(uri: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        uris.parse(uri)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


@given(export=NAMES, port=st.integers(1, 65535))
@pytest.mark.parametrize("host", ["10.0.0.1", "storage.example", "::1", "fe80::1%eth0"])
def test_a_tcp_uri_is_read_back(host: str, port: int, export: str) -> None:
    assert uris.parse(uris.tcp_uri(host, port, export)) == (export, None, host, port)


@given(export=NAMES, socket=NAMES.filter(bool))
def test_a_unix_uri_is_read_back(export: str, socket: str) -> None:
    assert uris.parse(uris.unix_uri(socket, export)) == (export, socket, "", 0)


def test_a_tls_uri_names_the_user() -> None:
    assert uris.tcp_uri("::1", 77, "a b", tls_user="c-1") == "nbds://c-1@[::1]:77/a%20b"
