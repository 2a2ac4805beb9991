"""Requests that only read: answered from the records at once, leaving no job and no event."""

from collections.abc import Mapping
from typing import Any

import pydantic

from messages import errors, requests, topology
from worker import backend
from worker.store import database, jobs, volumes


def is_read(method: requests.Method, args: pydantic.BaseModel) -> bool:
    """Whether a request only reads; stats do unless they are to be taken anew."""
    if isinstance(args, requests.GetVolumeStats):
        return not args.refresh
    return method.kind is requests.Kind.READ


class Reader:
    """Answers reads."""

    def __init__(self, store: database.Database, backends: Mapping[str, backend.Backend]) -> None:
        self._store = store
        self._backends = backends

    async def answer(
        self, method: str, address: str, args: pydantic.BaseModel
    ) -> Mapping[str, Any]:
        """The result of a read sent to ``address``.

        Raises:
            VolumeWorkerError: what the caller is to be told.
        """
        match args:
            case requests.VolumeOnly():
                return await volumes.record(self._store, args.volume_id)
            case requests.GetJob():
                return (await jobs.get(self._store, args.job_id)).to_wire()
            case requests.ListVolumes():
                return {"volumes": await self._list_volumes(address, args)}
            case requests.ListJobs():
                return {"jobs": await self._list_jobs(address, args)}
            case requests.ValidateConnector():
                self._validate(address, args.connector)
                return {}
            case requests.GetVolumeStats():
                self._backends[address].require()
                return await self._backends[address].stats()
        raise errors.UnknownMethod(f"{method} is no read")

    def _validate(self, address: str, connector: requests.Connector) -> None:
        if connector.do_local_attach and connector.host == topology.host_of(address):
            return  # attached without the target
        self._backends[address].target.validate_connector(connector.properties())

    async def _list_volumes(
        self, address: str, args: requests.ListVolumes
    ) -> list[Mapping[str, Any]]:
        return await volumes.records(
            self._store,
            address=None if args.all else address,
            status=args.status,
            after=args.after,
            limit=args.limit,
        )

    async def _list_jobs(self, address: str, args: requests.ListJobs) -> list[dict[str, Any]]:
        found = await jobs.list_(
            self._store,
            address=None if args.all else address,
            state=args.state,
            volume_id=args.volume_id,
            after=args.after,
            limit=args.limit,
        )
        return [job.to_wire() for job in found]
