#!/usr/bin/env python3
"""A scheduler in little: creates a volume on the backend that has the most free space.

Backends tell their stats every few seconds; whoever listens knows which there are and how full.

    python examples/scheduler.py --name my-volume --size-gib 10
"""

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import aio_pika
import structlog

from messages import client, errors, topology

GIB = 1024**3
Stats = Mapping[str, Any]


async def listen(broker_url: str, namespace: str, seconds: float) -> dict[str, Stats]:
    """The newest stats of every backend that spoke within some seconds, by its address."""
    names = topology.Topology(namespace)
    heard: dict[str, Stats] = {}

    async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        stats = json.loads(message.body)["stats"]
        heard[stats["address"]] = stats

    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        events = await channel.get_exchange(names.events)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(events, routing_key="backend.*.stats")
        await queue.consume(take, no_ack=True)
        await asyncio.sleep(seconds)
    return heard


async def ask(volumes: client.Client, addresses: list[str]) -> dict[str, Stats]:
    """The stats of some backends, asked for; one that does not answer is left out."""
    answers = await asyncio.gather(
        *(volumes.call("get_volume_stats", address, timeout=5) for address in addresses),
        return_exceptions=True,
    )
    heard = {}
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, BaseException):
            print(f"{address} is left out: {answer}", file=sys.stderr)
        else:
            heard[address] = answer
    return heard


def choose(heard: Mapping[str, Stats], size_bytes: int) -> str | None:
    """The address with the most free space that is up and has enough of it, or None."""
    free = {
        address: free_bytes(stats)
        for address, stats in heard.items()
        if stats.get("backend_state", "up") == "up"
    }
    fitting = {address: space for address, space in free.items() if space >= size_bytes}
    return max(sorted(fitting), key=lambda address: fitting[address], default=None)


def free_bytes(stats: Stats) -> float:
    """What a backend has left to give; the operator's reserve is not for the giving."""
    free, total = stats.get("free_capacity_bytes"), stats.get("total_capacity_bytes")
    if free == "infinite":
        return float("inf")
    if not isinstance(free, int | float):
        return 0  # unknown: nothing to count on
    reserved = total * stats.get("reserved_percentage", 0) / 100 if isinstance(total, int) else 0
    return float(free) - reserved


async def main(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    size_bytes = int(options.size_gib * GIB)
    await (await aio_pika.connect(options.broker_url)).close()  # a client waits, this does not
    async with client.Client(options.broker_url, namespace=options.namespace) as volumes:
        if options.address:
            heard = await ask(volumes, options.address)
        else:
            heard = await listen(options.broker_url, options.namespace, options.listen)
        address = choose(heard, size_bytes)
        if address is None:
            print(f"none of {len(heard)} backends has {size_bytes} bytes left", file=sys.stderr)
            return 1
        volume = await volumes.call(
            "create_volume", address, {"volume": {"name": options.name, "size_bytes": size_bytes}}
        )
    print(json.dumps(volume, indent=2))
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    environment = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--name", required=True, help="of the volume")
    parser.add_argument("--size-gib", type=float, default=1.0, metavar="N")
    parser.add_argument("--listen", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--address", action="append", help="ask this backend; may be repeated")
    parser.add_argument("--namespace", default=environment("VOLUME_WORKER_NAMESPACE", "volume"))
    parser.add_argument(
        "--broker-url",
        default=environment("VOLUME_WORKER_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672/"),
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # The client tells of each connection, and stdout is for the volume.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        sys.exit(asyncio.run(main(parse())))
    except (errors.VolumeWorkerError, aio_pika.exceptions.AMQPError, OSError) as error:
        sys.exit(f"scheduler: {error}")
