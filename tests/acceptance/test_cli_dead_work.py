"""Work on dead letters as a whole: which are meant, what is left, and who may do it."""

import asyncio
import time
import uuid
from typing import Any

import pydantic
import pytest

from tests.acceptance.conftest import DeadSite
from tests.services import amqp, command, dead_letters, environment
from worker.cli import dead_lock
from worker.store import database, replays

CAST: dict[str, Any] = {"reply_to": None}
JUNK = b'{"method": "junk"'
NOWHERE = "00000000-0000-4000-8000-00000000dead"


async def _mixed(dead: dead_letters.Dead, count: int) -> list[amqp.Sent]:
    """Letters of three kinds in turn: replayable, refused, and malformed."""
    sent = []
    for number in range(count):
        match number % 3:
            case 0:
                new = {"volume": {"name": f"v{number}", "size_bytes": 1}}
                late = {"headers": {"deadline": dead_letters.LONG_AGO}, **CAST}
                one = await dead.caller.send("create_volume", dead.worker.at("sim"), new, **late)
            case 1:
                args = {"volume_id": NOWHERE}
                one = await dead.caller.send("delete_volume", dead.worker.at("sim"), args, **CAST)
            case _:
                one = await dead.caller.publish(JUNK, dead.worker.at("sim"), **CAST)
        sent.append(one)
    deadline = time.monotonic() + amqp.TIMEOUT
    while len(await dead.ids()) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    return sent


async def _letters(dead: dead_letters.Dead) -> list[tuple[str | None, bytes, dict[str, Any]]]:
    found = []
    for one in await dead.caller.letters():
        # The broker counts who has looked.
        headers = {name: one.headers[name] for name in one.headers if name != "x-delivery-count"}
        found.append((one.message_id, one.body, headers))
    return found


async def test_of_a_hundred_letters_none_is_lost_and_the_rest_keeps_its_order(
    dead: dead_letters.Dead,
) -> None:
    sent = await _mixed(dead, 100)
    ids = await dead.ordered_ids()
    assert sorted(map(str, ids)) == sorted(str(one.message_id) for one in sent)
    kinds = {one.message_id: number % 3 for number, one in enumerate(sent)}
    some = [one.message_id for one in sent[10:13]]
    for one in some:
        await dead.replay("--id", str(one), code=int(kinds[one] != 0))
    left = [one for one in ids if not (one in some and kinds[one] == 0)]
    assert await dead.ordered_ids() == left
    done = await dead.replay("--all", code=1)
    assert [one for one, _ in done] == left
    assert {(kinds[one], outcome) for one, outcome in done} == {
        (0, "replayed"),
        (1, "refused"),
        (2, "refused"),
    }
    left = [one for one in left if kinds[one] != 0]
    assert await dead.ordered_ids() == left
    done = await dead.run("discard", "--method", "delete_volume")
    assert done["totals"]["discarded"] == len([one for one in left if kinds[one] == 1])
    left = [one for one in left if kinds[one] == 2]
    assert await dead.ordered_ids() == left
    for replayable in sent[::3]:
        assert (await dead.ended(replayable))["attempt"] == 1


async def test_discarding_removes_the_letter_and_leaves_its_job(dead: dead_letters.Dead) -> None:
    first, second = await dead.late_create(), await dead.late_create()
    before = await dead.job(first)
    done = await dead.run("discard", "--id", str(first.message_id))
    assert dead_letters.outcomes(done) == [(first.message_id, "discarded")]
    assert await dead.ids() == [second.message_id]
    assert await dead.job(first) == before


