import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import redaction

SECRET = "s3cr3t-Hunter.2"


@pytest.mark.parametrize(
    "text",
    [
        f"iscsiadm -o update -n node.session.auth.password -v {SECRET}",
        f"iscsiadm -o update -n node.session.auth.password --value {SECRET}",
        f"iscsiadm --name node.session.auth.password --value={SECRET}",
        f"tgtadm --op new --mode account --user u --password {SECRET}",
        f"tgtadm --op new --mode account --user u --password={SECRET}",
        f"{['-n', 'node.session.auth.password', '-v', SECRET]}",
        f"{['tgtadm', '--password', SECRET]}",
        f"set password {SECRET}",
        f"the PASSWORD: {SECRET}",
        json.dumps({"auth_password": SECRET, "next": 1}),
        json.dumps({"data": json.dumps({"auth_password": SECRET})}),
        f"{ {'auth_password': SECRET} }",
        f"auth_password='{SECRET} with words'",
        f'auth_password="{SECRET} it\'s {SECRET}"',
        f"user=u,password={SECRET},lun=1",
        f"CHAP secret {SECRET} refused",
        f"amqp://guest:{SECRET}@127.0.0.1:5672/",
        f"postgresql://postgres:{SECRET}@db/volume_worker",
        f"cannot open iscsi://user%{SECRET}@127.0.0.1:3260/iqn.x:a/1",
        f"lease_token=5 auth_token={SECRET}",
        f"token: 1, private_key={SECRET}",
    ],
)
def test_a_value_is_masked_for_the_name_it_carries(text: str) -> None:
    masked = redaction.mask_text(text)
    assert SECRET not in masked
    assert redaction.MASK in masked


@pytest.mark.parametrize(
    "text",
    [
        "",
        "iscsiadm: No records found",
        "tgtadm: can't find the target",
        "driver=iscsi,user=u,password-secret=sec0,lun=1",
        "nbd://127.0.0.1:10809/volume-1",
        "http://127.0.0.1:8776/metrics",
        "time 12:30:05 at host:port",
        "is the password right?",
    ],
)
def test_text_without_a_secret_stays_readable(text: str) -> None:
    masked = redaction.mask_text(text)
    assert masked == text.replace("password right?", "password ***")


@given(before=st.text(), secret=st.text(min_size=1), after=st.text())
def test_a_known_secret_shows_nowhere(before: str, secret: str, after: str) -> None:
    masked = redaction.mask_text(f"{before}{secret}{after}", [secret])
    # What is made of stars only may stand for itself.
    assert secret not in masked.replace(redaction.MASK, "")


def test_a_secret_that_holds_another_is_masked_as_a_whole() -> None:
    assert redaction.mask_text("abcdef", ["cd", "abcdef", ""]) == "***"


@given(st.text())
def test_masking_twice_is_masking_once(text: str) -> None:
    once = redaction.mask_text(text)
    assert redaction.mask_text(once) == once


@pytest.mark.parametrize(
    "piece",
    [
        "e",
        "a.",
        "a-",
        "a:",
        "'",
        '\\"',
        " ",
        "a://b:",
        "secret:",
        "token\t",
        "--value ",
        "password",
        "password ",
        "password=",
        'password"',
        "password -v ",
    ],
)
def test_masking_a_mebibyte_takes_no_time_to_speak_of(piece: str) -> None:
    """What a program prints is its own choice; the event loop must not stand still for it."""
    text = piece * (2**20 // len(piece))
    before = time.perf_counter()
    redaction.mask_text(text)
    assert time.perf_counter() - before < 2


def test_members_named_like_secrets_are_masked_at_any_depth() -> None:
    tree = {
        "auth_password": SECRET,
        "auth_username": "u",
        "lease_token": 7,
        "nested": [{"Secret": SECRET}, ({"psk_key": {"a": SECRET}},)],
        "token": None,
    }
    assert redaction.mask_tree(tree) == {
        "auth_password": "***",
        "auth_username": "u",
        "lease_token": 7,
        "nested": [{"Secret": "***"}, [{"psk_key": "***"}]],
        "token": None,
    }
    assert tree["auth_password"] == SECRET


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.just(SECRET),
        lambda child: st.lists(child) | st.dictionaries(st.text(), child),
    )
)
def test_a_member_named_like_a_secret_never_keeps_its_value(value: object) -> None:
    assert SECRET not in json.dumps(redaction.mask_tree({"auth_password": value}))
