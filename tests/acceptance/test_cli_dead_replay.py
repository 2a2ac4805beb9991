"""Dead letters replayed: the job is carried out after all, once, and its caller hears of it."""

import asyncio
import json
import uuid
from typing import Any

import aio_pika
import pytest

from messages import topology
from tests.acceptance.conftest import DeadSite
from tests.services import amqp, command, dead_letters, environment, workers
from tests.services.dead_letters import MIB

CAST: dict[str, Any] = {"reply_to": None}
JUNK = b'{"method": "junk"'


@pytest.fixture
async def dead_alone(start_worker: workers.Starter, caller: amqp.Caller) -> dead_letters.Dead:
    """With a worker of the test's own, to be stopped."""
    return dead_letters.Dead(await start_worker(backends={"sim": workers.SIM}), caller)


async def _dead_create(dead: dead_letters.Dead) -> tuple[amqp.Sent, Any, dict[str, Any]]:
    """A call that dies of what stands in its volume's place."""
    new = dead_letters.new_volume()
    block = dead.stumbling_block(new["volume"]["id"])
    sent = await dead.caller.send("create_volume", dead.worker.at("fast"), new)
    assert not (await dead.caller.result(sent)).body["ok"]
    await dead.caller.letter(sent)
    return sent, block, new


async def test_a_job_replayed_after_its_cause_was_mended_answers_its_caller_again(
    dead: dead_letters.Dead,
) -> None:
    sent, block, new = await _dead_create(dead)
    block.unlink()
    assert await dead.replay("--id", str(sent.message_id)) == [(sent.message_id, "replayed")]
    first, second = await dead_letters.results(dead.caller, sent, 2)
    assert "replayed" not in first.body
    assert second.body["ok"]
    assert second.body["replayed"] is True
    assert second.body["job_id"] == first.body["job_id"] == sent.message_id
    assert second.message_id != first.message_id
    volume = second.body["result"]
    assert (volume["id"], volume["status"]) == (new["volume"]["id"], "available")
    job = await dead.job(sent)
    assert (job["state"], job["attempt"], job["edited"]) == ("succeeded", 1, False)
    assert job["error"] is None
    assert await dead.ids() == []
    # Whoever repeats the request gets the last word.
    await dead.caller.send(
        "create_volume", dead.worker.at("fast"), new, message_id=sent.message_id,
        correlation_id=sent.correlation_id,
    )  # fmt: skip
    third = (await dead_letters.results(dead.caller, sent, 3))[2]
    assert (third.message_id, third.body) == (second.message_id, second.body)
    await dead.caller.call("delete_volume", volume["address"], {"volume_id": volume["id"]})


async def test_a_second_death_tells_of_both(dead: dead_letters.Dead) -> None:
    sent, block, _ = await _dead_create(dead)
    before = await dead.caller.letter(sent)
    await dead.replay("--reason", "DeviceUnavailable")
    _, second = await dead_letters.results(dead.caller, sent, 2)
    assert not second.body["ok"]
    assert second.body["replayed"] is True
    letter = await dead.caller.letter(sent)
    assert letter.headers["attempts"] == 2
    assert letter.headers["replays"] == 1
    assert letter.headers["first-failed-at"] == before.headers["first-failed-at"]
    [life] = letter.headers["replay-history"]
    assert (life["reason"], life["attempts"]) == ("DeviceUnavailable", 1)
    assert life["last-error"] == before.headers["last-error"]
    assert (await dead.job(sent))["attempt"] == 1
    [shown] = (await dead.run("show", str(sent.message_id)))["letters"]
    assert (shown["replays"], shown["attempts"]) == (1, 2)
    assert shown["headers"]["replay-history"] == [life]
    block.unlink()
    await dead.replay("--all")
    third = (await dead_letters.results(dead.caller, sent, 3))[2]
    assert third.body["ok"]
    volume = third.body["result"]
    await dead.caller.call("delete_volume", volume["address"], {"volume_id": volume["id"]})


