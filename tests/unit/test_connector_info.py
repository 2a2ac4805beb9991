"""How connectors read a connection info: strict, clear, and silent about secrets."""

from typing import Any

import pytest

from messages import errors
from worker.connectors import connection_info, iscsi, nbd

SECRET = "wrong:secret-nobody-may-see"

ISCSI: dict[str, Any] = {
    "target_portal": "192.0.2.1:3260",
    "target_iqn": "iqn.2010-10.org.openstack:volume-1",
    "target_lun": 1,
}
NBD: dict[str, Any] = {"host": "192.0.2.1", "port": 10809, "export": "e", "uri": "nbd://…"}
TLS: dict[str, Any] = {"type": "psk", "username": "c-1", "psk_key": "ab" * 32}


@pytest.mark.parametrize(
    "portal",
    [
        "192.0.2.1:3260",
        "[2001:db8::1]:3260",
        "[::1]:1",
        "storage-1.example.org:65535",
        "localhost:3260",
    ],
)
def test_a_portal_is_a_host_and_a_port(portal: str) -> None:
    assert iscsi.check_portal(portal) == portal


@pytest.mark.parametrize(
    "portal",
    [
        "",
        "192.0.2.1",
        "192.0.2.1:",
        ":3260",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "192.0.2.1:x",
        "::1:3260",
        "[::1]",
        "[nonsense]:3260",
        "a b:3260",
        "192.0.2.1:3260 ",
        "h:3260\n",
        "h:٣",
        "192.0.2.1:3260,1",
        "192.0.2.1:3260;192.0.2.2:3260",
        "h,x=y:3260",
    ],
)
def test_what_is_no_portal_is_refused(portal: str) -> None:
    with pytest.raises(errors.InvalidConnector, match="target_portal"):
        connection_info.parse(iscsi.Info, {**ISCSI, "target_portal": portal})


@pytest.mark.parametrize(
    "name",
    [
        "iqn.2010-10.org.openstack:volume-1",
        "iqn.1993-08.org.debian:01:abc",
        "iqn.2026-11.x",
        "eui.02004567A425678D",
        "naa.52004567BA64678D",
        "naa.62004567BA64678D0123456789ABCDEF",
    ],
)
def test_an_iscsi_name_is_as_rfc_7143_has_it(name: str) -> None:
    assert iscsi.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "volume-1",
        "iqn.2010-13.org.x:a",
        "iqn.2010-10",
        "iqn.2010-10.org.x:a b",
        "eui.12",
        "iqn.2010-10.org.x:a\n",
        "iqn.2010-10.org.x:a,b",
        "iqn.2010-10.org.x:" + "a" * 210,
    ],
)
def test_what_is_no_iscsi_name_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidConnector, match="target_iqn"):
        connection_info.parse(iscsi.Info, {**ISCSI, "target_iqn": name})


@pytest.mark.parametrize("lun", ["1", -1, None, 1.5, True, 16384])
def test_a_lun_is_a_number(lun: Any) -> None:
    with pytest.raises(errors.InvalidConnector, match="target_lun"):
        connection_info.parse(iscsi.Info, {**ISCSI, "target_lun": lun})


@pytest.mark.parametrize("member", list(ISCSI))
def test_each_member_is_required(member: str) -> None:
    data = {name: value for name, value in ISCSI.items() if name != member}
    with pytest.raises(errors.InvalidConnector, match=f"{member}: Field required"):
        connection_info.parse(iscsi.Info, data)


def test_members_that_others_add_are_ignored() -> None:
    info = connection_info.parse(iscsi.Info, {**ISCSI, "target_discovered": False, "qos": None})
    assert info.target_lun == 1


@pytest.mark.parametrize("missing", ["auth_username", "auth_password"])
def test_chap_needs_a_name_and_a_secret(missing: str) -> None:
    data = {**ISCSI, "auth_method": "CHAP", "auth_username": "u", "auth_password": SECRET}
    with pytest.raises(errors.InvalidConnector, match="CHAP needs") as caught:
        connection_info.parse(iscsi.Info, {**data, missing: None})
    assert SECRET not in repr(caught.value)


def test_an_unknown_auth_method_is_refused() -> None:
    with pytest.raises(errors.InvalidConnector, match="auth_method"):
        connection_info.parse(iscsi.Info, {**ISCSI, "auth_method": "KRB5"})


@pytest.mark.parametrize(
    ("member", "value"),
    [("auth_password", [SECRET]), ("auth_password", SECRET * 20), ("target_iqn", SECRET)],
)
def test_a_wrong_value_is_not_shown(member: str, value: Any) -> None:
    data = {**ISCSI, "auth_method": "CHAP", "auth_username": "u", "auth_password": SECRET}
    with pytest.raises(errors.InvalidConnector, match=member) as caught:
        connection_info.parse(iscsi.Info, {**data, member: value})
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize("host", ["192.0.2.1", "::1", "fe80::1%eth0", "storage-1.example.org"])
def test_an_nbd_host_is_a_name_or_an_address(host: str) -> None:
    assert connection_info.parse(nbd.Info, {**NBD, "host": host}).host == host


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("host", ""),
        ("host", "a/b"),
        ("host", "a b"),
        ("host", None),
        ("port", 0),
        ("port", "10809"),
        ("port", 65536),
        ("export", ""),
        ("export", "x" * 4097),
        ("access_mode", "wo"),
    ],
)
def test_what_nbd_cannot_use_is_refused(member: str, value: Any) -> None:
    with pytest.raises(errors.InvalidConnector, match=member):
        connection_info.parse(nbd.Info, {**NBD, member: value})


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("type", "x509"),
        ("username", "a:b"),
        ("username", "a\nb:c"),
        ("psk_key", SECRET),
        ("psk_key", "abc"),
        ("psk_key", None),
    ],
)
def test_tls_credentials_that_could_forge_a_line_are_refused(member: str, value: Any) -> None:
    with pytest.raises(errors.InvalidConnector, match=rf"tls\.{member}") as caught:
        connection_info.parse(nbd.Info, {**NBD, "tls": {**TLS, member: value}})
    assert SECRET not in repr(caught.value)


def test_a_read_only_connection_is_not_attached_for_writing() -> None:
    connection_info.check_access("ro", read_only=True)
    connection_info.check_access("rw", read_only=False)
    with pytest.raises(errors.InvalidConnector, match="read-only"):
        connection_info.check_access("ro", read_only=False)
