"""The schema: taken once, in order, by one at a time, and never one that is not known."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pydantic
import pytest

import sql
from messages import errors
from tests.services import environment
from worker.store import database, installation

Url = pydantic.SecretStr


@pytest.fixture
async def empty() -> AsyncIterator[Url]:
    """A database with nothing in it."""
    base = environment.url(environment.DATABASE)
    name = f"test_{uuid.uuid4().hex[:12]}"
    server = await asyncpg.connect(base)
    await server.execute(f'CREATE DATABASE "{name}"')
    try:
        yield Url(urlunsplit(urlsplit(base)._replace(path=f"/{name}")))
    finally:
        await server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
        await server.close()


async def execute(url: Url, statement: str) -> None:
    connection = await asyncpg.connect(url.get_secret_value())
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def check(url: Url, namespace: str) -> None:
    async with database.connect(url) as store:
        await installation.check(store, namespace)


ALL = list(sql.migrations())
ALL_STEPS = [f"{step.version:04}_{step.name}" for step in ALL]


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [step.version for step in sql.migrations()] == list(range(1, len(sql.migrations()) + 1))


async def test_an_empty_database_gets_every_step_once(empty: Url) -> None:
    assert await installation.migrate(empty, "ns") == ALL_STEPS
    assert await installation.migrate(empty, "ns") == []
    await check(empty, "ns")


async def test_two_migrators_at_once_take_each_step_once(empty: Url) -> None:
    taken = await asyncio.gather(*(installation.migrate(empty, "ns") for _ in range(4)))
    assert sorted(step for steps in taken for step in steps) == ALL_STEPS
    await check(empty, "ns")


async def test_two_migrators_of_two_namespaces_cannot_both_have_the_database(empty: Url) -> None:
    taken = await asyncio.gather(
        *(installation.migrate(empty, namespace) for namespace in ("one", "two")),
        return_exceptions=True,
    )
    refused = [one for one in taken if isinstance(one, installation.WrongNamespace)]
    assert len(refused) == 1
    assert len([one for one in taken if isinstance(one, list)]) == 1


async def test_a_step_that_was_changed_after_it_was_taken_is_refused(empty: Url) -> None:
    await installation.migrate(empty, "ns")
    await execute(empty, "UPDATE schema_migrations SET checksum = 'other' WHERE version = 1")
    with pytest.raises(installation.SchemaMismatch, match="0001_initial was changed"):
        await installation.migrate(empty, "ns")
    with pytest.raises(installation.SchemaMismatch, match="0001_initial was changed"):
        await check(empty, "ns")


async def test_a_step_of_a_newer_version_is_refused(empty: Url) -> None:
    await installation.migrate(empty, "ns")
    await execute(empty, "INSERT INTO schema_migrations VALUES (9999, 'from_the_future', 'x')")
    with pytest.raises(installation.SchemaMismatch, match="9999_from_the_future"):
        await installation.migrate(empty, "ns")
    with pytest.raises(installation.SchemaMismatch, match="9999_from_the_future"):
        await check(empty, "ns")


async def test_a_database_that_was_never_migrated_is_refused_with_what_to_do(
    empty: Url,
) -> None:
    with pytest.raises(installation.SchemaMismatch, match="volume-worker migrate"):
        await check(empty, "ns")


async def test_another_namespaces_database_is_refused(empty: Url) -> None:
    await installation.migrate(empty, "mine")
    with pytest.raises(installation.WrongNamespace, match="mine"):
        await installation.migrate(empty, "yours")
    with pytest.raises(installation.WrongNamespace, match="mine"):
        await check(empty, "yours")
    await check(empty, "mine")


async def test_a_step_that_fails_leaves_nothing(
    empty: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = sql.Migration(len(ALL_STEPS) + 1, "bad", "CREATE TABLE left_over (a int); SELECT 1/0")
    monkeypatch.setattr(sql, "migrations", lambda: [*ALL, bad])
    with pytest.raises(asyncpg.DivisionByZeroError):
        await installation.migrate(empty, "ns")
    monkeypatch.undo()
    with pytest.raises(installation.SchemaMismatch, match="lacks"):
        await check(empty, "ns")
    assert await installation.migrate(empty, "ns") == ALL_STEPS


async def test_the_next_step_alone_is_taken_where_the_others_were(
    empty: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    await installation.migrate(empty, "ns")
    more = sql.Migration(len(ALL_STEPS) + 1, "more", "CREATE TABLE more (a int)")
    monkeypatch.setattr(sql, "migrations", lambda: [*ALL, more])
    with pytest.raises(installation.SchemaMismatch, match="lacks 1"):
        await check(empty, "ns")
    assert await installation.migrate(empty, "ns") == [f"{more.version:04}_more"]
    await check(empty, "ns")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://postgres@127.0.0.1:1/none",
        "postgresql://postgres:wrong-hunter2@/none?host=/nonexistent",
        "no url at all",
        "postgresql://postgres:hunter2/x@127.0.0.1:1/none",
        "postgresql://postgres:1?hunter2@127.0.0.1:1/none",
    ],
)
async def test_a_database_that_cannot_be_reached_is_told_without_its_password(url: str) -> None:
    with pytest.raises(errors.Unreachable) as migrating:
        await installation.migrate(Url(url), "ns")
    with pytest.raises(errors.Unreachable) as connecting:
        await check(Url(url), "ns")
    assert "hunter2" not in migrating.value.message + connecting.value.message


async def test_a_database_that_does_not_exist_is_told_as_unreachable() -> None:
    base = environment.url(environment.DATABASE)
    missing = Url(urlunsplit(urlsplit(base)._replace(path="/does_not_exist")))
    with pytest.raises(errors.Unreachable, match="does_not_exist"):
        await check(missing, "ns")


async def test_a_backends_state_is_kept_and_its_seq_rises(empty: Url) -> None:
    await installation.migrate(empty, "ns")
    async with database.connect(empty) as store:
        first = await installation.set_backend(
            store, "host-a@fast", up=True, stats={"a": 1}, error=None
        )
        error = errors.TargetError("away").to_wire()
        second = await installation.set_backend(
            store, "host-a@fast", up=False, stats=None, error=error
        )
        assert second > first
        connection = await asyncpg.connect(empty.get_secret_value())
        row = await connection.fetchrow("SELECT state, stats::text, error::text FROM backends")
        await connection.close()
        assert row is not None
        assert (row["state"], json.loads(row["stats"]), json.loads(row["error"])) == (
            "down",
            {"a": 1},
            error,
        )
        assert await installation.is_writable(store)
