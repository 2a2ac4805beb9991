"""What a backend has to serve by the records, and having it served."""

import uuid
from collections.abc import Mapping

import structlog

from messages import errors
from worker import backend as backends
from worker.operations import base, connections, exports
from worker.store import connections as connection_store
from worker.store import database
from worker.targets import base as targets

log = structlog.get_logger(__name__)


async def recorded(store: database.Database, backend: backends.Backend) -> list[targets.Export]:
    """Every recorded export with its live connections; one without a path is left out."""
    found = []
    for volume, live in await connection_store.served(store, backend.address):
        try:
            path = exports.path_of(backend, volume)
        except errors.VolumeWorkerError as error:
            log.warning("backend.no_path", volume_id=str(volume.id), error=error.message)
            continue
        seen = [connections.as_target_sees(connection) for connection in live]
        found.append(targets.Export(base.reference(volume), path, seen))
    return found


async def restore(
    store: database.Database, backend: backends.Backend
) -> Mapping[uuid.UUID, errors.VolumeWorkerError]:
    """Has the target serve what is recorded; returns what could not be, by volume.

    To be called with nobody else in ``backend.serving``.
    """
    return await backend.target.restore(await recorded(store, backend))
