"""The caller of this worker and of the bare echo: the same code, so that it costs both the same.

It speaks the contract by aio-pika alone: persistent, mandatory requests with confirms on one
channel, replies from one exclusive queue. ``python -m bench.amqp_caller EXCHANGE ROUTING_KEY``.
"""

import asyncio
import json
import os
import sys
import uuid

import aio_pika
import aio_pika.abc

from bench import measuring


class Caller:
    """Calls ``create_volume`` and waits for the result."""

    def __init__(
        self, exchange: aio_pika.abc.AbstractExchange, routing_key: str, reply_to: str
    ) -> None:
        self._exchange = exchange
        self._routing_key = routing_key
        self._reply_to = reply_to
        self._waiting: dict[str, asyncio.Future[bytes]] = {}

    async def take(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Takes a reply."""
        self._waiting.pop(str(message.correlation_id)).set_result(message.body)

    async def call(self) -> None:
        """One call; a failure ends the benchmark."""
        identity = str(uuid.uuid4())
        arguments = {"volume": {"name": identity, "size_bytes": 1 << 30}}
        body = {"method": "create_volume", "version": "1.0", "args": arguments}
        message = aio_pika.Message(
            json.dumps(body).encode(),
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            message_id=identity,
            correlation_id=identity,
            reply_to=self._reply_to,
        )
        answer = asyncio.get_running_loop().create_future()
        self._waiting[identity] = answer
        await self._exchange.publish(message, self._routing_key, mandatory=True)
        reply = json.loads(await answer)
        if not reply.get("ok", reply == body):
            raise SystemExit(f"the call failed: {reply}")


async def main(exchange: str, routing_key: str) -> None:
    """Connects, and measures what is asked for on stdin."""
    connection = await aio_pika.connect(os.environ[measuring.BROKER_URL])
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        replies = await channel.declare_queue(exclusive=True)
        target = (
            await channel.get_exchange(exchange, ensure=False)
            if exchange
            else channel.default_exchange
        )
        caller = Caller(target, routing_key, replies.name)
        await replies.consume(caller.take, no_ack=True)
        await measuring.serve_async(caller.call)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
