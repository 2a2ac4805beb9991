"""get_volume_stats with refresh: asks the storage, which may take its time."""

from collections.abc import Mapping
from typing import Final

from worker.operations import base


async def _refresh(context: base.Context) -> base.Outcome:
    return base.Outcome(result=await context.backend.stats(refresh=True))


OPERATIONS: Final[Mapping[str, base.Operation]] = {
    "get_volume_stats": base.Operation(_refresh, lambda _job_id, _args: []),
}
