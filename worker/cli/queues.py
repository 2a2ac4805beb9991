"""Request queues as the broker sees them."""

import dataclasses

import aio_pika.abc
import aio_pika.exceptions

from messages import topology


@dataclasses.dataclass(frozen=True, slots=True)
class Queue:
    """A request queue."""

    waiting: int
    """Requests that nobody has taken yet."""
    consumers: int
    """Worker processes that take from it."""


async def look(
    connection: aio_pika.abc.AbstractConnection, names: topology.Topology, address: str
) -> Queue | None:
    """The queue of an address, or None where there is none."""
    # The broker closes the channel of who asks for what is not there.
    channel = await connection.channel()
    try:
        queue = await channel.declare_queue(names.queue(address), passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        return None
    await channel.close()
    found = queue.declaration_result
    return Queue(found.message_count or 0, found.consumer_count or 0)
