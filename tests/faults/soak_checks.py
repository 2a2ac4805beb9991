"""What must hold once the soak has come to rest, and the numbers of it.

Each look notes what it finds wrong and goes on, so that all of it is told.
"""

import asyncio
import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from messages import requests
from tests.faults import checks, soak_load, soak_troubles, soak_world, world
from tests.faults.checks import Findings, Kind
from tests.faults.soak_calls import Call, Ledger, Via
from tests.services import amqp, reconciling

RESTING: Final = 120.0
"""Seconds for all jobs to end once nobody asks any more; a retry may wait for a minute."""
_STATES: Final = "SELECT id::text, method, state, attempt, reply_to IS NULL AS is_cast FROM jobs"
_VOLUMES: Final = "SELECT id::text, address, size_bytes, status FROM volumes"


@dataclasses.dataclass
class Rest:
    """The soak once it is over: what was asked, and what is there."""

    site: soak_world.Site
    load: soak_load.Load
    found: Findings = dataclasses.field(default_factory=Findings)
    jobs: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    letters: int = 0

    @property
    def ledger(self) -> Ledger:
        """All that was asked."""
        return self.load.ledger


async def everything(rest: Rest) -> None:
    """Looks at all of it; the workers run when this begins and have ended after it."""
    site = rest.site.installation
    async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
        made = world.World(site, rest.site.start, caller, rest.site.folder, rest.site.daemon)
        made.hosts = rest.site.hosts
        await _rests(rest)
        await checks.settled(made, rest.found)
        rows = await site.rows(_STATES)
        rest.jobs = {row["id"]: dict(row) for row in rows}
        _answers(rest)
        _records(rest)
        await _letters(rest, caller)
        await _volumes(rest)
        await checks.served(made, rest.found)
        await _reconciled(rest)
        await _removed(rest, made)
        await made.stop()
        await checks.nothing(made, rest.found)
        _ended_by_themselves(rest)


def _ended_by_themselves(rest: Rest) -> None:
    """No worker has ended but where it was ended."""
    for host, worker in rest.site.hosts.items():
        for line in worker.last_words():
            if line.startswith("volume-worker:"):
                rest.found.note(Kind.LOST, f"{host}: {line}")


