"""One caller, one job or one listener must not hold up the others."""

import asyncio
import json
import os
import pathlib
import shutil

import aio_pika
import pytest

from tests.services import amqp, environment, tools, volumes, workers
from tests.services import tgtd as tgtd_service

MIB = 1024**2


def new_volume(size: int = MIB) -> dict[str, object]:
    """The arguments of a create."""
    return {"volume": {"name": "v", "size_bytes": size}}


async def test_jobs_that_wait_for_their_next_try_hold_up_no_other_however_many_they_are(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    tgtd: tgtd_service.Tgtd,
    tmp_path: pathlib.Path,
) -> None:
    tool = tools.Tool("tgtadm", tmp_path)
    worker = await start_worker(
        "host-a",
        backends={"iscsi": workers.iscsi(tgtd)},
        env={**tgtd.env, **tool.env},
        control_slots=4,
    )
    at = worker.at("iscsi")
    made = [await caller.call("create_volume", at, new_volume()) for _ in range(20)]
    tool.fail("*--op new*")
    for one in made:
        await caller.send("create_export", at, {"volume_id": one["id"]}, reply_to=None)
    async with asyncio.timeout(60):
        while await put_off(installation) < len(made):
            await asyncio.sleep(0.1)
    assert (await caller.call("create_volume", at, new_volume()))["status"] == "available"


async def put_off(installation: environment.Installation) -> int:
    """Lets every job that waits for another try wait for an hour; how many these are by now."""
    await installation.rows(
        "UPDATE jobs SET run_at = now() + interval '1 hour' WHERE state = 'queued' AND attempt > 0"
    )
    [row] = await installation.rows(
        "SELECT count(*) FROM jobs WHERE run_at > now() + interval '30 minutes'"
    )
    return int(row["count"])


async def test_while_one_of_two_workers_has_a_long_job_nine_short_ones_are_done(
    installation: environment.Installation,
    tmp_path: pathlib.Path,
    caller: amqp.Caller,
) -> None:
    backends = {"fast": workers.FAST}
    with (
        workers.starter(installation, tmp_path / "one") as first,
        workers.starter(installation, tmp_path / "two") as second,
    ):
        one = first.new("host-a", backends=backends, data_slots=1)
        two = second.new("host-a", backends=backends, data_slots=1)
        # Both run at one address, and each could serve it alone.
        table = two.config.read_text().replace(str(two.folder / "fast"), str(one.folder / "fast"))
        two.config.write_text(table)
        await one.start()
        two.spawn()
        at = one.at("fast")
        made = [(await caller.call("create_volume", at, new_volume(8 * MIB))) for _ in range(20)]
        pairs = list(zip(made[:10], made[10:], strict=True))
        await volumes.Volumes(caller).write(
            volumes.Volume(pairs[0][0]["id"], at, 8 * MIB), {0: b"d" * 8 * MIB}
        )
        long, *short = [
            await caller.send(
                "copy_volume_data",
                at,
                {
                    "source_volume_id": source["id"],
                    "destination_volume_id": destination["id"],
                    "remote": None,
                    "bytes_per_second": MIB // 4 if number == 0 else None,
                },
            )
            for number, (source, destination) in enumerate(pairs)
        ]
        for sent in short:
            assert (await caller.result(sent)).body["ok"]
        assert not caller.results(long)
        # A drain would wait for it.
        await caller.call("cancel_job", at, {"job_id": long.message_id})


@pytest.mark.parametrize("who", ["a caller", "a listener"])
async def test_a_full_queue_of_somebody_elses_holds_up_no_answer(
    installation: environment.Installation,
    start_worker: workers.Starter,
    caller: amqp.Caller,
    who: str,
) -> None:
    worker = await start_worker("host-a", backends={"sim": workers.SIM})
    at = worker.at("sim")
    connection = await aio_pika.connect(installation.broker_url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(
            exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        if who == "a listener":
            await queue.bind(f"{installation.namespace}.events", routing_key="#")
        reply_to = queue.name if who == "a caller" else None
        for _ in range(300):
            await caller.send("create_volume", at, new_volume(), reply_to=reply_to)
        for _ in range(20):
            assert await caller.call("create_volume", at, new_volume())


async def test_what_a_program_says_at_length_does_not_make_its_answer_long(
    start_worker: workers.Starter,
    caller: amqp.Caller,
    tgtd: tgtd_service.Tgtd,
    tmp_path: pathlib.Path,
) -> None:
    real = shutil.which("tgtadm")
    program = tmp_path / "bin" / "tgtadm"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
case "$*" in
    *"--op new --mode target"*) head -c 20000000 /dev/zero | tr '\\0' x >&2; exit 1 ;;
    *) exec {real} "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    worker = await start_worker(
        "host-a",
        backends={"iscsi": workers.iscsi(tgtd)},
        env={**tgtd.env, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        max_attempts=1,
    )
    at = worker.at("iscsi")
    volume = await caller.call("create_volume", at, new_volume())
    reply = await caller.result(await caller.send("create_export", at, {"volume_id": volume["id"]}))
    assert not reply.body["ok"]
    assert len(json.dumps(reply.body)) < 64 * 1024
    [letter] = await caller.letters()
    assert sum(len(str(value)) for value in letter.headers.values()) < 64 * 1024
    assert worker.log.stat().st_size < MIB
