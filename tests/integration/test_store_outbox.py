"""The outbox table: what is swept up of it, whatever stands in its rows."""

import datetime
import urllib.parse
import uuid
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from tests.integration import store_bench
from tests.integration.store_bench import HERE, need
from tests.services import environment
from worker.store import outbox


@pytest.fixture
async def bench(installation: environment.Installation) -> AsyncIterator[store_bench.Bench]:
    async with store_bench.opened(installation) as opened:
        yield opened


@pytest.mark.parametrize(
    ("zone", "deadline"),
    [
        ("Asia/Tokyo", datetime.datetime.max.replace(tzinfo=datetime.UTC)),
        ("America/New_York", datetime.datetime.min.replace(tzinfo=datetime.UTC)),
    ],
)
async def test_the_first_and_the_last_deadline_are_told_whatever_the_databases_time_zone(
    installation: environment.Installation, zone: str, deadline: datetime.datetime
) -> None:
    name = urllib.parse.urlsplit(installation.database_url).path.removeprefix("/")
    await installation.rows(f"ALTER DATABASE \"{name}\" SET timezone TO '{zone}'")
    async with store_bench.opened(installation) as bench:
        ended = await bench.finish(await bench.started(need(uuid.uuid4()), deadline=deadline))
        (found,) = await outbox.adopt(bench.store, addresses=[HERE], older_than=0, limit=10)
    assert found.job is not None
    assert found.id == ended.outbox_id
    for job in (found.job, ended.job):
        assert job.deadline is not None
        assert abs(job.deadline - deadline) <= datetime.timedelta(microseconds=1)


async def test_what_cannot_be_read_does_not_keep_the_rest_from_being_told(
    bench: store_bench.Bench,
) -> None:
    first, second = [await bench.finish(await bench.started(need(uuid.uuid4()))) for _ in range(2)]
    await bench.rows("UPDATE jobs SET deadline = '10000-01-01Z' WHERE id = $1", first.job.id)
    with structlog.testing.capture_logs() as logs:
        (found,) = await outbox.adopt(bench.store, addresses=[HERE], older_than=0, limit=10)
    assert found.id == second.outbox_id
    assert [(one["event"], one["entry_id"]) for one in logs] == [
        ("outbox.unreadable", first.outbox_id)
    ]