async def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    sent = await _mixed(dead, 3)
    before = await dead_site[0].rows("SELECT * FROM jobs ORDER BY id")
    found = await _letters(dead)
    replayed = await dead.run("replay", "--all", "--dry-run", code=1)
    assert replayed["dry_run"] is True
    outcomes = {one["message_id"]: one["outcome"] for one in replayed["letters"]}
    assert [outcomes[one.message_id] for one in sent] == ["replayed", "refused", "refused"]
    edit = dead_letters.whole("create_volume", {"volume": {"name": "v", "size_bytes": 1}})
    only = ("--id", str(sent[2].message_id))
    assert await dead.replay(*only, "--dry-run", "--edit", edit) == [(only[1], "replayed")]
    discarded = await dead.run("discard", "--all", "--dry-run")
    assert discarded["totals"]["discarded"] == 3
    assert await _letters(dead) == found
    assert await dead_site[0].rows("SELECT * FROM jobs ORDER BY id") == before
    ended = await command.run(
        "dead", "replay", "--all", "--dry-run", "--config", dead.worker.config
    )
    assert "would be replayed" in ended.stdout
    assert "3 in, 1 replayed, 2 refused, 2 left" in ended.stdout
    assert "nothing was changed" in ended.stdout


async def test_an_edit_is_for_one_letter_and_an_id_must_be_there(dead: dead_letters.Dead) -> None:
    sent = [await dead.late_create(), await dead.late_create()]
    config = ("--config", str(dead.worker.config))
    ended = await command.run("dead", "replay", "--all", "--edit", "{}", *config)
    assert ended.code == 1
    assert "2 are meant" in ended.stderr
    for command_name in ("replay", "discard"):
        ended = await command.run("dead", command_name, "--id", "nobody", *config)
        assert ended.code == 1
        assert "no such dead letter" in ended.stderr
        done = await dead.run(command_name, "--origin", "host-z@sim")
        assert done["totals"]["left"] == 2
    assert await dead.ids() == [one.message_id for one in sent]


async def test_a_second_operator_is_told_who_is_at_work_and_until_when(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    sent = await dead.late_create()
    await dead_site[0].rows(
        "INSERT INTO operator_locks VALUES ($1, gen_random_uuid(), $2, now() + '1 minute')",
        "dead-letters",
        "anna at host-x (process 7)",
    )
    for name in ("replay", "discard"):
        ended = await command.run("dead", name, "--all", "--config", dead.worker.config)
        assert ended.code == 1
        assert "anna at host-x (process 7)" in ended.stderr
        assert "after " in ended.stderr
    assert await dead.ids() == [sent.message_id]
    assert await dead.replay("--all", "--dry-run") == [(sent.message_id, "replayed")]


async def test_the_lock_is_given_back(dead: dead_letters.Dead, dead_site: DeadSite) -> None:
    await dead.late_create()
    await dead.run("replay", "--id", "nobody", code=1)
    assert await dead_site[0].rows("SELECT FROM operator_locks") == []
    await dead.replay("--all")
    assert await dead_site[0].rows("SELECT FROM operator_locks") == []


@pytest.mark.parametrize("away", ["broker_url", "database_url"])
async def test_what_cannot_be_reached_is_told(dead: dead_letters.Dead, away: str) -> None:
    sent = await dead.late_create()
    url = {"broker_url": "amqp://127.0.0.1:1/", "database_url": "postgresql://127.0.0.1:1/x"}[away]
    env = {f"VOLUME_WORKER_{away.upper()}": url}
    for name in ("replay", "discard"):
        ended = await command.run("dead", name, "--all", "--config", dead.worker.config, env=env)
        assert ended.code == 3, ended
    assert await dead.ids() == [sent.message_id]


async def test_who_cannot_keep_the_lock_stops_working(
    installation: environment.Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_lock, "LEASE", 3.0)
    async with database.connect(pydantic.SecretStr(installation.database_url)) as store:

        async def work() -> None:
            async with dead_lock.held(store):
                # Longer than the lease: it is renewed.
                await asyncio.sleep(3.5)
                other = uuid.uuid4()
                assert await replays.take_lock(store, dead_lock.NAME, other, who="ben", lease=60)
                await installation.rows("UPDATE operator_locks SET holder = $1", other)
                await asyncio.sleep(60)

        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(work(), 20)
        assert caught.group_contains(dead_lock.LockLost)
        # What is another's by now is left alone.
        assert len(await installation.rows("SELECT FROM operator_locks")) == 1
