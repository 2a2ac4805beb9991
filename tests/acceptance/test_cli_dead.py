"""Dead letters on the command line: shown, and left as they are."""

import json
import uuid
from typing import Any

import aio_pika
import pytest

from messages import topology
from tests.services import amqp, command, environment, raw_amqp, workers

NOWHERE = "00000000-0000-4000-8000-00000000dead"
CAST: dict[str, Any] = {"reply_to": None}
ESCAPE = "\x1b[31m"


@pytest.fixture
async def worker(start_worker: workers.Starter) -> workers.Worker:
    return await start_worker(backends={"sim": workers.SIM})


async def _list(worker: workers.Worker, *arguments: str) -> list[dict[str, Any]]:
    ended = await command.run("dead", "list", "--json", "--config", worker.config, *arguments)
    assert ended.code == 0, ended.stderr
    found: list[dict[str, Any]] = ended.data["letters"]
    return found


async def _casts(caller: amqp.Caller, worker: workers.Worker, count: int) -> list[amqp.Sent]:
    """Casts that fail, one after the other."""
    sent = []
    for _ in range(count):
        one = await caller.send("delete_volume", worker.at("sim"), {"volume_id": NOWHERE}, **CAST)
        await caller.letter(one)
        sent.append(one)
    return sent


async def test_an_empty_queue_is_an_empty_list(worker: workers.Worker) -> None:
    assert await _list(worker) == []
    ended = await command.run("dead", "show", "--config", worker.config)
    assert ended.code == 1


async def test_a_namespace_without_workers_is_told(
    installation: environment.Installation,
) -> None:
    env = {
        "VOLUME_WORKER_BROKER_URL": installation.broker_url,
        "VOLUME_WORKER_NAMESPACE": installation.namespace,
    }
    ended = await command.run("dead", "list", env=env)
    assert ended.code == 1
    assert f"{installation.namespace}.dead" in ended.stderr


async def test_looking_neither_loses_nor_reorders(
    worker: workers.Worker, caller: amqp.Caller
) -> None:
    sent = await _casts(caller, worker, 7)
    ids = [one.message_id for one in sent]
    for arguments in ([], ["--limit", "2"], ["--limit", "5"], ["--id", str(ids[3])], ["--all"]):
        found = [one["message_id"] for one in await _list(worker, *arguments)]
        match arguments:
            case ["--limit", count]:
                assert found == ids[: int(count)]
            case ["--id", _]:
                assert found == [ids[3]]
            case _:
                assert found == ids
    assert [letter.message_id for letter in await caller.letters()] == ids


async def test_a_letter_is_listed_and_shown_with_its_reason(
    worker: workers.Worker, caller: amqp.Caller
) -> None:
    [sent] = await _casts(caller, worker, 1)
    [listed] = await _list(worker)
    assert listed["message_id"] == listed["job_id"] == sent.message_id
    assert listed["reason"] == "VolumeNotFound"
    assert listed["origin"] == worker.at("sim")
    assert listed["method"] == "delete_volume"
    assert listed["attempts"] == 1
    assert listed["made_by_broker"] is False
    assert NOWHERE in listed["last_error"]
    ended = await command.run(
        "dead", "show", str(sent.message_id), "--json", "--config", worker.config
    )
    [shown] = ended.data["letters"]
    assert shown["body"]["args"] == {"volume_id": NOWHERE}
    assert shown["headers"]["reason"] == "VolumeNotFound"
    ended = await command.run("dead", "list", "--config", worker.config)
    assert "VolumeNotFound" in ended.stdout


async def test_filters_choose(worker: workers.Worker, caller: amqp.Caller) -> None:
    await _casts(caller, worker, 1)
    odd = await caller.send("odd_method", worker.at("sim"), {}, **CAST)
    await caller.letter(odd)
    for arguments, methods in (
        (["--method", "delete_volume"], ["delete_volume"]),
        (["--reason", "UnknownMethod"], ["odd_method"]),
        (["--origin", worker.at("sim")], ["delete_volume", "odd_method"]),
        (["--origin", "host-z@sim"], []),
        (["--since", "1h"], ["delete_volume", "odd_method"]),
        (["--since", "2100-01-01T00:00Z"], []),
        (["--id", str(odd.message_id).upper()], ["odd_method"]),
        (["--id", "nobody"], []),
    ):
        assert [one["method"] for one in await _list(worker, *arguments)] == methods


