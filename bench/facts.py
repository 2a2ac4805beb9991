"""What a figure depends on: the machine, the services and how they store, the versions."""

import asyncio
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping

import aio_pika
import asyncpg

from bench import hosts

OURS = ("volume-worker", "aio-pika", "aiormq", "asyncpg", "pydantic")


def of_site(site: hosts.Site) -> dict[str, str]:
    """The facts, as lines of text by their names."""
    return {
        "machine": f"{os.cpu_count()} cores, {_processor()}, {_memory()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": versions(OURS),
        "RabbitMQ": asyncio.run(_broker(site.broker_url)),
        "PostgreSQL": asyncio.run(_database(site.database_url)),
    }


def versions(packages: tuple[str, ...]) -> str:
    """The versions of packages in this environment."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def lines(facts: Mapping[str, str]) -> str:
    """As a list in markdown."""
    return "\n".join(f"* {name}: {text}" for name, text in facts.items())


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.0f} GiB"


async def _broker(url: str) -> str:
    connection = await aio_pika.connect(url)
    async with connection:
        assert connection.transport is not None
        properties = connection.transport.connection.server_properties
        return _text(properties.get("version"))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def _database(url: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        told = {name: await connection.fetchval(f"SHOW {name}") for name in names}
    finally:
        await connection.close()
    version = told.pop("server_version")
    return ", ".join([version, *(f"{name} {value}" for name, value in told.items())])
