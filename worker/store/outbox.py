"""The outbox table: what has still to be told, until the broker has confirmed it."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from worker.store import database, jobs

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Letter:
    """A message that never became a job, to be dead-lettered as it came."""

    address: str
    body: bytes
    properties: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One thing to tell: a job's end and its volume's last word, or a letter."""

    id: int
    job: jobs.Job | None = None
    reply_only: bool = False
    event: Mapping[str, Any] | None = None
    """The body of the volume's event."""
    letter: Letter | None = None


async def add_letters(store: database.Database, letters: Sequence[Letter]) -> list[Entry]:
    """Keeps letters until they are published."""
    rows = await store.fetch(
        "add_letters",
        [letter.address for letter in letters],
        [letter.body for letter in letters],
        [dict(letter.properties) for letter in letters],
    )
    return [Entry(row["id"], letter=letter) for row, letter in zip(rows, letters, strict=True)]


async def adopt(
    store: database.Database, *, addresses: Sequence[str], older_than: float, limit: int
) -> list[Entry]:
    """Takes over what nobody has touched for ``older_than`` seconds, the oldest first.

    What cannot be read stays in the table, and must not keep the others from being told.
    """
    rows = await store.fetch("adopt_outbox", addresses, older_than, limit)
    return [entry for row in rows if (entry := _read(row)) is not None]


async def touch(store: database.Database, ids: Collection[int]) -> None:
    """Lets others know that somebody is about to publish these."""
    await store.fetch("touch_outbox", list(ids))


async def delete(store: database.Database, ids: Sequence[int]) -> None:
    """Forgets what the broker has confirmed."""
    await store.fetch("delete_outbox", ids)


def _read(row: Mapping[str, Any]) -> Entry | None:
    try:
        return _from_row(row)
    except (ValueError, TypeError, KeyError) as error:
        log.warning("outbox.unreadable", entry_id=row["id"], error=repr(error))
        return None


def _from_row(row: Mapping[str, Any]) -> Entry:
    return Entry(
        row["id"],
        job=None if row["job"] is None else jobs.from_json(row["job"], row["job_body"]),
        reply_only=row["reply_only"],
        event=row["event"],
        letter=None
        if row["letter"] is None
        else Letter(row["address"], row["letter"], row["letter_properties"]),
    )
