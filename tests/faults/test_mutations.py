"""Thousands of spoilt messages: each is answered or kept, and the worker goes on as before.

``MUTATIONS_SEED`` makes other messages; ``-m faults`` runs the whole number.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import aio_pika
import aio_pika.abc
import pytest

from messages import requests
from tests.faults import mutations
from tests.services import amqp, environment, raw_amqp, workers

SEED: Final = os.environ.get("MUTATIONS_SEED", "1")
SENDERS: Final = 6
STALL: Final = 20.0
"""Seconds without any answer, after which no more are waited for."""
MOST_GROWTH: Final = 20 * 1024
"""KiB."""
_UUID: Final = re.compile(r"(urn:uuid:)?\{?[0-9a-f-]{32,36}\}?", re.IGNORECASE)
_REFUSED: Final = (AssertionError, OSError, asyncio.IncompleteReadError)


@dataclasses.dataclass
class Seen:
    """What has come back, by message."""

    taken: list[mutations.Message] = dataclasses.field(default_factory=list)
    refused: int = 0
    """Messages that the broker itself did not take."""
    answers: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Bodies of results, by correlation id."""
    letters: dict[str, list[aio_pika.abc.AbstractIncomingMessage]] = dataclasses.field(
        default_factory=dict
    )
    """By number."""
    last: float = 0.0

    async def take_reply(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Called with each reply."""
        self.last = time.monotonic()
        if message.type == "result":
            key = _short(message.correlation_id or "")
            self.answers.setdefault(key, []).append(json.loads(message.body))

    async def take_letter(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Called with each dead letter."""
        self.last = time.monotonic()
        self.letters.setdefault(message.app_id or "", []).append(message)

    def letter(self, message: mutations.Message) -> bool:
        """Whether there is a letter of a message."""
        return str(message.index) in self.letters

    def has_expired(self, message: mutations.Message) -> bool:
        """Whether the broker took it away before anybody read it."""
        letters = self.letters.get(str(message.index), ())
        return any("origin" not in letter.headers for letter in letters)


class Bench:
    """Sends the messages to one worker, and collects what comes of them."""

    def __init__(self, site: environment.Installation, worker: workers.Worker) -> None:
        self.site = site
        self.worker = worker
        self.address = worker.at("sim")
        self.seen = Seen()
        self.reply_queue = f"test-mutations-{uuid.uuid4()}"
        self._maker: mutations.Maker

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Makes some volumes, and listens for the time of the block."""
        async with amqp.Caller.open(self.site.broker_url, self.site.namespace) as caller:
            new = {"volume": {"name": "v", "size_bytes": 2**20}}
            made = [await caller.call("create_volume", self.address, new) for _ in range(5)]
        ids = [volume["id"] for volume in made]
        self._maker = mutations.Maker(SEED, self.site.namespace, self.reply_queue, ids)
        async with await aio_pika.connect(self.site.broker_url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(self.reply_queue, exclusive=True)
            await queue.consume(self.seen.take_reply, no_ack=True)
            dead = await channel.get_queue(f"{self.site.namespace}.dead", ensure=False)
            await dead.consume(self.seen.take_letter, no_ack=True)
            yield

    async def send(self, numbers: Iterable[int]) -> None:
        """Sends messages, and waits until each has been answered, or none is any more."""
        waiting = iter(numbers)
        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send_some(waiting))
        self.seen.last = time.monotonic()
        while self.unanswered() and time.monotonic() < self.seen.last + STALL:
            assert self.worker.is_running, f"seed {SEED}: {self.worker.log.read_text()[-3000:]}"
            await asyncio.sleep(0.1)

    async def _send_some(self, numbers: Iterable[int]) -> None:
        for index in numbers:
            # A broker that refuses a message ends the connection.
            with contextlib.suppress(*_REFUSED):
                async with raw_amqp.publisher(self.site.broker_url) as publisher:
                    await self._publish(publisher, index)
                    for after in numbers:
                        index = after  # noqa: PLW2901 - the one that may be refused
                        await self._publish(publisher, index)

    async def _publish(self, publisher: raw_amqp.Publisher, index: int) -> None:
        message = self._maker.message(index)
        self.seen.refused += 1
        await publisher.publish(
            self.site.namespace, self.address, message.flags, message.wire, message.body
        )
        self.seen.refused -= 1
        self.seen.taken.append(message)

    def unanswered(self) -> list[mutations.Message]:
        """What has a right to an answer, and has none yet."""
        nameless = len([one for one in self.answerable() if not _key(one)])
        known = {_key(one) for one in self.seen.taken}
        spare = sum(len(found) for key, found in self.seen.answers.items() if key not in known)
        missing = [one for one in self.answerable() if _key(one) not in self.seen.answers]
        named = [one for one in missing if _key(one)]
        return named + [one for one in missing if not _key(one)][: max(0, nameless - spare)]

    def answerable(self) -> list[mutations.Message]:
        """The messages whose ``reply_to`` survived, and that were there to be read."""
        return [
            one
            for one in self.seen.taken
            if one.text("reply_to") == self.reply_queue and not self.seen.has_expired(one)
        ]

    def is_call(self, message: mutations.Message) -> bool:
        """Whether it names a queue for its answer, be it there or not."""
        namespace = self.site.namespace
        reply_to = message.text("reply_to")
        return bool(reply_to) and not f"{reply_to}.".startswith(f"{namespace}.")


def _key(message: mutations.Message) -> str:
    """The correlation id of a message's answer; "" where the worker makes one."""
    return _short(message.text("correlation_id") or message.text("message_id"))


def _short(correlation: str) -> str:
    """The message's number where one begins with it: what follows may not even be text."""
    begins = re.match(r"\d{1,6}-", correlation)
    return begins[0] if begins else correlation


def _is_plainly_malformed(message: mutations.Message) -> bool:
    """Whether it is not a request at all, by the contract's first two rows of bad input."""
    identity = message.text("message_id")
    if identity and not _UUID.fullmatch(identity):
        return True
    if len(message.body) > mutations.LIMIT:
        return True
    try:
        data = json.loads(message.body.decode())
    except (ValueError, RecursionError):
        return True
    if not isinstance(data, dict) or data.keys() != {"method", "version", "args"}:
        return True
    return data["method"] not in list(requests.METHODS)


def _reads(message: mutations.Message) -> bool:
    """Whether it leaves no trace where all goes well."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        method = requests.METHODS[json.loads(message.body)["method"]]
        return method.only_reads or method.kind is requests.Kind.UPKEEP
    return False


def _resident(worker: workers.Worker) -> int:
    """KiB that a worker holds."""
    status = pathlib.Path(f"/proc/{worker.pid}/status").read_text()
    [size] = re.findall(r"VmRSS:\s+(\d+) kB", status)
    return int(size)


def _show(messages: list[mutations.Message]) -> str:
    shown = [
        f"{one.index} {one.changes} {one.wire[:400]!r} {one.body[:200]!r}" for one in messages[:10]
    ]
    return f"seed {SEED}: {len(messages)} messages:\n" + "\n".join(shown)


@pytest.mark.parametrize(
    ("first", "all_of_them"),
    [
        (500, 1_500),
        pytest.param(
            1_000,
            10_000,
            marks=[pytest.mark.faults(sampled=False), pytest.mark.timeout(900)],
        ),
    ],
)
async def test_spoilt_messages_are_answered_or_kept_and_harm_nobody(
    first: int,
    all_of_them: int,
    installation: environment.Installation,
    start_worker: workers.Starter,
    record_property: Callable[[str, object], None],
) -> None:
    worker = await start_worker(
        backends={"sim": workers.SIM},
        max_request_bytes=mutations.LIMIT,
        max_attempts=1,
        lease=30,
    )
    bench = Bench(installation, worker)
    async with bench.opened():
        await bench.send(range(first))
        before = _resident(worker)
        await bench.send(range(first, all_of_them))
        after = _resident(worker)
        await worker.terminate()
        await _all_acknowledged(installation, bench.address)
        await asyncio.sleep(amqp.QUIET)
    seen = bench.seen
    record_property(
        "numbers",
        [
            f"MUTATIONS_SEED={SEED}: {all_of_them} spoilt messages, {seen.refused} of them refused"
            " by the broker itself",
            f"{sum(map(len, seen.answers.values()))} answers, "
            f"{sum(map(len, seen.letters.values()))} dead letters",
            f"memory: {before} KiB after {first}, {after} KiB after {all_of_them}",
        ],
    )
    problems = [*_told(bench), *await _kept(bench), *_surprises(worker)]
    assert not problems, "\n".join(problems)
    assert len(seen.taken) > 0.9 * all_of_them, seen.refused
    assert after - before < MOST_GROWTH, f"{before} KiB, then {after} KiB"


def _told(bench: Bench) -> list[str]:
    """What is wrong with the answers."""
    missing = bench.unanswered()
    found = bench.seen.answers
    twice = {key: bodies for key, bodies in found.items() if key and len(bodies) > 1}
    return [
        *([f"no answer: {_show(missing)}"] if missing else []),
        *([f"two answers, seed {SEED}: {twice}"] if twice else []),
    ]


async def _kept(bench: Bench) -> list[str]:
    """What is wrong with the letters: the malformed have one, and nothing goes without a trace."""
    answered = {one.index for one in bench.answerable()}
    silent = [one for one in bench.seen.taken if not bench.seen.letter(one)]
    bad = [one for one in silent if _is_plainly_malformed(one)]
    states = {row[0]: row[1] for row in await bench.site.rows("SELECT id::text, state FROM jobs")}
    casts = [one for one in silent if one.index not in answered and not bench.is_call(one)]
    gone = [one for one in casts if _is_lost(one, states)]
    return [
        *([f"not kept: {_show(bad)}"] if bad else []),
        *([f"no trace: {_show(gone)}"] if gone else []),
    ]


def _is_lost(message: mutations.Message, states: dict[str, str]) -> bool:
    """Whether nothing tells of a cast that has no letter."""
    if _reads(message):
        return False
    with contextlib.suppress(ValueError):
        return states.get(str(uuid.UUID(message.text("message_id")))) != "succeeded"
    # Its id was made by the worker.
    return False


async def _all_acknowledged(site: environment.Installation, address: str) -> None:
    async with await aio_pika.connect(site.broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(f"{site.namespace}.{address}", passive=True)
        assert queue.declaration_result.message_count == 0


def _surprises(worker: workers.Worker) -> list[str]:
    """What the worker's log has that should not be there."""
    lines = worker.log_lines()
    return [
        f"seed {SEED}: {json.dumps(line)[-500:]}"
        for line in lines
        if "exception" in line
        or line.get("level") == "error"
        or line["event"] == "broker.connection_lost"
    ]
