"""The broker and what is declared there.

What exists is declared once more with the arguments that it must have: the broker changes nothing
then, and refuses where they differ. What does not exist is left to the worker.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aio_pika
import aio_pika.abc
import aio_pika.exceptions

from messages import errors, link, topology
from worker import settings
from worker.cli import reach
from worker.cli.checks import finding


async def look(configured: settings.Settings) -> list[finding.Finding]:
    """Findings about the broker and the topology."""
    names = topology.Topology(configured.namespace)
    place = reach.place(configured.broker_url)
    try:
        async with reach.broker(configured.broker_url) as connection:
            reached = finding.ok("broker", f"RabbitMQ answers at {place}")
            return [reached, *await _topology(connection, names, configured.addresses())]
    except errors.Unreachable as error:
        return [finding.away("broker", error.message)]
    except link.AWAY as error:
        return [finding.away("broker", f"the connection to {place} broke: {type(error).__name__}")]


async def _topology(
    connection: aio_pika.abc.AbstractConnection,
    names: topology.Topology,
    addresses: Sequence[str],
) -> list[finding.Finding]:
    found = [
        await _exchange(connection, names.requests, aio_pika.ExchangeType.TOPIC),
        await _exchange(connection, names.events, aio_pika.ExchangeType.TOPIC),
        await _exchange(connection, names.dead, aio_pika.ExchangeType.FANOUT),
        await _queue(connection, names.dead, names.dead_queue_arguments(), served=False),
    ]
    for address in addresses:
        queue = names.queue(address)
        found.append(await _queue(connection, queue, names.queue_arguments(), served=True))
    return found


async def _exchange(
    connection: aio_pika.abc.AbstractConnection, name: str, kind: aio_pika.ExchangeType
) -> finding.Finding:
    subject = f"exchange {name}"
    with _refusals() as refusal:
        await (await connection.channel()).declare_exchange(name, passive=True)
        await (await connection.channel()).declare_exchange(name, kind, durable=True)
    return refusal.finding(subject) or finding.ok(subject, f"{kind.value}, durable")


async def _queue(
    connection: aio_pika.abc.AbstractConnection,
    name: str,
    arguments: Mapping[str, Any],
    *,
    served: bool,
) -> finding.Finding:
    subject = f"queue {name}"
    with _refusals() as refusal:
        found = await (await connection.channel()).declare_queue(name, passive=True)
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=dict(arguments))
    if wrong := refusal.finding(subject):
        return wrong
    waiting = found.declaration_result.message_count or 0
    consumers = found.declaration_result.consumer_count or 0
    if not served:
        return _letters(subject, waiting)
    if consumers:
        return finding.ok(subject, f"{consumers} worker process(es), {waiting} requests waiting")
    return finding.warn(
        subject, f"no worker takes from it, {waiting} requests wait: start volume-worker run"
    )


def _letters(subject: str, count: int) -> finding.Finding:
    if not count:
        return finding.ok(subject, "no dead letters")
    return finding.warn(subject, f"{count} dead letter(s): see volume-worker dead list")


class _Refusal:
    """What the broker had against it."""

    def __init__(self) -> None:
        self._error: aio_pika.exceptions.AMQPChannelError | None = None

    def note(self, error: aio_pika.exceptions.AMQPChannelError) -> None:
        """Keeps what was said."""
        self._error = error

    def finding(self, subject: str) -> finding.Finding | None:
        """None where the broker had nothing against it."""
        match self._error:
            case None:
                return None
            case aio_pika.exceptions.ChannelNotFoundEntity():
                return finding.warn(subject, "not there yet; the first volume-worker run makes it")
            case aio_pika.exceptions.ChannelPreconditionFailed():
                advice = (
                    "it is not what it must be: once it is empty, remove it on the broker (the "
                    "worker makes it anew), or use another namespace"
                )
            case _:
                advice = "give the user of broker_url the right to configure, write and read it"
        return finding.fail(subject, f"{self._error}; {advice}")


@contextlib.contextmanager
def _refusals() -> Iterator[_Refusal]:
    refusal = _Refusal()
    try:
        yield refusal
    except aio_pika.exceptions.AMQPChannelError as error:
        # The broker has closed the channel, which is why each look has its own.
        refusal.note(error)
