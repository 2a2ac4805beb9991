"""The way to the broker and to the database, for commands that are over in a moment.

A service waits for what is away; a command says so at once.
"""

import contextlib
import urllib.parse
from collections.abc import AsyncIterator
from typing import Final

import aio_pika
import aio_pika.abc
import aio_pika.exceptions
import pydantic

from messages import client, errors, link, redaction
from worker import settings
from worker.store import database, installation

CONNECT_TIMEOUT: Final = 10.0
"""Seconds."""


@contextlib.asynccontextmanager
async def broker(url: pydantic.SecretStr) -> AsyncIterator[aio_pika.abc.AbstractConnection]:
    """A connection to the broker.

    Raises:
        Unreachable: with what to look at.
    """
    connection = await _connect(url)
    try:
        yield connection
    finally:
        with contextlib.suppress(*link.AWAY):
            await connection.close()


async def _connect(url: pydantic.SecretStr) -> aio_pika.abc.AbstractConnection:
    try:
        return await aio_pika.connect(
            url.get_secret_value(),
            timeout=CONNECT_TIMEOUT,
            client_properties={"connection_name": "volume-worker command"},
        )
    except aio_pika.exceptions.AuthenticationError:
        reason = "it refuses broker_url's credentials"
    except aio_pika.exceptions.AMQPError as error:
        reason = _refusal(error)
    except (OSError, TimeoutError) as error:
        reason = f"{_reason(error)}; look at broker_url and whether RabbitMQ runs there"
    except (ValueError, TypeError, KeyError, ArithmeticError):
        reason = "broker_url must look like amqp://USER:PASSWORD@HOST:PORT/VHOST"
    # The URL, with its password, may be part of a library's text.
    raise errors.Unreachable(
        f"the broker at {place(url)} cannot be reached: {redaction.mask_text(reason)}"
    )


@contextlib.asynccontextmanager
async def caller(configured: settings.Settings) -> AsyncIterator[client.Client]:
    """A client of the installation.

    Raises:
        Unreachable: with what to look at.
    """
    # A client waits for a broker that is away; here somebody waits for the client.
    async with broker(configured.broker_url):
        pass
    async with client.Client(
        configured.broker_url, namespace=configured.namespace, name="volume-worker command"
    ) as opened:
        yield opened


def _refusal(error: aio_pika.exceptions.AMQPError) -> str:
    text = str(error)
    if "ACCESS_REFUSED" in text:
        return "it refuses broker_url's credentials"
    # Where the vhost is none of its, RabbitMQ closes the connection instead of opening it.
    if "NOT_ALLOWED" in text or "Connection.OpenOk" in text:
        return "it refuses the vhost of broker_url"
    return f"{text or type(error).__name__}; look at broker_url and whether RabbitMQ runs there"


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {CONNECT_TIMEOUT:g} s"
    return str(error) or type(error).__name__


def place(url: pydantic.SecretStr) -> str:
    """Host and port of a URL, and nothing else of it."""
    try:
        parts = urllib.parse.urlsplit(url.get_secret_value())
        host, port = parts.hostname or "?", parts.port or "?"
    except ValueError:
        return "an address that cannot be read"
    return f"{host}:{port}"


@contextlib.asynccontextmanager
async def records(configured: settings.Settings) -> AsyncIterator[database.Database]:
    """The database, once it is known to be this installation's.

    Raises:
        Unreachable: it is away.
        SchemaMismatch, WrongNamespace: it is another one, or not migrated.
    """
    async with database.connect(
        configured.database_url,
        size=2,
        statement_cache_size=configured.database_statement_cache_size,
    ) as store:
        await installation.check(store, configured.namespace)
        yield store
