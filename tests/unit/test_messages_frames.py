"""A publish on the wire, read back by pamqp, which others' clients use too."""

from collections.abc import Sequence
from typing import Any, cast

import aio_pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from messages import frames

CHANNEL = 7
MOST = 100

TEXTS = st.none() | st.text(st.characters(codec="utf-8"), max_size=60)
TABLES = st.dictionaries(
    st.text(st.characters(codec="ascii"), min_size=1, max_size=20),
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text(max_size=20),
    max_size=4,
)


def _read(data: bytes) -> Sequence[Any]:
    """The frames in some bytes."""
    found = []
    while data:
        length, channel, one = frame.unmarshal(data)
        assert channel == CHANNEL
        found.append(one)
        data = data[length:]
    return found


def _encoded(message: frames.Message, *, mandatory: bool = True) -> Sequence[Any]:
    data = frames.publish(
        message, "an.exchange", "host-a@fast", mandatory=mandatory, channel=CHANNEL, most=MOST
    )
    return _read(data)


def _properties(properties: commands.Basic.Properties) -> dict[str, Any]:
    # Without those that say the same where they are left away.
    return {
        name: value
        for name, value in properties
        if value not in (None, "", {}) and (name, value) != ("priority", 0)
    }


@given(
    data=st.binary(max_size=3 * MOST),
    mandatory=st.booleans(),
    mode=st.sampled_from(aio_pika.DeliveryMode),
    texts=st.fixed_dictionaries(
        dict.fromkeys(("content_type", "correlation_id", "reply_to", "message_id", "type"), TEXTS)
    ),
    headers=TABLES,
    rare=st.sampled_from(
        [
            {},
            {"priority": 3},
            {"expiration": 5},
            {"timestamp": 1},
            {"app_id": "a"},
            {"user_id": "u"},
            {"content_encoding": "gzip"},
        ]
    ),
)
def test_what_is_sent_is_read_back_whatever_it_holds(
    data: bytes,
    mandatory: bool,
    mode: aio_pika.DeliveryMode,
    texts: dict[str, Any],
    headers: dict[str, Any],
    rare: dict[str, Any],
) -> None:
    message = aio_pika.Message(data, delivery_mode=mode, headers=headers, **texts, **rare)
    publish, head, *bodies = _encoded(message, mandatory=mandatory)
    assert isinstance(publish, commands.Basic.Publish)
    assert (publish.exchange, publish.routing_key) == ("an.exchange", "host-a@fast")
    assert (publish.mandatory, publish.immediate) == (mandatory, False)
    assert isinstance(head, header.ContentHeader)
    assert head.body_size == len(data)
    wanted = _read(
        frame.marshal(header.ContentHeader(properties=message.properties, body_size=0), CHANNEL)
    )[0]
    assert _properties(head.properties) == _properties(wanted.properties)
    assert all(isinstance(one, body.ContentBody) and len(one.value) <= MOST for one in bodies)
    assert b"".join(one.value for one in bodies) == data


@given(text=st.text(st.characters(codec="utf-8"), max_size=60), kind=TEXTS)
def test_a_plain_message_is_persistent_json(text: str, kind: str | None) -> None:
    message = frames.Plain(b"{}", text, type=kind, correlation_id=text)
    as_general = aio_pika.Message(
        b"{}",
        message_id=text,
        type=kind,
        correlation_id=text,
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )
    assert _encoded(message)[1].properties == _encoded(as_general)[1].properties


@pytest.mark.parametrize("text", ["x" * 256, "\ud800"], ids=["too long", "no text"])
@pytest.mark.parametrize("name", ["correlation_id", "message_id", "type", "reply_to"])
def test_what_amqp_has_no_form_for_is_an_error(name: str, text: str) -> None:
    with pytest.raises((ValueError, UnicodeEncodeError)):
        _encoded(aio_pika.Message(b"", **cast("dict[str, Any]", {name: text})))


@pytest.mark.parametrize("rare", [{}, {"content_encoding": "gzip"}], ids=["common", "rare"])
def test_headers_are_sent_as_they_were_written(rare: dict[str, Any]) -> None:
    headers: dict[str, Any] = {
        "numbers": [0.1, 1e300, {"deep": -5e-324}, float("inf")],
        "n" * 255: 2**63 - 1,
        "none": None,
    }
    _, head = _encoded(aio_pika.Message(b"", headers=headers, **rare))
    assert head.properties.headers == headers


def test_properties_that_do_not_fit_into_a_frame_are_an_error() -> None:
    most = 131_072 - 8

    def header_frame(count: int) -> bytes:
        message = aio_pika.Message(b"", headers={"x": "h" * count})
        data = frames.publish(message, "", "", mandatory=False, channel=CHANNEL, most=most)
        return data[frame.unmarshal(data)[0] :]

    room = 131_072 - len(header_frame(0))
    assert len(header_frame(room)) == 131_072
    with pytest.raises(frames.TooLarge):
        header_frame(room + 1)
