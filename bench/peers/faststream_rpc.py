"""An echo by FastStream: ``python -m bench.peers.faststream_rpc server|request|replies NAME``.

There are two callers. ``request`` uses ``broker.request``, FastStream's call, of which a broker
has one at a time in flight. ``replies`` is what its manual shows otherwise: ``reply_to`` with a
subscriber of the replies' queue, which finds the call by its correlation id.
"""

import asyncio
import os
import sys
import uuid
from typing import Any

import faststream
import faststream.rabbit

from bench import measuring
from bench.peers import request

PREFETCH = 256
TIMEOUT = 30.0


async def main(role: str, name: str) -> None:
    """Serves or calls."""
    broker = faststream.rabbit.RabbitBroker(
        os.environ[measuring.BROKER_URL],
        default_channel=faststream.rabbit.Channel(prefetch_count=PREFETCH, publisher_confirms=True),
        logger=None,  # else two lines for each message
    )
    queue = faststream.rabbit.RabbitQueue(
        name, durable=True, queue_type=faststream.rabbit.QueueType.QUORUM
    )
    match role:
        case "server":
            broker.subscriber(queue)(_create_volume)
            await broker.start()
            print(measuring.READY, flush=True)
            await asyncio.Event().wait()
        case "request":
            await broker.start()
            await _call_by_request(broker, queue)
        case "replies":
            await _call_by_replies(broker, queue)
        case _:
            raise SystemExit(__doc__)


async def _create_volume(message: dict[str, Any]) -> faststream.rabbit.RabbitResponse:
    return faststream.rabbit.RabbitResponse(message, persist=True)


async def _call_by_request(broker: Any, queue: Any) -> None:
    async def call() -> None:
        sent = request.arguments()
        answer = await broker.request(sent, queue, persist=True, timeout=TIMEOUT)
        request.check(sent, await answer.decode())

    await measuring.serve_async(call)


async def _call_by_replies(broker: Any, queue: Any) -> None:
    waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
    replies = faststream.rabbit.RabbitQueue(f"{queue.name}-replies-{uuid.uuid4()}", exclusive=True)

    async def take(answer: dict[str, Any], message: faststream.rabbit.RabbitMessage) -> None:
        waiting.pop(str(message.correlation_id)).set_result(answer)

    async def call() -> None:
        sent = request.arguments()
        identity = str(uuid.uuid4())
        waiting[identity] = asyncio.get_running_loop().create_future()
        await broker.publish(
            sent, queue, persist=True, reply_to=replies.name, correlation_id=identity
        )
        request.check(sent, await waiting[identity])

    broker.subscriber(replies, ack_policy=faststream.AckPolicy.ACK_FIRST)(take)
    await broker.start()
    await measuring.serve_async(call)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
