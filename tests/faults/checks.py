"""What must hold whatever died: nothing lost, nothing done twice, nothing left, the right statuses.

Each look notes what it finds wrong under its kind and goes on, so that the numbers are complete.
"""

import asyncio
import dataclasses
import enum
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Final

from tests.faults import world
from tests.services import amqp, children, nbd_clients, volumes

MASK: Final = "***"
SETTLING: Final = 20.0
"""Seconds for what is left to be swept up; the outbox is looked through every five."""
_UNFINISHED: Final = """
SELECT 'job ' || method || ' ' || state FROM jobs WHERE finished_at IS NULL
UNION ALL SELECT 'lock of ' || job_id FROM job_locks
UNION ALL SELECT 'outbox of ' || coalesce(job_id::text, 'a letter') FROM outbox
UNION ALL SELECT 'connection ' || state || ' of ' || volume_id FROM connections
    WHERE state IN ('making', 'ending')
UNION ALL SELECT 'export of ' || id || ' that no connection needs' FROM volumes
    WHERE export = 'implicit' AND NOT EXISTS (
        SELECT FROM connections
        WHERE volume_id = volumes.id AND state <> 'ended' AND NOT is_local)
UNION ALL SELECT 'attachment ' || status FROM attachments WHERE status = 'attaching'
"""
_PASSING: Final = ("creating", "deleting", "extending", "attaching", "detaching", "maintenance")
"""Statuses in which no volume may stay."""


class Kind(enum.StrEnum):
    """Which promise is broken."""

    LOST = "lost"
    """There is no answer, not the right one, or the work is not done."""
    TWICE = "twice"
    """The work is done more than once, or told differently a second time."""
    LEFT = "left"
    """Something that nobody owns any more."""
    STATUS = "status"
    """A volume's or a job's status is not what it should be."""


@dataclasses.dataclass
class Findings:
    """What was found wrong."""

    all: list[tuple[Kind, str]] = dataclasses.field(default_factory=list)

    def note(self, kind: Kind, text: str) -> None:
        """Notes something that is wrong."""
        self.all.append((kind, text))

    def compare(self, kind: Kind, what: str, found: object, wanted: object) -> None:
        """Notes a difference."""
        if found != wanted:
            self.note(kind, f"{what}: {found!r}, should be {wanted!r}")

    def __str__(self) -> str:
        return "\n".join(f"{kind}: {text}" for kind, text in self.all)


# The answer


async def answer(
    made: world.World, sent: amqp.Sent, at: str, found: Findings
) -> dict[str, Any] | None:
    """The result of a request that must succeed, or None where there is none."""
    try:
        reply = await made.caller.result(sent)
    except AssertionError as error:
        found.note(Kind.LOST, str(error))
        return None
    if not reply.body["ok"]:
        found.note(Kind.LOST, f"it failed: {reply.body['error']}")
        return None
    job = await made.caller.call("get_job", at, {"job_id": sent.message_id})
    found.compare(Kind.STATUS, "the job", job["state"], "succeeded")
    result: dict[str, Any] = reply.body["result"]
    found.compare(Kind.TWICE, "what get_job tells", _masked(job["result"]), _masked(result))
    return result


async def repeats(
    made: world.World, method: str, request: world.Request, sent: amqp.Sent, found: Findings
) -> None:
    """The same request once more gets the same result, which has one identity whatever happened."""
    before = len(made.caller.results(sent))
    await made.caller.send(
        method,
        request.address,
        request.args,
        message_id=sent.message_id,
        correlation_id=sent.correlation_id,
    )

    async def has_come() -> bool:
        return len(made.caller.results(sent)) > before

    try:
        await world.until(has_come, what="the answer to a repeat")
    except AssertionError as error:
        found.note(Kind.LOST, str(error))
    await asyncio.sleep(amqp.QUIET)
    results = made.caller.results(sent)
    found.compare(Kind.TWICE, "identities", len({reply.message_id for reply in results}), 1)
    for reply in results[1:]:
        found.compare(Kind.TWICE, "the answer again", reply.body, results[0].body)


def _masked(value: Any) -> Any:
    """Without what a stored result has no copy of."""
    if not isinstance(value, dict):
        return value
    return {
        name: MASK if name in {"auth_password", "auth_username"} else _masked(one)
        for name, one in value.items()
    }


async def told(
    events: amqp.Events,
    request: world.Request,
    result: dict[str, Any] | None,
    sent: amqp.Sent,
    found: Findings,
) -> None:
    """The last event of the job and of each volume is the one that tells how it ended."""
    wanted = {f"job.{sent.message_id}.": "succeeded"}
    for one in request.expected:
        wanted[f"volume.{one.id or (result or {}).get('id')}."] = one.status or "deleted"

    def last() -> dict[str, str | None]:
        return {key: next((e.status for e in reversed(events.of(key))), None) for key in wanted}

    deadline = time.monotonic() + 5
    while last() != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    found.compare(Kind.LOST, "the last events", last(), wanted)