async def test_an_extend_goes_on_with_what_it_left_in_an_error(dead: dead_letters.Dead) -> None:
    new = dead_letters.new_volume()
    at = {"volume_id": new["volume"]["id"]}
    await dead.caller.call("create_volume", dead.worker.at("fast"), new)
    path = dead.worker.folder / "fast" / f"volume-{new['volume']['id']}"
    path.rename(path.with_suffix(".away"))
    dead.stumbling_block(new["volume"]["id"])
    sent = await dead.caller.send(
        "extend_volume", dead.worker.at("fast"), {**at, "new_size_bytes": 2 * MIB}
    )
    await dead.caller.letter(sent)
    path.unlink()
    path.with_suffix(".away").rename(path)
    record = await dead.caller.call("get_volume", dead.worker.at("fast"), at)
    assert record["status"] == "error_extending"
    await dead.replay("--method", "extend_volume")
    second = (await dead_letters.results(dead.caller, sent, 2))[1]
    assert second.body["ok"]
    assert second.body["result"]["status"] == "available"
    assert second.body["result"]["size_bytes"] == path.stat().st_size == 2 * MIB
    await dead.caller.call("delete_volume", dead.worker.at("fast"), at)


async def test_edited_arguments_are_carried_out_and_the_first_request_still_is_the_same_one(
    dead: dead_letters.Dead,
) -> None:
    new = {"volume": {"name": "v", "size_bytes": 2**60, "metadata": {"a": "1", "b": "2"}}}
    sent = await dead.caller.send("create_volume", dead.worker.at("fast"), new, **CAST)
    await dead.caller.letter(sent)
    for edit in ('{"volume": {"size_bytes": "large"}}', '{"method": "delete_volume"}'):
        assert await dead.replay("--all", "--edit", edit, code=1) == [(sent.message_id, "refused")]
    edit = json.dumps({"volume": {"size_bytes": MIB, "metadata": {"a": None}}})
    assert await dead.replay("--all", "--edit", edit) == [(sent.message_id, "replayed")]
    job = await dead.ended(sent)
    assert job["edited"] is True
    assert job["args"]["volume"] == {"name": "v", "size_bytes": MIB, "metadata": {"b": "2"}}
    result = await dead.caller.call(
        "create_volume", dead.worker.at("fast"), new, message_id=sent.message_id
    )
    assert result == job["result"]
    assert (result["size_bytes"], result["metadata"]) == (MIB, {"b": "2"})
    await dead.caller.call("delete_volume", dead.worker.at("fast"), {"volume_id": result["id"]})


async def test_a_letter_whose_volume_has_moved_on_stays(dead: dead_letters.Dead) -> None:
    new = dead_letters.new_volume()
    volume_id = new["volume"]["id"]
    await dead.caller.call("create_volume", dead.worker.at("sim"), new)
    sent = await dead.late_extend(volume_id, 2 * MIB)
    args = {"volume_id": volume_id, "new_size_bytes": 3 * MIB}
    other = await dead.caller.send("extend_volume", dead.worker.at("sim"), args)
    await dead.caller.result(other)
    before = await dead.job(sent)
    done = await dead.run("replay", "--all", code=1)
    [letter] = done["letters"]
    assert letter["outcome"] == "refused"
    for word in (volume_id, "extend_volume", str(other.message_id)):
        assert word in letter["text"]
    assert done["totals"]["left"] == 1
    await dead.caller.call("delete_volume", dead.worker.at("sim"), {"volume_id": volume_id})
    [letter] = (await dead.run("replay", "--all", code=1))["letters"]
    assert "VolumeNotFound" in letter["text"]
    assert await dead.ids() == [sent.message_id]
    assert await dead.job(sent) == before


# Messages that never became jobs


