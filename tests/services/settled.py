"""Whether jobs have left anything undone: by the records, once all that was asked has ended."""

import asyncio
import time
from typing import Final

from tests.services import environment

_UNSETTLED: Final = """
SELECT 'job ' || method || ' ' || state FROM jobs WHERE finished_at IS NULL
UNION ALL SELECT 'lock of ' || job_id FROM job_locks
UNION ALL SELECT 'outbox of ' || coalesce(job_id::text, 'a letter') FROM outbox
UNION ALL SELECT 'connection ' || state || ' of ' || volume_id FROM connections
    WHERE state IN ('making', 'ending')
UNION ALL SELECT 'attachment ' || status FROM attachments WHERE status = 'attaching'
UNION ALL SELECT 'volume ' || status FROM volumes WHERE status_job IS NOT NULL
UNION ALL SELECT 'export of ' || id || ' for nobody' FROM volumes
    WHERE export = 'implicit' AND NOT EXISTS (
        SELECT FROM connections WHERE volume_id = volumes.id AND state = 'live')
"""


async def wait(site: environment.Installation, *, timeout: float = 20.0) -> None:
    """Waits until nothing is left: what a job could not undo is swept up by others."""
    deadline = time.monotonic() + timeout
    while left := await site.rows(_UNSETTLED):
        assert time.monotonic() < deadline, [row[0] for row in left]
        await asyncio.sleep(0.05)
