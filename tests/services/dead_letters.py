"""What tests of dead letters do over and over: making them, replaying them, waiting."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import aio_pika

from tests.services import amqp, command, environment, workers

LONG_AGO: Final = "2020-01-01T00:00:00Z"
MIB: Final = 1024 * 1024

_KILLED_BEFORE_ACK: Final = """
import os, signal, sys
import aio_pika
from worker.cli import app

async def die(self, multiple=False):
    os.kill(os.getpid(), signal.SIGKILL)

aio_pika.IncomingMessage.ack = die
sys.argv = ["volume-worker", *sys.argv[1:]]
app.main()
"""


class Dead:
    """``volume-worker dead`` with a worker's configuration."""

    def __init__(self, worker: workers.Worker, caller: amqp.Caller) -> None:
        self.worker = worker
        self.caller = caller

    async def run(self, *arguments: str, code: int = 0) -> Any:
        """A command's output as JSON."""
        ended = await command.run("dead", *arguments, "--json", "--config", self.worker.config)
        assert ended.code == code, (ended.stdout, ended.stderr)
        return ended.data

    async def replay(self, *arguments: str, code: int = 0) -> list[tuple[str | None, str]]:
        """Replays; each letter's message id and what became of it."""
        return outcomes(await self.run("replay", *arguments, code=code))

    async def ids(self) -> list[str | None]:
        """The message ids of the letters that there are; of a few, in their order."""
        return [one.message_id for one in await self.caller.letters()]

    async def ordered_ids(self) -> list[str | None]:
        """Likewise, but of any number: who gets messages one by one reorders what is many."""
        return [one["message_id"] for one in (await self.run("list", "--all"))["letters"]]

    def killed_before_ack(self, *arguments: str) -> None:
        """Runs a command that is killed when it is about to remove its first letter."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("VOLUME_WORKER_")}
        configuration = ["--config", str(self.worker.config)]
        ended = subprocess.run(
            [sys.executable, "-c", _KILLED_BEFORE_ACK, "dead", *arguments, *configuration],
            env=outside,
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended

    async def late_create(self, name: str = "v", **properties: Any) -> amqp.Sent:
        """A cast whose deadline has passed: it makes a volume once it is replayed."""
        new = {"volume": {"name": name, "size_bytes": MIB}}
        return await self._late("create_volume", new, **properties)

    async def late_extend(self, volume_id: str, size_bytes: int) -> amqp.Sent:
        """A cast likewise, which extends a volume."""
        args = {"volume_id": volume_id, "new_size_bytes": size_bytes}
        return await self._late("extend_volume", args)

    async def _late(self, method: str, args: dict[str, Any], **properties: Any) -> amqp.Sent:
        late = {"headers": {"deadline": LONG_AGO}, "reply_to": None, **properties}
        sent = await self.caller.send(method, self.worker.at("sim"), args, **late)
        await self.caller.letter(sent)
        return sent

    async def job(self, sent: amqp.Sent) -> dict[str, Any]:
        """A request's job."""
        return await self.caller.call("get_job", self.worker.at("sim"), {"job_id": sent.message_id})

    async def ended(self, sent: amqp.Sent, state: str = "succeeded") -> dict[str, Any]:
        """Waits for a job's end."""
        deadline = time.monotonic() + amqp.TIMEOUT
        while (job := await self.job(sent))["state"] != state:
            assert time.monotonic() < deadline, job
        return job

    def stumbling_block(self, volume_id: str) -> pathlib.Path:
        """Puts something where the backend ``fast`` would have a volume; returns its path."""
        path = self.worker.folder / "fast" / f"volume-{volume_id}"
        path.symlink_to("/etc/hostname")
        return path


@contextlib.contextmanager
def installed(
    databases: environment.Databases, folder: pathlib.Path
) -> Iterator[tuple[environment.Installation, workers.Worker]]:
    """An installation with a worker whose jobs have one attempt, for tests to share."""
    with databases.installation() as site, workers.starter(site, folder) as start:
        worker = start.new(max_attempts=1)
        worker.spawn()
        worker.wait_until_ready()
        yield site, worker


@contextlib.asynccontextmanager
async def opened(site: environment.Installation, worker: workers.Worker) -> AsyncIterator[Dead]:
    """The command, for one test: it finds no letters, and leaves none."""
    async with amqp.Caller.open(site.broker_url, site.namespace) as caller:
        yield Dead(worker, caller)
    async with await aio_pika.connect(site.broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(f"{site.namespace}.dead", ensure=False)
        await queue.purge()
    await free_lock(site)


def outcomes(data: Any) -> list[tuple[str | None, str]]:
    """What became of each letter, from what a command printed; nothing is lost on the way."""
    totals = dict(data["totals"])
    removed = totals["replayed"] + totals["already_replayed"] + totals["discarded"]
    assert totals["in"] == removed + totals["left"]
    assert len(data["letters"]) == removed + totals["refused"]
    return [(one["message_id"], one["outcome"]) for one in data["letters"]]


async def results(caller: amqp.Caller, sent: amqp.Sent, count: int) -> list[amqp.Reply]:
    """Waits for so many results of a request."""
    return await amqp.eventually(
        lambda: found if len(found := caller.results(sent)) >= count else None,
        what=f"{count} results",
    )


async def free_lock(site: environment.Installation) -> None:
    """Lets the lock of a command that was killed run out."""
    await site.rows("UPDATE operator_locks SET until = now() - interval '1 second'")


def whole(method: str, args: dict[str, Any]) -> str:
    """An edit that is a whole request."""
    return json.dumps({"method": method, "args": args})


def new_volume(**members: Any) -> dict[str, Any]:
    """Arguments of create_volume, with an id."""
    return {"volume": {"id": str(uuid.uuid4()), "name": "v", "size_bytes": MIB, **members}}
