"""A store on a database of its own, and short words for what tests do with it."""

import contextlib
import datetime
import hashlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import asyncpg
import pydantic

from messages import resources
from tests.services import environment
from worker.store import acceptance, database, jobs, volumes

HERE = "host-a@fast"
ELSEWHERE = "host-b@fast"
PLENTY: Mapping[jobs.Slot, int] = {jobs.Slot.CONTROL: 1000, jobs.Slot.DATA: 1000}
NONE: Mapping[jobs.Slot, int] = {jobs.Slot.CONTROL: 0, jobs.Slot.DATA: 0}
X, C, R = acceptance.LockMode.EXCLUSIVE, acceptance.LockMode.CONTROL, acceptance.LockMode.READ


def slots(control: int = 1000, data: int = 1000) -> dict[jobs.Slot, int]:
    """Free slots."""
    return {jobs.Slot.CONTROL: control, jobs.Slot.DATA: data}


def need(volume_id: uuid.UUID, mode: acceptance.LockMode = X, **checks: Any) -> acceptance.Need:
    """What a job needs of a volume that need not exist."""
    return acceptance.Need(volume_id, mode, **{"known": False, **checks})


def job(*needs: acceptance.Need, **changed: Any) -> acceptance.NewJob:
    """A request about to be accepted."""
    body = b'{"method": "m", "version": "1.0", "args": {}}'
    values: dict[str, Any] = {
        "id": uuid.uuid4(),
        "method": "m",
        "address": HERE,
        "slot": jobs.Slot.CONTROL,
        "body": body,
        "properties": {"headers": {}},
        "fingerprint": hashlib.sha256(body).digest(),
        "deadline": None,
        "reply_to": None,
        "correlation_id": "c",
        "status_updates": False,
        "parent_job": None,
        "needs": needs,
    }
    return acceptance.NewJob(**{**values, **changed})


class Bench:
    """One worker's view of the store; :meth:`other` is another worker's."""

    def __init__(self, site: environment.Installation, store: database.Database) -> None:
        self.site = site
        self.store = store
        self.owner = uuid.uuid4()

    def other(self) -> "Bench":
        """Another worker on the same database."""
        return Bench(self.site, self.store)

    async def accept(
        self,
        *new: acceptance.NewJob,
        free: Mapping[jobs.Slot, int] = PLENTY,
        lease: float = 30,
    ) -> list[acceptance.Accepted]:
        """Stores requests in one batch."""
        return await acceptance.accept(self.store, new, owner=self.owner, lease=lease, free=free)

    async def verdicts(self, *new: acceptance.NewJob, **options: Any) -> list[str]:
        """Stores requests in one batch; what became of them."""
        return [str(one.verdict) for one in await self.accept(*new, **options)]

    async def started(self, *needs: acceptance.Need, lease: float = 30, **changed: Any) -> jobs.Job:
        """A job that runs at once."""
        (accepted,) = await self.accept(job(*needs, **changed), lease=lease)
        assert accepted.verdict is acceptance.Verdict.RUNNING, accepted
        assert accepted.job.refusal is None, accepted
        return accepted.job

    async def queued(self, *needs: acceptance.Need, **changed: Any) -> jobs.Job:
        """A job that waits for a slot."""
        (accepted,) = await self.accept(job(*needs, **changed), free=NONE)
        assert accepted.verdict is acceptance.Verdict.QUEUED, accepted
        return accepted.job

    async def claim(
        self,
        *,
        free: Mapping[jobs.Slot, int] = PLENTY,
        lease: float = 30,
        addresses: Sequence[str] = (HERE,),
    ) -> list[jobs.Job]:
        """Claims jobs."""
        return await jobs.claim(
            self.store, owner=self.owner, lease=lease, free=free, addresses=addresses
        )

    async def finish(self, one: jobs.Job, **how: Any) -> jobs.Ended:
        """Ends a job; without a word, well."""
        values = {"state": resources.JobState.SUCCEEDED, "result": {}}
        return await jobs.finish(self.store, jobs.Ending(one, **{**values, **how}))

    async def volume(
        self, *, address: str = HERE, status: str = "available", **columns: Any
    ) -> volumes.Volume:
        """A volume as a job has made it."""
        volume_id = uuid.uuid4()
        maker = await self.started(need(volume_id), address=address)
        await volumes.begin(self.store, maker, acceptance.NewVolume(volume_id, "v", 1024, {}))
        change = jobs.VolumeChange(volume_id, {"status": status, **columns})
        await self.finish(maker, change=change, result=None)
        return await volumes.get(self.store, volume_id)

    async def state_of(self, job_id: uuid.UUID) -> str:
        """A job's state."""
        return str((await jobs.get(self.store, job_id)).state)

    async def rows(self, statement: str, *args: Any) -> list[Any]:
        """Runs a statement beside the store."""
        return await self.site.rows(statement, *args)

    async def columns(self) -> dict[str, str]:
        """What stands in each column of each table, by ``table.column``."""
        found = {}
        connection = await asyncpg.connect(self.site.database_url)
        try:
            for table in ("volumes", "attachments", "connections", "jobs", "job_locks", "outbox"):
                for name, text in await connection.fetch(
                    "SELECT key, string_agg(value, E'\\n')"
                    f" FROM {table} t, jsonb_each_text(to_jsonb(t)) GROUP BY key"
                ):
                    found[f"{table}.{name}"] = str(text)
        finally:
            await connection.close()
        return found

    async def expire(self, *ones: jobs.Job) -> None:
        """Lets leases run out."""
        await self.rows(
            "UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = ANY ($1)",
            [one.id for one in ones],
        )


@contextlib.asynccontextmanager
async def opened(site: environment.Installation, **options: Any) -> AsyncIterator[Bench]:
    """A store for the time of the block."""
    async with database.connect(pydantic.SecretStr(site.database_url), **options) as store:
        yield Bench(site, store)


def ago(seconds: float) -> datetime.datetime:
    """A moment in the past."""
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