async def test_a_malformed_message_is_mended_and_carried_out_under_its_id(
    dead: dead_letters.Dead,
) -> None:
    sent = await dead.caller.publish(JUNK, dead.worker.at("sim"))
    await dead.caller.letter(sent)
    [letter] = (await dead.run("replay", "--all", code=1))["letters"]
    assert "--edit" in letter["text"]
    assert await dead.replay("--all", "--edit", '{"name": "x"}', code=1) == [
        (sent.message_id, "refused")
    ]
    edit = dead_letters.whole("create_volume", dead_letters.new_volume())
    assert await dead.replay("--all", "--edit", edit) == [(sent.message_id, "replayed")]
    first, second = await dead_letters.results(dead.caller, sent, 2)
    assert not first.body["ok"]
    assert second.body["ok"]
    assert second.body["job_id"] == sent.message_id
    assert await dead.ids() == []


async def test_one_argument_of_a_message_is_mended(dead: dead_letters.Dead) -> None:
    args = {"volume": {"name": "v", "size_bytes": "1"}}
    sent = await dead.caller.send("create_volume", dead.worker.at("sim"), args, **CAST)
    await dead.caller.letter(sent)
    await dead.replay("--all", "--edit", '{"volume": {"size_bytes": 1}}')
    assert (await dead.ended(sent))["args"] == {"volume": {"name": "v", "size_bytes": 1}}


async def test_a_message_without_a_valid_id_gets_one_and_keeps_its_caller(
    dead: dead_letters.Dead,
) -> None:
    sent = await dead.caller.send(
        "list_volumes", dead.worker.at("sim"), message_id="no uuid", correlation_id=None
    )
    await dead.caller.letter(sent)
    [letter] = (await dead.run("replay", "--all"))["letters"]
    _, second = await dead_letters.results(dead.caller, sent, 2)
    assert second.body["ok"]
    assert second.body["job_id"] in letter["text"]
    assert uuid.UUID(second.body["job_id"])


