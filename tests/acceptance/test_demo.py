"""The demo, run as a whole and interrupted: it tells its story, and leaves nothing."""

import asyncio
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import AsyncIterator
from typing import Final

import aio_pika
import asyncpg
import pytest

from tests.services import children, command, environment, tgtd, workers

pytestmark = pytest.mark.timeout(180)
LONGEST: Final = 60.0
"""Seconds."""
OVER_ISCSI: Final = (
    "copy_volume_data to host-b@iscsi",
    "auth_method=CHAP",
    "auth_password=***",
    "tgtadm --op show --mode target: nothing",
)
# tgtd takes commands from root only, so that the demo of an ordinary user does without it.
OVER_NBD: Final = ("skip iSCSI", "copy_volume_data to host-b@nbd")


@pytest.fixture
async def services(tmp_path: pathlib.Path) -> AsyncIterator[dict[str, str]]:
    """The environment for a demo; what it leaves fails the test."""
    tgtd.require_program("mke2fs", "e2fsck", "qemu-storage-daemon")
    # A folder with a short path: sockets are made in it.
    folder = tmp_path / "t"
    folder.mkdir()
    env = {
        environment.BROKER: environment.url(environment.BROKER),
        environment.DATABASE: environment.url(environment.DATABASE),
        "TMPDIR": str(folder),
    }
    before = await _databases(env)
    yield env
    assert children.mentioning(str(folder)) == []
    # Another demo may run beside this one: its database goes away, what was left does not.
    left = await _databases(env) - before
    deadline = time.monotonic() + LONGEST
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        left &= await _databases(env)
    assert left == set()


async def _databases(env: dict[str, str]) -> set[str]:
    connection = await asyncpg.connect(env[environment.DATABASE])
    try:
        rows = await connection.fetch(
            "SELECT datname FROM pg_database WHERE datname LIKE 'volume_worker_demo_%'"
        )
    finally:
        await connection.close()
    return {str(row["datname"]) for row in rows}


async def test_the_demo_tells_the_whole_story_in_time(services: dict[str, str]) -> None:
    tgtd.require_program("tgtd", "tgtadm")
    begin = time.monotonic()
    ended = await command.run("demo", env=services, timeout=150)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert time.monotonic() - begin < LONGEST
    story = re.sub(r"\s+", " ", ended.stdout)
    digests = set(re.findall(r"blake2b-4m:[0-9a-f]{64}", story))
    assert len(digests) == 1
    await _assert_no_queue_is_left(services, ended.stdout)
    for words in (
        *(OVER_ISCSI if os.geteuid() == 0 else OVER_NBD),
        "copy_volume_data to host-a@nbd",
        "status=in-use",
        "e2fsck -fn: demo:",
        "NBD port",
        "SIGTERM to the worker of host-b: exit code 0",
    ):
        assert words in story
    assert os.listdir(services["TMPDIR"]) == []  # noqa: PTH208


async def test_without_tgtd_the_story_goes_on_over_nbd(
    services: dict[str, str], tmp_path: pathlib.Path
) -> None:
    # A tgtd that ends at once, as it would where it may not work.
    (tmp_path / "tgtd").write_text("#!/bin/sh\necho no tgtd here >&2\nexit 1\n")
    (tmp_path / "tgtd").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = await command.run("demo", "--json", env={**services, "PATH": path}, timeout=150)
    assert ended.code == 0, ended.stderr
    assert "skip iSCSI" in ended.stderr
    assert "copy_volume_data to host-b@nbd" in ended.stderr
    assert ended.data["seconds"] < LONGEST
    assert ended.data["steps"][-1]["title"] == "Done"
    assert "***" not in json.dumps(ended.data["steps"])


async def test_a_missing_program_is_named(services: dict[str, str], tmp_path: pathlib.Path) -> None:
    ended = await command.run("demo", env={**services, "PATH": str(tmp_path)})
    assert ended.code == 1
    assert "install" in ended.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
async def test_an_interrupted_demo_cleans_up(
    services: dict[str, str], number: signal.Signals, code: int
) -> None:
    process, told = await _until_it_copies(services)
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code
    assert b"Traceback" not in out + err
    await _assert_no_queue_is_left(services, told)
    assert os.listdir(services["TMPDIR"]) == []  # noqa: PTH208


async def test_a_demo_whose_worker_dies_fails_and_keeps_the_logs(services: dict[str, str]) -> None:
    process, told = await _until_it_copies(services)
    pid = re.search(r"pid (\d+), serves host-b", told)
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"host-b" in err
    assert b"Traceback" not in out + err
    kept = re.search(r"logs are kept in (\S+)", out.decode())
    assert kept is not None
    assert (pathlib.Path(kept[1]) / "host-a.log").read_text()
    assert [path.name for path in pathlib.Path(kept[1]).parent.iterdir()] == ["logs"]


async def _assert_no_queue_is_left(env: dict[str, str], told: str) -> None:
    named = re.search(r"namespace and database (\w+)", told)
    assert named is not None
    connection = await aio_pika.connect(env[environment.BROKER])
    async with connection:
        for queue in ("dead", "host-a@nbd", "host-b@nbd", "host-b@iscsi"):
            with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
                await (await connection.channel()).declare_queue(
                    f"{named[1]}.{queue}", passive=True
                )


async def _until_it_copies(env: dict[str, str]) -> tuple[asyncio.subprocess.Process, str]:
    outside = {k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")}
    process = await asyncio.create_subprocess_exec(
        workers.COMMAND,
        "demo",
        # Wide enough that no path is broken, however long the tests' own folder is.
        env={**outside, "COLUMNS": "400", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    told = ""
    async with asyncio.timeout(60):
        while "copy_volume_data" not in told:
            line = await process.stdout.readline()
            assert line, told
            told += line.decode()
    return process, told
