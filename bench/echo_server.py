"""A bare echo that stores nothing: consumes, publishes the reply with a confirm, acknowledges.

``python -m bench.echo_server QUEUE``.
"""

import asyncio
import os
import sys

import aio_pika
import aio_pika.abc

from bench import measuring

PREFETCH = 256


async def main(name: str) -> None:
    """Answers until it is ended."""
    connection = await aio_pika.connect(os.environ[measuring.BROKER_URL])
    async with connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.declare_queue(
            name, durable=True, arguments={"x-queue-type": "quorum"}
        )
        exchange = channel.default_exchange

        async def answer(request: aio_pika.abc.AbstractIncomingMessage) -> None:
            reply = aio_pika.Message(
                request.body,
                type="result",
                content_type="application/json",
                correlation_id=request.correlation_id,
                message_id=request.message_id,
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            )
            await exchange.publish(reply, str(request.reply_to), mandatory=True)
            await request.ack()

        await queue.consume(answer)
        print(measuring.READY, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
