"""Publishing many messages in one write.

aio-pika publishes one message at a time: each waits for a lock, for the socket and for its
confirm. Here whatever is published in the same turn of the event loop goes out in one write, and
each message gets its own confirm, in whatever order these come. The channel must be published to by
this alone.
"""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Iterable
from typing import Final

import aio_pika
import aio_pika.abc
import aiormq
from aiormq import spec
from aiormq.abc import ChannelFrame

from messages import frames

Confirm = asyncio.Future[object]

GONE: Final = "the channel was closed before the broker confirmed"


class Unencodable(Exception):
    """A message that AMQP has no form for."""


class Wire:
    """The publishing side of a channel with publisher confirms and ``on_return_raises``."""

    def __init__(self, channel: aiormq.abc.AbstractChannel) -> None:
        assert isinstance(channel, aiormq.Channel)
        self._channel = channel
        self._unconfirmed: set[Confirm] = set()
        self._gathered: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None
        channel.closing.add_done_callback(self._closed)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be published any more."""
        return self._channel.is_closed

    def publish(
        self, message: frames.Message, *, exchange: str, routing_key: str, mandatory: bool
    ) -> Confirm:
        """Sends a message at the end of this turn; the future ends with the broker's confirm.

        Its errors are ``PublishError`` for a mandatory message that no queue is bound for,
        ``DeliveryError`` for one that the broker refused, :class:`Unencodable`, and what has closed
        the channel.

        Raises:
            ChannelInvalidStateError: the channel is closed.
        """
        channel = self._channel
        if channel.is_closed:
            raise aiormq.exceptions.ChannelInvalidStateError(GONE)
        if mandatory and not message.message_id:
            # By which aiormq knows what was returned.
            message.message_id = str(uuid.uuid4())
        confirm: Confirm = asyncio.get_running_loop().create_future()
        try:
            # First what can fail: a delivery tag once counted must go out.
            data = frames.publish(
                message,
                exchange,
                routing_key,
                mandatory=mandatory,
                channel=channel.number,
                most=channel.max_content_size,
            )
        except Exception as error:
            confirm.set_exception(Unencodable(f"{type(error).__name__}: {error}"))
            return confirm
        channel.delivery_tag += 1
        tag = channel.delivery_tag
        channel.confirmations[tag] = confirm
        if mandatory:
            channel.message_id_delivery_tag[str(message.message_id)] = tag
        self._unconfirmed.add(confirm)
        confirm.add_done_callback(functools.partial(self._confirmed, message.message_id, tag))
        self._gathered.append(data)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return confirm

    async def _write(self) -> None:
        # Begins after the turn in which the first message came.
        while self._gathered:
            data, self._gathered = b"".join(self._gathered), []
            await self._channel.write_queue.put(ChannelFrame(data, should_close=False))
        self._writing = None

    def _confirmed(self, message_id: str | None, tag: int, confirm: Confirm) -> None:
        self._unconfirmed.discard(confirm)
        tags = self._channel.message_id_delivery_tag
        if message_id and tags.get(message_id) == tag:
            del tags[message_id]
        if not confirm.cancelled():
            # Who waited for it may have given up, and nobody else looks at its error.
            confirm.exception()

    def _closed(self, closing: "asyncio.Future[object]") -> None:
        if self._writing is not None:
            self._writing.cancel()
        reason = None if closing.cancelled() else closing.exception()
        for confirm in list(self._unconfirmed):
            if not confirm.done():
                confirm.set_exception(reason or aiormq.exceptions.ChannelInvalidStateError(GONE))


async def acknowledge(messages: Iterable[aio_pika.abc.AbstractIncomingMessage]) -> None:
    """Acknowledges messages, those of one channel in one write.

    A message of a channel that is closed by now is left out: it comes again.
    """
    tags: dict[aiormq.Channel, list[int]] = {}
    for message in messages:
        # To ask for a channel that is closed is an error already.
        with contextlib.suppress(aiormq.exceptions.ChannelInvalidStateError):
            channel = message.channel
            assert isinstance(channel, aiormq.Channel)
            if not channel.is_closed and message.delivery_tag is not None:
                tags.setdefault(channel, []).append(message.delivery_tag)
    for channel, of_it in tags.items():
        acks = [spec.Basic.Ack(delivery_tag=tag) for tag in of_it]
        await channel.write_queue.put(
            ChannelFrame.marshall(channel_number=channel.number, frames=acks)
        )
