"""Requests that wait at an address before a worker comes, and the replies to them."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator

import aio_pika
import aio_pika.abc

from bench import hosts

UNCONFIRMED = 256
"""Requests that are published at a time."""
IDLE = 120.0
"""Seconds without a reply after which it is given up."""
AFTERWARDS = 2.0
"""Seconds in which a second reply to anything would come."""


class Replies:
    """Counts replies.

    Attributes:
        copies: how many came again as they were: the contract lets a caller drop these.
        others: how many came besides, and must not.
        failed: how many said that the job had failed.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.others = 0
        self.failed = 0
        self._waiting: set[str] = set()
        self._answers: dict[str, str | None] = {}
        self._came = asyncio.Event()
        self._times: list[float] = []

    def expect(self, identity: str) -> None:
        """A request was sent."""
        self._waiting.add(identity)

    async def take(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """A reply has come."""
        identity = str(message.correlation_id)
        if identity in self._waiting:
            self._waiting.remove(identity)
            self._answers[identity] = message.message_id
            self._times.append(time.monotonic())
            self.failed += not json.loads(message.body)["ok"]
        elif self._answers.get(identity) == message.message_id:
            self.copies += 1
        else:
            self.others += 1
        self._came.set()

    async def wait_for(self, count: int) -> None:
        """Waits until ``count`` requests are answered."""
        while len(self._answers) < count:
            self._came.clear()
            try:
                async with asyncio.timeout(IDLE):
                    await self._came.wait()
            except TimeoutError:
                raise SystemExit(f"{len(self._waiting)} requests are not answered") from None

    def rate(self) -> float:
        """Replies per second, from the first to the last."""
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    def told(self) -> str:
        """Whether each request was answered once."""
        wrong = self.others + self.failed + len(self._waiting)
        return (
            f"{len(self._answers):,} answered, {'NOT as they must be' if wrong else 'each once'}:"
            f" {len(self._waiting)} missing, {self.others} second answers, {self.failed} failed,"
            f" {self.copies} copies of the same answer"
        )


@contextlib.asynccontextmanager
async def published(site: hosts.Site, address: str, count: int) -> AsyncIterator[Replies]:
    """Publishes ``count`` requests to create a volume; the block gets what counts the replies."""
    connection = await aio_pika.connect(site.broker_url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        queue = await channel.declare_queue(exclusive=True)
        replies = Replies()
        await queue.consume(replies.take, no_ack=True)
        exchange = await channel.get_exchange(site.names.requests, ensure=False)
        for begin in range(0, count, UNCONFIRMED):
            batch = [_request(queue.name) for _ in range(min(UNCONFIRMED, count - begin))]
            for message in batch:
                replies.expect(str(message.correlation_id))
            await asyncio.gather(
                *(exchange.publish(message, address, mandatory=True) for message in batch)
            )
        yield replies
        await asyncio.sleep(AFTERWARDS)


def _request(reply_to: str) -> aio_pika.Message:
    identity = str(uuid.uuid4())
    arguments = {"volume": {"name": identity, "size_bytes": 1 << 30}}
    body = {"method": "create_volume", "version": "1.0", "args": arguments}
    return aio_pika.Message(
        json.dumps(body).encode(),
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=identity,
        correlation_id=identity,
        reply_to=reply_to,
    )
