"""Requests that only read: answered from the records at once, leaving no job and no event.

``reconcile`` is answered here too: it has to work while every slot is taken, and may be repeated.
"""

import dataclasses
import functools
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pydantic

from messages import errors, requests, topology
from worker import backend
from worker.reconciliation import reconciler, shared
from worker.store import database, jobs, volumes

MAX_LIST_BYTES: Final = 4 * 1024 * 1024
"""Of JSON in one list: the broker takes 16 MiB in a message, and many lists may be asked for."""
PART_CHARS: Final = 1024 * 1024
"""Characters of a record's JSON text in one answer."""
CHUNK: Final = 25
"""Records fetched at a time: a job has arguments of a MiB, so that no thousand is held at once."""

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Part of a list; the next one begins after its last record."""

    records: list[Mapping[str, Any]]
    truncated: bool
    """Cut for its size: there are more, though fewer than the limit are here."""

    def to_wire(self, name: str) -> dict[str, Any]:
        """The result of the contract, with the records under ``name``."""
        return {name: self.records, **({"truncated": True} if self.truncated else {})}


def is_read(method: requests.Method, args: pydantic.BaseModel) -> bool:
    """Whether a request is answered without a job; stats are unless they are to be taken anew."""
    if isinstance(args, requests.GetVolumeStats):
        return not args.refresh
    return method.kind in (requests.Kind.READ, requests.Kind.UPKEEP)


class Reader:
    """Answers reads."""

    def __init__(
        self,
        store: database.Database,
        backends: Mapping[str, backend.Backend],
        reconcilers: Mapping[str, reconciler.Reconciler],
    ) -> None:
        self._store = store
        self._backends = backends
        self._reconciling = {
            (address, repair): shared.Shared(functools.partial(_reconcile, one, repair=repair))
            for address, one in reconcilers.items()
            for repair in (False, True)
        }

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
                record = (await jobs.get(self._store, args.job_id)).to_wire()
                return record if args.offset is None else _part(record, args.offset)
            case requests.ListVolumes():
                return (await self._list_volumes(address, args)).to_wire("volumes")
            case requests.ListJobs():
                return (await self._list_jobs(address, args)).to_wire("jobs")
            case requests.ValidateConnector():
                self._validate(address, args.connector)
                return {}
            case requests.Reconcile():
                return await self._reconciling[address, args.repair]()
            case requests.GetVolumeStats():
                self._backends[address].require()
                return await self._backends[address].stats()
        raise errors.UnknownMethod(f"{method} is no read")

    def _validate(self, address: str, connector: requests.Connector) -> None:
        if connector.do_local_attach and connector.host == topology.host_of(address):
            return  # attached without the target
        self._backends[address].target.validate_connector(connector.properties())

    async def _list_volumes(self, address: str, args: requests.ListVolumes) -> Page:
        return await list_volumes(
            self._store,
            address=None if args.all else address,
            status=args.status,
            after=args.after,
            limit=args.limit,
        )

    async def _list_jobs(self, address: str, args: requests.ListJobs) -> Page:
        return await list_jobs(
            self._store,
            address=None if args.all else address,
            state=args.state,
            volume_id=args.volume_id,
            after=args.after,
            limit=args.limit,
        )


async def _reconcile(by: reconciler.Reconciler, *, repair: bool) -> Mapping[str, Any]:
    return reconciler.to_wire(await by.run(repair=reconciler.ALL if repair else ()))


def _part(record: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """A part of a record's JSON text; the parts put together are the whole record."""
    text = json.dumps(record)
    part = text[offset : offset + PART_CHARS]
    return {"id": record["id"], "offset": offset, "text": part, "total_chars": len(text)}


async def list_volumes(
    store: database.Database,
    *,
    address: str | None,
    status: str | None,
    after: uuid.UUID | None,
    limit: int,
) -> Page:
    """Volumes by id."""

    async def fetch(last: uuid.UUID | None, count: int) -> Sequence[Mapping[str, Any]]:
        return await volumes.records(store, address=address, status=status, after=last, limit=count)

    return await _page(fetch, lambda record: record, after=after, limit=limit)


async def list_jobs(
    store: database.Database,
    *,
    address: str | None,
    state: str | None,
    volume_id: uuid.UUID | None,
    after: uuid.UUID | None,
    limit: int,
) -> Page:
    """Jobs in the order of acceptance, their secrets masked."""

    async def fetch(last: uuid.UUID | None, count: int) -> Sequence[jobs.Job]:
        return await jobs.list_(
            store, address=address, state=state, volume_id=volume_id, after=last, limit=count
        )

    return await _page(fetch, jobs.Job.to_wire, after=after, limit=limit)


async def _page(
    fetch: Callable[[uuid.UUID | None, int], Awaitable[Sequence[Record]]],
    to_wire: Callable[[Record], Mapping[str, Any]],
    *,
    after: uuid.UUID | None,
    limit: int,
) -> Page:
    """Fetches records after one, a chunk at a time, until enough or too many bytes are there."""
    taken: list[Mapping[str, Any]] = []
    size = 0
    while len(taken) < limit:
        count = min(CHUNK, limit - len(taken))
        chunk = await fetch(after, count)
        for record in chunk:
            wire = to_wire(record)
            size += len(json.dumps(wire))
            # One is always there, however large, else a caller could not page past it.
            if taken and size > MAX_LIST_BYTES:
                return Page(taken, truncated=True)
            taken.append(wire)
        if len(chunk) < count:
            break
        after = uuid.UUID(str(taken[-1]["id"]))
    return Page(taken, truncated=False)