# The storage


async def volume(
    made: world.World, wanted: world.Expected, result: dict[str, Any] | None, found: Findings
) -> None:
    """One volume is as after one run: its record, its file, its content."""
    volume_id = wanted.id or (result or {}).get("id")
    if volume_id is None:
        return
    subject = volumes.Volume(volume_id, wanted.address, wanted.size_bytes)
    try:
        record = await made.volumes.record(subject)
    except amqp.Failed as error:
        if wanted.status is not None or error.code != "VolumeNotFound":
            found.note(Kind.LOST, f"the volume: {error}")
        record = None
    if record is None:
        return
    found.compare(Kind.STATUS, "the volume", record["status"], wanted.status)
    attached = "attached" if wanted.attachments else "detached"
    found.compare(Kind.STATUS, "attach_status", record["attach_status"], attached)
    found.compare(Kind.TWICE, "its size", record["size_bytes"], wanted.size_bytes)
    for name in ("connections", "attachments"):
        kind = Kind.LOST if len(record[name]) < getattr(wanted, name) else Kind.LEFT
        found.compare(kind, name, len(record[name]), getattr(wanted, name))
    kind = Kind.LOST if wanted.exported else Kind.LEFT
    found.compare(kind, "exported", record["exported"], wanted.exported)
    if wanted.content is not None and await made.volumes.content(subject) != wanted.content:
        found.note(Kind.LOST, f"the content of {wanted.address} is not the source's")


async def storage(
    made: world.World, request: world.Request, result: dict[str, Any] | None, found: Findings
) -> None:
    """Each volume, and that there is no other, neither in the records nor on the storage."""
    for wanted in request.expected:
        await volume(made, wanted, result, found)
    there = {
        one.id or (result or {}).get("id"): one.size_bytes
        for one in request.expected
        if one.status is not None
    }
    listed = await made.site.rows("SELECT id::text AS id, status FROM volumes")
    found.compare(Kind.TWICE, "the records", {row["id"] for row in listed}, set(there))
    for row in listed:
        if row["status"] in _PASSING:
            found.note(Kind.STATUS, f"volume {row['id']} is {row['status']}")
    on_disk: dict[str, int] = {}
    for path in _files(made):
        on_disk[path.name.removeprefix("volume-")] = path.stat().st_size
    if not any(one.address.endswith("@sim") for one in request.expected):
        kind = Kind.LOST if set(there) - set(on_disk) else Kind.TWICE
        found.compare(kind, "the files", on_disk, there)


async def served(made: world.World, found: Findings) -> None:
    """The targets serve what the records say, no more and no less."""
    rows = await made.site.rows(
        "SELECT connections.id::text AS id, volumes.id::text AS volume, address"
        " FROM connections JOIN volumes ON volumes.id = volume_id"
        " WHERE NOT is_local AND state <> 'ended'"
    )
    for worker in made.hosts.values():
        recorded = sorted(row["id"] for row in rows if row["address"] == worker.at("fast"))
        names = await nbd_clients.names(f"nbd://127.0.0.1:{worker.nbd_port}")
        kind = Kind.LOST if set(recorded) - set(names) else Kind.LEFT
        found.compare(kind, f"NBD exports of {worker.host}", names, recorded)


# What is left


async def settled(made: world.World, found: Findings) -> None:
    """Everything that was begun has come to its end, in a while."""
    deadline = time.monotonic() + SETTLING
    while (left := await made.site.rows(_UNFINISHED)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for row in left:
        found.note(Kind.LEFT, row[0])


async def nothing(made: world.World, found: Findings) -> None:
    """After all volumes are removed and all workers have ended, there is nothing."""
    for path in _files(made):
        found.note(Kind.LEFT, f"file {path}")
    for worker in made.hosts.values():
        left = await _gone(worker.leftovers)
        if left:
            found.note(Kind.LEFT, f"{worker.host} left {left}")
            worker.leaves_something = True
        for kind in ("iscsi", "nbd"):
            folder = worker.state_dir / "connectors" / kind
            if folder.exists() and (entries := os.listdir(folder)):  # noqa: PTH208 - names
                found.note(Kind.LEFT, f"attachments {entries} in {folder}")
    if made.daemon is not None:
        if "Target " in (shown := made.daemon.targets()):
            found.note(Kind.LEFT, f"targets: {shown}")
        accounts = made.daemon.adm("--op", "show", "--mode", "account")
        found.compare(Kind.LEFT, "accounts", accounts.strip(), "")


async def _gone(look: Callable[[], list[children.Found]]) -> list[children.Found]:
    deadline = time.monotonic() + world.LEASE
    while (left := look()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


def _files(made: world.World) -> list[pathlib.Path]:
    return [
        path
        for worker in made.hosts.values()
        for backend in ("fast", "iscsi")
        for path in (worker.folder / backend).glob("*")
        if not path.name.startswith(".")
    ]
