"""A caller's letter box that outlives the broker: replies and events wait in it until looked at."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aio_pika
import aio_pika.abc

from tests.services import amqp


class Mailbox:
    """A durable queue; each look is a connection of its own, so none is lost with the broker."""

    def __init__(self, broker_url: str, namespace: str) -> None:
        self.queue = f"test-mailbox-{uuid.uuid4()}"
        self.replies: list[amqp.Reply] = []
        """What has come, in order."""
        self.events: list[amqp.Event] = []
        self._url = broker_url
        self._namespace = namespace

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
        connection = await aio_pika.connect(self._url, timeout=10)
        async with connection:
            yield await connection.channel(on_return_raises=True)

    async def open(self, *event_keys: str) -> None:
        """Makes the queue; it gets the events that the keys match too."""
        async with self._channel() as channel:
            queue = await channel.declare_queue(self.queue, durable=True)
            for key in event_keys:
                await queue.bind(f"{self._namespace}.events", routing_key=key)

    async def close(self) -> None:
        """Removes the queue."""
        async with self._channel() as channel:
            await channel.queue_delete(self.queue)

    async def send(
        self, address: str, *requests: tuple[str, Mapping[str, Any]], answered: bool = True
    ) -> list[uuid.UUID]:
        """Sends requests whose answers come here, or casts; returns the jobs' ids."""
        ids = [uuid.uuid4() for _ in requests]
        async with self._channel() as channel:
            exchange = await channel.get_exchange(self._namespace, ensure=False)
            for identity, (method, args) in zip(ids, requests, strict=True):
                body = {"method": method, "version": "1.0", "args": dict(args)}
                message = aio_pika.Message(
                    json.dumps(body).encode(),
                    message_id=str(identity),
                    correlation_id=str(identity),
                    reply_to=self.queue if answered else None,
                    content_type="application/json",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await exchange.publish(message, address, mandatory=True, timeout=amqp.TIMEOUT)
        return ids

    async def look(self) -> None:
        """Takes out what has come."""
        async with self._channel() as channel:
            queue = await channel.get_queue(self.queue)
            while (message := await queue.get(fail=False, no_ack=True)) is not None:
                body = json.loads(message.body)
                if message.exchange:
                    self.events.append(amqp.Event(message.routing_key or "", body, 0))
                else:
                    self.replies.append(
                        amqp.Reply(
                            message.type,
                            body,
                            message.message_id,
                            message.correlation_id,
                            message.content_type,
                        )
                    )

    def results(self, job: uuid.UUID) -> list[amqp.Reply]:
        """The results of a job that were taken out so far; copies of one count once."""
        found = [r for r in self.replies if r.correlation_id == str(job) and r.kind == "result"]
        return list({reply.message_id: reply for reply in found}.values())

    async def only_results(self, jobs: list[uuid.UUID]) -> list[amqp.Reply]:
        """Waits for one result of each job; a second one is an error."""
        async with asyncio.timeout(amqp.TIMEOUT):
            while not await self._have_come(jobs):
                await asyncio.sleep(0.05)
        assert [len(self.results(job)) for job in jobs] == [1] * len(jobs)
        return [self.results(job)[0] for job in jobs]

    async def _have_come(self, jobs: list[uuid.UUID]) -> bool:
        await self.look()
        return all(self.results(job) for job in jobs)


@contextlib.asynccontextmanager
async def opened(broker_url: str, namespace: str, *event_keys: str) -> AsyncIterator[Mailbox]:
    """A letter box for the time of the block, which needs the broker at both ends."""
    made = Mailbox(broker_url, namespace)
    await made.open(*event_keys)
    try:
        yield made
    finally:
        await made.close()
