"""A connection that is closed while it is used."""

from typing import Any, cast

import aio_pika.abc
import pydantic
import pytest

from messages import errors, frames, link


class Closed:
    """A connection as aio-pika has it once it is closed."""

    async def channel(self, **_: Any) -> None:
        raise RuntimeError(f"{self!r} closed")


async def test_a_connection_that_was_closed_meanwhile_counts_as_away() -> None:
    """It once ended the worker: nobody had thought of a RuntimeError."""
    closed = cast("aio_pika.abc.AbstractConnection", Closed())
    with pytest.raises(link.AWAY):
        await link.open_channel(closed)


class ClosedChannel:
    """A channel whose connection was closed along with it."""

    is_closed = True

    async def reopen(self) -> None:
        raise RuntimeError("<Connection> closed")


async def test_what_is_published_over_a_closed_connection_was_not_sent() -> None:
    publisher = link.Publisher(pydantic.SecretStr("amqp://nobody.invalid/"), "test")
    publisher._channel = cast("aio_pika.abc.AbstractChannel", ClosedChannel())
    publisher.link._up.set()  # the end of its connection was not noticed yet
    message = link.Outgoing(frames.Plain(b"{}", "m"), "", "q", mandatory=False)
    [error] = await publisher.publish_all([message])
    assert isinstance(error, errors.Unreachable)
