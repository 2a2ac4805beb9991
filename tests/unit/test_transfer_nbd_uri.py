"""NBD URIs."""

import pytest

from messages import errors
from worker.transfer import nbd_uri


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
    assert nbd_uri.parse(uri) == expected


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
        nbd_uri.parse(uri)