async def test_letters_of_the_broker_are_mapped(
    worker: workers.Worker, caller: amqp.Caller, installation: environment.Installation
) -> None:
    await worker.terminate()
    # What looks like a worker's header is the caller's.
    forged = {"reason": "Forged", "origin": "forged@forged", "job-id": "forged"}
    sent = await caller.send("create_volume", worker.at("sim"), {}, headers=forged, **CAST)
    async with await aio_pika.connect(installation.broker_url) as connection:
        names = topology.Topology(installation.namespace)
        queue = await (await connection.channel()).get_queue(names.queue(worker.at("sim")))
        message = await queue.get(timeout=10)
        assert message is not None
        await message.reject(requeue=False)
        await caller.letter(sent)
    [listed] = await _list(worker)
    assert listed["made_by_broker"] is True
    assert listed["reason"] == "rejected"
    assert listed["origin"] == worker.at("sim")
    assert listed["job_id"] is None
    assert listed["method"] == "create_volume"
    assert listed["first_failed_at"] is not None
    assert len(await _list(worker, "--since", "1h", "--reason", "rejected")) == 1


HOSTILE: dict[str, bytes] = {
    "escapes": json.dumps({"method": f"m{ESCAPE}", "version": "1.0", "args": {}}).encode(),
    "raw escapes": b"\x1b[31m\x9b31m\x07\r\n",
    "every byte": bytes(range(256)),
    "nothing": b"",
    "deep": b"[" * 100_000,
    "deep and whole": b"[" * 600 + b"]" * 600,
    "large": b"\x1b" * 300_000,
    "markup": b'{"method": "[red]x[/red]", "version": "1.0", "args": {}}',
    "a number": b"1e999",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_reaches_the_terminal_raw(
    worker: workers.Worker, caller: amqp.Caller, name: str
) -> None:
    sent = await caller.publish(
        HOSTILE[name], worker.at("sim"), correlation_id=f"c{ESCAPE}{uuid.uuid4()}", **CAST
    )
    await caller.letter(sent)
    for arguments in (("list",), ("show",), ("list", "--json"), ("show", "--json")):
        ended = await command.run("dead", *arguments, "--config", worker.config)
        assert ended.code == 0, ended.stderr
        for text in (ended.stdout, ended.stderr):
            assert all(c.isprintable() or c == "\n" for c in text)
        if "--json" in arguments:
            assert len(ended.data["letters"]) == 1


async def test_secrets_in_a_letter_are_masked(worker: workers.Worker, caller: amqp.Caller) -> None:
    args = {"connector": {"auth_password": "geheim"}, "volume_id": "x"}
    one = await caller.send(
        "initialize_connection", worker.at("sim"), args, headers={"token": "geheim"}, **CAST
    )
    two = await caller.publish(b'{"auth_password": "geheim"', worker.at("sim"), **CAST)
    for sent in (one, two):
        await caller.letter(sent)
    for arguments in (("show",), ("show", "--json")):
        ended = await command.run("dead", *arguments, "--config", worker.config)
        assert "geheim" not in ended.stdout
        assert "***" in ended.stdout


async def test_properties_that_cannot_be_decoded_stop_nothing(
    worker: workers.Worker, caller: amqp.Caller, installation: environment.Installation
) -> None:
    async with raw_amqp.publisher(installation.broker_url) as raw:
        header = raw_amqp.long(raw_amqp.short(b"moment") + b"T" + b"\xff" * 8)
        # Straight into the queue, past any worker that might mend it.
        await raw.publish(f"{installation.namespace}.dead", "", 0x2000, header, b"{}")
        await raw.publish(
            f"{installation.namespace}.dead", "", 0x0080, raw_amqp.short(b"\xff\x1b"), b"{}"
        )
    assert len(await _list(worker)) == 2
    ended = await command.run("dead", "show", "--config", worker.config)
    assert ended.code == 0
    assert "\x1b" not in ended.stdout
