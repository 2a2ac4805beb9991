"""The RabbitMQ and PostgreSQL that tests use, and a fresh database and namespace on them."""

import asyncio
import concurrent.futures
import os
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import asyncpg
import pydantic
import pytest

from worker.store import installation

T = TypeVar("T")

BROKER = "VOLUME_WORKER_BROKER_URL"
DATABASE = "VOLUME_WORKER_DATABASE_URL"


def give_up(reason: str) -> NoReturn:
    """Skips the test; where CI is set, fails it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def url(variable: str) -> str:
    """A service's URL; the test is skipped where there is none."""
    found = os.environ.get(variable)
    if not found:
        give_up(f"{variable} is not set; `make test` or `tools/services.py run` set it")
    return found


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from code that is none, whatever event loop the test has."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class Installation:
    """One namespace with its database.

    Attributes:
        addresses: of the backends whose queues are removed at the end.
    """

    def __init__(self, namespace: str, broker_url: str, database_url: str) -> None:
        self.namespace = namespace
        self.broker_url = broker_url
        self.database_url = database_url
        self.addresses: set[str] = set()

    async def rows(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        """Runs a statement on the database."""
        connection = await asyncpg.connect(self.database_url)
        try:
            return list(await connection.fetch(statement, *args))
        finally:
            await connection.close()

    async def text_of_all_tables(self) -> dict[str, str]:
        """Each column of each table as one text, by ``table.column``."""
        columns = await self.rows(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = 'public'"
        )
        found = {}
        for table, column in columns:
            values = await self.rows(
                f"SELECT CASE WHEN pg_typeof(\"{column}\") = 'bytea'::regtype"
                f' THEN encode("{column}"::text::bytea, \'escape\') ELSE "{column}"::text END'
                f' FROM "{table}"'
            )
            found[f"{table}.{column}"] = "\n".join(str(value) for (value,) in values)
        return found

    async def remove_from_broker(self) -> None:
        """Deletes the queues and exchanges of the namespace."""
        connection = await aio_pika.connect(self.broker_url)
        async with connection:
            channel = await connection.channel()
            names = [self.namespace, f"{self.namespace}.events", f"{self.namespace}.dead"]
            for queue in [names[-1], *(f"{self.namespace}.{one}" for one in self.addresses)]:
                await channel.queue_delete(queue)
            for exchange in names:
                await channel.exchange_delete(exchange)


class Databases:
    """Makes installations: each database is a copy of one that was migrated once."""

    def __init__(self, broker_url: str, database_url: str) -> None:
        self._broker_url = broker_url
        self._database_url = database_url
        self._template = f"test_template_{uuid.uuid4().hex}"

    @contextmanager
    def open(self) -> Iterator["Databases"]:
        """Keeps the template for as long as the block runs."""
        blocking(self._make_template())
        try:
            yield self
        finally:
            blocking(self._drop(self._template))

    @contextmanager
    def installation(self) -> Iterator[Installation]:
        """A fresh installation; nothing of it is left after the block."""
        unique = uuid.uuid4().hex[:12]
        made = Installation(f"test-{unique}", self._broker_url, self._url(f"test_{unique}"))
        blocking(self._make(f"test_{unique}", made))
        try:
            yield made
        finally:
            blocking(made.remove_from_broker())
            blocking(self._drop(f"test_{unique}"))

    def _url(self, name: str) -> str:
        return urlunsplit(urlsplit(self._database_url)._replace(path=f"/{name}"))

    async def _make_template(self) -> None:
        await self._execute(f'CREATE DATABASE "{self._template}"')
        template = pydantic.SecretStr(self._url(self._template))
        await installation.migrate(template, "template")
        connection = await asyncpg.connect(template.get_secret_value())
        await connection.execute("DELETE FROM installation")
        await connection.close()

    async def _make(self, name: str, made: Installation) -> None:
        await self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        await installation.migrate(pydantic.SecretStr(made.database_url), made.namespace)

    async def _drop(self, name: str) -> None:
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self._database_url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()
