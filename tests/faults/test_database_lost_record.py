"""A volume's record that the database has lost before its job ended."""

import uuid

import pytest

from messages.resources import JobState
from tests.integration import store_bench
from tests.services import environment
from worker.store import database, jobs, volumes


async def test_a_job_whose_volume_the_database_has_lost_does_not_end_well(
    installation: environment.Installation,
) -> None:
    """The record of a volume that is being created is not yet safe when its job goes on."""
    volume_id = uuid.uuid4()
    async with store_bench.opened(installation) as bench:
        one = await bench.started(store_bench.need(volume_id))
        await volumes.begin(
            bench.store, one, volume_id=volume_id, name="v", size_bytes=1, metadata={}
        )
        await bench.rows("DELETE FROM volumes WHERE id = $1", volume_id)
        change = jobs.VolumeChange(volume_id, {"status": "available"})
        with pytest.raises(database.LeaseLost):
            await bench.finish(one, state=JobState.SUCCEEDED, change=change)
        assert await bench.state_of(one.id) == "running"