async def _rests(rest: Rest) -> None:
    """No job is left that has not ended."""
    deadline = time.monotonic() + RESTING
    query = "SELECT id::text, method, state, attempt FROM jobs WHERE finished_at IS NULL"
    while (left := await rest.site.installation.rows(query)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    for row in left:
        rest.found.note(Kind.LOST, f"the job has not ended: {dict(row)}")


# What was asked


def _answers(rest: Rest) -> None:
    """Each call is answered once, or its result can be read; and as it should be."""
    for call in rest.ledger.calls:
        if call.via is Via.CAST:
            continue
        if call.outcome is None:
            rest.found.note(Kind.LOST, f"no answer: {call}")
            continue
        usual = call.expects or soak_load.USUAL
        if call.outcome not in usual:
            rest.found.note(Kind.STATUS, f"not as it should be: {call} {call.replies[:1]}")
        identities = {reply.message_id for reply in call.replies}
        if len(identities) > 1:
            rest.found.note(Kind.TWICE, f"{len(identities)} answers: {call} {call.replies}")
        if call.via is Via.PLAIN and not call.replies and not call.queue_lost:
            rest.found.note(Kind.LOST, f"no reply, though its queue was there always: {call}")
        if _has_one_result(call) and any(one.body != call.replies[0].body for one in call.replies):
            rest.found.note(Kind.TWICE, f"different answers: {call} {call.replies}")


def _has_one_result(call: Call) -> bool:
    """Whether its result is remembered, with what it holds: secrets go with their connection."""
    return call.has_job and call.method not in ("initialize_connection", "get_volume_stats")


def _records(rest: Rest) -> None:
    """The records say what the callers were told; each cast has ended."""
    for call in rest.ledger.calls:
        job = rest.jobs.get(call.id)
        if call.via is Via.CAST and job is None and call.has_job:
            rest.found.note(Kind.LOST, f"a cast without a trace: {call}")
        if call.via is Via.CAST or not call.has_job or call.outcome is None:
            continue
        if job is None:
            if call.is_ok and call.method != "get_volume_stats":
                rest.found.note(Kind.LOST, f"no record of it: {call}")
        elif call.is_ok != (job["state"] == "succeeded"):
            rest.found.note(Kind.STATUS, f"its record says {job['state']}: {call}")


async def _letters(rest: Rest, caller: amqp.Caller) -> None:
    """The dead letters are those of dead jobs, of failed casts, and of what was no request."""
    wanted = {
        job_id
        for job_id, job in rest.jobs.items()
        if job["state"] == "dead" or (job["state"] == "failed" and job["is_cast"])
    }
    malformed = {"UnknownMethod", "UnsupportedVersion"}
    wanted |= {
        call.id
        for call in rest.ledger.calls
        if call.body is not None or malformed & set(call.expects)
    }
    letters = await caller.letters()
    rest.letters = len(letters)
    told = {letter.message_id for letter in letters}
    for missing in wanted - told:
        rest.found.note(Kind.LOST, f"no dead letter of {missing}: {rest.jobs.get(missing)}")
    for letter in letters:
        if letter.message_id not in wanted:
            job = rest.jobs.get(letter.message_id or "")
            rest.found.note(Kind.LEFT, f"a dead letter for nothing: {job} {letter}")


# What is there


async def _volumes(rest: Rest) -> None:
    """Those that were made are there, in statuses that last, with what was copied into them."""
    there = {row["id"]: row for row in await rest.site.installation.rows(_VOLUMES)}
    for row in there.values():
        # A cancelled delete whose data was touched leaves error_deleting, which lasts.
        is_passing = row["status"].endswith("ing") and not row["status"].startswith("error")
        if is_passing or row["status"] == "maintenance":
            rest.found.note(Kind.STATUS, f"volume {row['id']} is {row['status']}")
    expected = {one.volume.id for one in rest.load.sources} | _made(rest.ledger.calls)
    gone = {one.args["volume_id"] for one in _of(rest.ledger.calls, "delete_volume") if one.is_ok}
    for missing in expected - gone - set(there):
        rest.found.note(Kind.LOST, f"volume {missing} is gone")
    for left in set(there) & gone:
        rest.found.note(Kind.LEFT, f"volume {left} was deleted: {dict(there[left])}")
    for more in set(there) - expected:
        if not there[more]["status"].startswith("error"):
            rest.found.note(Kind.TWICE, f"nobody was told of volume {dict(there[more])}")
    kept: list[soak_load.Owned | soak_load.Source] = [*rest.load.owned, *rest.load.sources]
    for one in kept:
        if one.content is not None and one.volume.id in there:
            path = rest.site.path(one.volume.id, one.volume.address)
            if await asyncio.to_thread(_beginning, path, len(one.content)) != one.content:
                rest.found.note(Kind.LOST, f"the content of {one.volume} is not its source's")


def _made(calls: Iterable[Call]) -> set[str]:
    return {call.result["id"] for call in _of(calls, "create_volume") if call.is_ok}


def _of(calls: Iterable[Call], method: str) -> list[Call]:
    return [call for call in calls if call.method == method]


def _beginning(path: pathlib.Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


async def _reconciled(rest: Rest) -> None:
    """``volume-worker reconcile`` finds nothing on any host."""
    workers = rest.site.hosts.values()
    for worker, answer in zip(
        workers, await asyncio.gather(*map(reconciling.reconcile, workers)), strict=True
    ):
        if answer.code or answer.findings:
            rest.found.note(Kind.LEFT, f"reconcile on {worker.host}: {answer}")


async def _removed(rest: Rest, made: world.World) -> None:
    """Everything can be removed, and then there is nothing in the records either."""
    for row in await rest.site.installation.rows(_VOLUMES):
        made.volumes.adopt(dict(row))
    try:
        await made.volumes.clean()
    except AssertionError as error:
        rest.found.note(Kind.LEFT, f"what cannot be removed: {error}")
    await checks.settled(made, rest.found)
    for table in ("volumes", "connections", "attachments", "outbox", "job_locks"):
        [[count]] = await rest.site.installation.rows(f"SELECT count(*) FROM {table}")
        if count:
            rest.found.note(Kind.LEFT, f"{count} rows in {table}")


# The numbers


def numbers(rest: Rest, troubles: soak_troubles.Troubles) -> list[str]:
    """The tables as text."""
    outcomes: dict[str, collections.Counter[str]] = {}
    for call in rest.ledger.calls:
        method = call.method if call.method in requests.METHODS else "(no method)"
        counts = outcomes.setdefault(method, collections.Counter())
        counts["cast" if call.via is Via.CAST else call.outcome or "no answer"] += 1
    lines = [f"{'asked':<24}{'calls':>7}{'ok':>7}  otherwise"]
    for method, counts in sorted(outcomes.items()):
        others = ", ".join(f"{n} {code}" for code, n in counts.most_common() if code != "ok")
        lines.append(f"{method:<24}{counts.total():>7}{counts['ok']:>7}  {others}")
    calls = rest.ledger.calls
    vias = collections.Counter(call.via for call in calls)
    states = collections.Counter(job["state"] for job in rest.jobs.values())
    lines += [
        "",
        f"{len(calls)} requests: " + ", ".join(f"{vias[via]} by {via}" for via in Via),
        f"answered by get_job: {sum(call.by_record for call in calls)}; "
        f"sent again: {sum(call.repeats for call in calls)}; "
        f"replies that came twice: {sum(max(0, len(call.replies) - 1) for call in calls)}",
        f"{len(rest.jobs)} jobs: " + ", ".join(f"{n} {state}" for state, n in states.most_common()),
        f"attempts beyond the first: {sum(max(0, j['attempt'] - 1) for j in rest.jobs.values())}",
        f"dead letters: {rest.letters}",
        "errors logged: " + (", ".join(f"{n} {what}" for what, n in _logged(rest)) or "none"),
        "",
        *(f"{kind:<24}{troubles.counts[kind]:>7}" for kind in soak_troubles.Kind),
        f"{'all troubles':<24}{troubles.counts.total():>7}",
        "",
        f"promises broken: {len(rest.found.all)}",
    ]
    return lines


def _logged(rest: Rest) -> list[tuple[str, int]]:
    """The events that workers have logged as errors, the most frequent first."""
    workers = rest.site.hosts.values()
    texts = (line for worker in workers for line in worker.log.read_text().splitlines())
    # A worker that gets kill -9 may leave half a line, and Python's own words are none.
    lines = (json.loads(text) for text in texts if text.startswith("{") and text.endswith("}"))
    return collections.Counter(
        line["event"].partition("\n")[0] for line in lines if line["level"] == "error"
    ).most_common()


async def remaining(load: soak_load.Load, tasks: Iterable[asyncio.Task[None]]) -> list[str]:
    """Waits until those who ask have heard of all they asked; returns what keeps them."""
    _, pending = await asyncio.wait(list(tasks), timeout=RESTING)
    return [f"it waits still: {call}" for call in load.ledger.pending()] if pending else []