async def test_what_has_no_way_back_stays_with_the_reason(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    caller, at = dead.caller, dead.worker.at("sim")
    not_built = await caller.send("backup_volume", at, {}, **CAST)
    reserved = await caller.send(
        "list_volumes", at, reply_to=f"{dead_site[0].namespace}.dead", message_id=str(uuid.uuid4())
    )
    first = await caller.send("create_volume", at, dead_letters.new_volume())
    await caller.result(first)
    reused = await caller.send(
        "create_volume", at, dead_letters.new_volume(), message_id=first.message_id, **CAST
    )
    sent = [not_built, reserved, reused]
    for one in sent:
        await caller.letter(one)
    done = await dead.run("replay", "--all", code=1)
    texts = {one["message_id"]: one["text"] for one in done["letters"]}
    assert "not built" in texts[not_built.message_id]
    assert "reply_to" in texts[reserved.message_id]
    assert "another request" in texts[reused.message_id]
    assert {one["outcome"] for one in done["letters"]} == {"refused"}
    assert set(await dead.ids()) == {one.message_id for one in sent}


async def test_a_letter_for_an_address_without_a_queue_stays(
    dead_alone: dead_letters.Dead, installation: environment.Installation
) -> None:
    dead = dead_alone
    sent = await dead.caller.publish(JUNK, dead.worker.at("sim"), **CAST)
    await dead.caller.letter(sent)
    await dead.worker.terminate()
    async with await aio_pika.connect(installation.broker_url) as connection:
        names = topology.Topology(installation.namespace)
        await (await connection.channel()).queue_delete(names.queue(dead.worker.at("sim")))
    edit = ("--edit", dead_letters.whole("list_volumes", {}))
    for arguments in (("--dry-run",), ()):
        done = await dead.run("replay", "--all", *edit, *arguments, code=1)
        assert "no queue" in done["letters"][0]["text"]
    assert await dead.ids() == [sent.message_id]


async def test_a_letter_of_the_brokers_making_is_sent_again(
    dead_alone: dead_letters.Dead, installation: environment.Installation
) -> None:
    dead = dead_alone
    await dead.worker.terminate()
    new = dead_letters.new_volume()
    sent = await dead.caller.send(
        "create_volume", dead.worker.at("sim"), new, expiration=600,
        headers={"deadline": dead_letters.LONG_AGO, "mine": 1},
    )  # fmt: skip
    async with await aio_pika.connect(installation.broker_url) as connection:
        names = topology.Topology(installation.namespace)
        queue = await (await connection.channel()).get_queue(names.queue(dead.worker.at("sim")))
        message = await queue.get(timeout=10)
        assert message is not None
        await message.reject(requeue=False)
        await dead.caller.letter(sent)
        await dead.replay("--reason", "rejected")
        again = await queue.get(timeout=10)
        assert again is not None
        assert again.body == message.body
        assert set(again.headers) - {"x-delivery-count"} == {"mine"}
        assert (again.message_id, again.reply_to) == (message.message_id, message.reply_to)
        assert again.correlation_id == message.correlation_id
        assert again.expiration is None
        await again.nack(requeue=True)
    assert await dead.ids() == []
    await dead.worker.start()
    assert (await dead.caller.only_result(sent)).body["ok"]


async def test_a_letter_whose_job_is_forgotten_is_sent_again(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    sent = await dead.late_create()
    await dead_site[0].rows("DELETE FROM jobs WHERE id = $1", uuid.UUID(sent.message_id))
    assert await dead.replay("--all") == [(sent.message_id, "replayed")]
    assert (await dead.ended(sent))["attempt"] == 1


# What happens meanwhile


async def test_a_command_killed_after_a_job_was_revived_has_it_run_once(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    sent = await dead.late_create()
    dead.killed_before_ack("replay", "--all")
    job = await dead.ended(sent)
    refused = await command.run("dead", "replay", "--all", "--config", dead.worker.config)
    assert refused.code == 1
    assert "at work on the dead letters" in refused.stderr
    await dead_letters.free_lock(dead_site[0])
    assert await dead.ids() == [sent.message_id]
    edit = ("--edit", '{"volume": {"name": "other"}}')
    [letter] = (await dead.run("replay", "--all", *edit))["letters"]
    assert letter["outcome"] == "already replayed"
    assert "not edited" in letter["text"]
    assert await dead.ids() == []
    assert await dead.job(sent) == job


async def test_a_command_killed_after_a_message_was_sent_has_it_run_once(
    dead: dead_letters.Dead, dead_site: DeadSite
) -> None:
    sent = await dead.caller.publish(JUNK, dead.worker.at("sim"), message_id="odd", **CAST)
    await dead.caller.letter(sent)
    new = {"volume": {"name": "only one", "size_bytes": MIB}}
    edit = ("--edit", dead_letters.whole("create_volume", new))
    dead.killed_before_ack("replay", "--all", *edit)
    await dead_letters.free_lock(dead_site[0])
    assert await dead.replay("--all", *edit) == [("odd", "replayed")]
    assert await dead.ids() == []
    made = await dead.caller.call("list_volumes", dead.worker.at("sim"))
    assert [one["name"] for one in made["volumes"]].count("only one") == 1


async def test_a_replay_waits_for_letters_that_somebody_is_looking_at(
    dead: dead_letters.Dead,
) -> None:
    sent = await dead.late_create()
    async with dead.caller.peeking() as held:
        assert len(held) == 1
        seen = await dead.run("list")
        assert (seen["letters"], seen["is_all"]) == ([], False)
        replaying = asyncio.create_task(dead.replay("--all"))
        await asyncio.wait([replaying], timeout=2)
        assert not replaying.done()
    assert await replaying == [(sent.message_id, "replayed")]


async def test_two_operators_at_once_replay_each_letter_once(dead: dead_letters.Dead) -> None:
    sent = [await dead.late_create(f"v{number}") for number in range(10)]
    both = await asyncio.gather(
        *(
            command.run("dead", "replay", "--all", "--json", "--config", dead.worker.config)
            for _ in range(2)
        )
    )
    done = [one for ended in both if ended.stdout for one in dead_letters.outcomes(ended.data)]
    assert sorted(done) == sorted((one.message_id, "replayed") for one in sent)
    assert all(ended.code == 0 or "at work" in ended.stderr for ended in both)
    for one in sent:
        assert (await dead.ended(one))["attempt"] == 1
