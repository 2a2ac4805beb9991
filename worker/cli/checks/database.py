"""The database: reachable, this version's schema, this namespace's, writable."""

import asyncpg

from messages import errors
from worker import settings
from worker.cli import reach
from worker.cli.checks import finding
from worker.store import database, installation


async def look(configured: settings.Settings) -> list[finding.Finding]:
    """Findings about the database and the schema."""
    try:
        async with database.connect(configured.database_url, size=2) as store:
            return await _schema(store, configured)
    except errors.Unreachable as error:
        return [finding.away("database", error.message)]


async def _schema(store: database.Database, configured: settings.Settings) -> list[finding.Finding]:
    place = reach.place(configured.database_url)
    found = [finding.ok("database", f"PostgreSQL answers at {place}")]
    if not await installation.is_writable(store):
        found = [
            finding.fail("database", f"{place} takes no writes: database_url must name the primary")
        ]
    try:
        await installation.check(store, configured.namespace)
    except (installation.SchemaMismatch, installation.WrongNamespace) as error:
        found.append(finding.fail("schema", error.message))
    except asyncpg.PostgresError as error:
        found.append(finding.fail("schema", f"it cannot be read: {error}"))
    else:
        found.append(finding.ok("schema", f"up to date, namespace {configured.namespace!r}"))
    return found
