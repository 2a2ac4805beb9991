"""Connections: recorded before they are made, ended after they are undone."""

import copy
import dataclasses
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic
import structlog

from messages import errors, redaction, requests, resources
from worker.store import database, jobs, volumes

log = structlog.get_logger(__name__)


class State(enum.StrEnum):
    """How far a connection has come."""

    MAKING = "making"
    LIVE = "live"
    ENDING = "ending"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """A connection as stored; ``credentials`` hold its only secrets."""

    id: uuid.UUID
    volume_id: uuid.UUID
    connector: Mapping[str, Any]
    access_mode: resources.AccessMode
    state: State
    is_local: bool
    made_by: uuid.UUID
    """The job that began it."""
    driver_volume_type: str | None
    data: Mapping[str, Any] | None
    credentials: Mapping[str, Any] | None = dataclasses.field(repr=False)
    """``made``: what its target made it from; ``secrets``: values by their place in ``data``."""


def _from_row(row: Mapping[str, Any]) -> Connection:
    values = {field.name: row[field.name] for field in dataclasses.fields(Connection)}
    values["access_mode"] = resources.AccessMode(row["access_mode"])
    values["state"] = State(row["state"])
    return Connection(**values)


async def begin(
    store: database.Database,
    job: jobs.Job,
    volume_id: uuid.UUID,
    connector: requests.Connector,
    *,
    is_local: bool,
    credentials: Mapping[str, str],
) -> Connection:
    """Records a connection that is about to be made; the same connector gets the same again.

    Raises:
        InvalidConnector: it is connected in another mode.
        LeaseLost: the job is no longer this worker's.
    """
    connection = _from_row(
        await store.own(
            "begin_connection",
            job.id,
            job.lease_token,
            uuid.uuid4(),
            volume_id,
            connector.host,
            connector.identity,
            connector.connection_key,
            connector.properties(),
            connector.mode,
            is_local,
            {"made": dict(credentials)},
        )
    )
    if connection.access_mode != connector.mode or connection.is_local != is_local:
        raise errors.InvalidConnector(
            f"this connector is connected to volume {volume_id} in another way already "
            f"(mode {connection.access_mode}); end that connection first, or tell them apart by "
            "connection_key",
            member="mode",
            connection_id=str(connection.id),
        )
    return connection


async def live(
    store: database.Database,
    job: jobs.Job,
    connection: Connection,
    *,
    driver_volume_type: str,
    data: Mapping[str, Any],
    secrets: Mapping[str, str],
) -> Connection:
    """Keeps what the target gave for a connection.

    Raises:
        LeaseLost: the job is no longer this worker's.
    """
    row = await store.own(
        "live_connection",
        job.id,
        job.lease_token,
        connection.id,
        driver_volume_type,
        dict(data),
        {**(connection.credentials or {}), "secrets": dict(secrets)},
    )
    return _from_row(row)


async def ending(
    store: database.Database,
    job: jobs.Job,
    volume_id: uuid.UUID,
    ids: Sequence[uuid.UUID] | None = None,
) -> list[Connection]:
    """Marks connections of a volume (all, without ``ids``) as about to be undone; returns them."""
    rows = await store.fetch("ending_connections", job.id, job.lease_token, volume_id, ids)
    return [_from_row(row) for row in rows]


async def ended(store: database.Database, job: jobs.Job, connection: Connection) -> None:
    """Marks a connection as undone, and forgets its secrets."""
    await store.fetch("ended_connection", job.id, job.lease_token, connection.id)


async def count_writers(store: database.Database, volume_id: uuid.UUID) -> int:
    """How many connections there have ever been that could write to a volume."""
    [row] = await store.fetch("count_writers", volume_id)
    count: int = row["count"]
    return count


async def find(store: database.Database, connection_id: uuid.UUID) -> Connection | None:
    """One connection, ended or not."""
    row = await store.row("get_connection", connection_id)
    return None if row is None else _from_row(row)


async def find_for(
    store: database.Database, volume_id: uuid.UUID, connector: requests.Connector
) -> Connection | None:
    """The connection of a connector that has not ended."""
    row = await store.row(
        "find_connection",
        volume_id,
        connector.host or "",
        connector.identity,
        connector.connection_key,
    )
    return None if row is None else _from_row(row)


async def of_volume(store: database.Database, volume_id: uuid.UUID) -> list[Connection]:
    """A volume's connections that have not ended, the oldest first."""
    return [_from_row(row) for row in await store.fetch("volume_connections", volume_id)]


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """A connection that no job will end any more.

    Or one that has ended and whose export has stayed, which ending it again takes along if nobody
    else needs it by then.
    """

    volume_id: uuid.UUID
    connection_id: uuid.UUID | None
    """None for an export that never had one."""

    @property
    def subject(self) -> uuid.UUID:
        """What is to be ended: the connection, or the volume's export."""
        return self.connection_id or self.volume_id


async def leftovers(store: database.Database, address: str) -> list[Leftover]:
    """What jobs that have ended left of connections at an address."""
    rows = await store.fetch("left_connections", address)
    return [Leftover(row["volume_id"], row["connection_id"]) for row in rows]


async def served(
    store: database.Database, address: str
) -> list[tuple[volumes.Volume, list[Connection]]]:
    """Every volume that a backend exports, with the connections that its target serves.

    A record that cannot be read is left out: one bad volume must not keep the others away.
    """
    exported = await store.fetch("exported_volumes", address)
    by_volume: dict[uuid.UUID, list[Connection]] = {}
    for row in await store.fetch("served_connections", address):
        by_volume.setdefault(row["volume_id"], []).append(_from_row(row))
    records = [_readable(row) for row in exported]
    return [(volume, by_volume.get(volume.id, [])) for volume in records if volume is not None]


def _readable(row: database.Row) -> volumes.Volume | None:
    try:
        return volumes.from_row(row)
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        log.debug("volume.unreadable", volume_id=str(row["id"]), why=first["msg"])
        return None


def with_secrets(connection: Connection) -> dict[str, Any]:
    """A connection's data with its secrets filled in: for its connector's eyes alone."""
    return _fill(connection, lambda secret: secret)


def masked(connection: Connection) -> dict[str, Any]:
    """A connection's data with its secrets masked."""
    return _fill(connection, lambda _: redaction.MASK)


def _fill(connection: Connection, show: Callable[[str], str]) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(dict(connection.data or {}))
    secrets: Mapping[str, str] = (connection.credentials or {}).get("secrets", {})
    for path, secret in secrets.items():
        *outer, last = path.split(".")
        place = data
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = show(secret)
    return data
