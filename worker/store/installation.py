"""The installation: its schema, its namespace, its backends."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import asyncpg
import pydantic
import structlog

import sql
from messages import errors
from worker.store import database

log = structlog.get_logger(__name__)


class SchemaMismatch(errors.VolumeWorkerError):
    """The database's schema is not this version's; run ``volume-worker migrate``."""


class WrongNamespace(errors.VolumeWorkerError):
    """The database belongs to another namespace."""


async def migrate(url: pydantic.SecretStr, namespace: str) -> list[str]:
    """Brings the schema up to date, in one transaction; returns the names of the steps taken.

    Raises:
        Unreachable: the database cannot be reached.
        SchemaMismatch: a step that was taken has changed since, or is unknown to this version.
        WrongNamespace: the database was set up for another one.
    """
    async with _connection(url) as connection, connection.transaction():
        await connection.execute(sql.queries()["lock_migrations"])
        await connection.execute(sql.queries()["create_migration_table"])
        applied = await connection.fetch(sql.queries()["applied_migrations"])
        steps = _missing(applied)
        for step in steps:
            await connection.execute(step.text)
            await connection.execute(
                sql.queries()["record_migration"], step.version, step.name, step.checksum
            )
        named = await connection.fetchval(sql.queries()["record_namespace"], namespace)
        _same_namespace(named, namespace)
    return [f"{step.version:04}_{step.name}" for step in steps]


async def create_database(url: pydantic.SecretStr, name: str) -> None:
    """Makes a database on the server of ``url``.

    Raises:
        Unreachable: the server is away.
    """
    async with _connection(url) as connection:
        await connection.execute(sql.queries()["create_database"].format(name=_quoted(name)))


async def drop_database(url: pydantic.SecretStr, name: str) -> None:
    """Removes a database from the server of ``url``; one that is not there is no error.

    Raises:
        Unreachable: the server is away.
    """
    async with _connection(url) as connection:
        await connection.execute(sql.queries()["drop_database"].format(name=_quoted(name)))


@contextlib.asynccontextmanager
async def _connection(url: pydantic.SecretStr) -> AsyncIterator[Any]:
    try:
        connection: Any = await asyncpg.connect(url.get_secret_value(), timeout=10)
    except (
        OSError,
        TimeoutError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        ValueError,
    ) as error:
        why = database.describe(error)
        raise errors.Unreachable(f"the database cannot be reached: {why}") from None
    try:
        yield connection
    finally:
        await connection.close(timeout=5)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


async def check(store: database.Database, namespace: str) -> None:
    """Looks whether the schema is this version's, and the database this namespace's.

    Raises:
        SchemaMismatch, WrongNamespace: it is not.
    """
    exists = await store.row("has_migrations")
    applied = await store.fetch("applied_migrations") if exists and exists["present"] else []
    if missing := _missing(applied):
        raise SchemaMismatch(
            f"the database lacks {len(missing)} schema step(s); run: volume-worker migrate"
        )
    row = await store.row("get_namespace")
    _same_namespace(row["namespace"] if row else None, namespace)


def _missing(applied: Any) -> list[sql.Migration]:
    known = {migration.version: migration for migration in sql.migrations()}
    for row in applied:
        ours = known.pop(row["version"], None)
        if ours is None:
            raise SchemaMismatch(
                f"the database has schema step {row['version']:04}_{row['name']}, which this "
                "version does not know: it was migrated by a newer one"
            )
        if ours.checksum != row["checksum"]:
            raise SchemaMismatch(
                f"schema step {row['version']:04}_{row['name']} was changed after it was taken"
            )
    return list(known.values())


def _same_namespace(theirs: str | None, ours: str) -> None:
    if theirs != ours:
        raise WrongNamespace(
            f"the database belongs to namespace {theirs!r}, this worker to {ours!r}: "
            "each namespace needs a database of its own"
        )


async def set_backend(
    store: database.Database,
    address: str,
    *,
    up: bool,
    stats: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> int:
    """Keeps a backend's state; returns the seq of its event."""
    row = await store.own("set_backend", address, "up" if up else "down", stats, error)
    return int(row["seq"])


async def is_writable(store: database.Database) -> bool:
    """Whether the database is there and takes writes."""
    row = await store.row("is_writable")
    return bool(row and row["writable"])
