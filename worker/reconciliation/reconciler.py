"""Reconciling one backend: two looks that agree, and then, where it is asked for, the mending.

What is mended is looked at a third time while nothing else changes what the target serves, and a
fourth time afterwards: repaired is what is found no more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog

from messages import errors
from messages.findings import Finding, FindingKind, Identity
from worker import backend as backends
from worker import leftovers
from worker.reconciliation import host, journal, look, serving
from worker.store import connections, database
from worker.store import reconciliation as records

log = structlog.get_logger(__name__)

ALL: Final = frozenset(FindingKind)
"""What an operator's repair mends, as far as a machine may."""
SAFE: Final = ALL - {FindingKind.LEFT_CONNECTION}
"""What is mended in the rounds; connections left are swept up there anyway, in larger steps."""
MAX_FINDINGS: Final = 5000
"""In one answer: each has some hundred bytes, and a broker takes 16 MiB in a message."""
PAUSE: Final = 0.3
"""Seconds between two looks that have to agree."""


class Reconciler:
    """Reconciles one backend, and the host that it is on.

    Args:
        accept: stores the jobs that end what was left.
        say_volume: tells of a volume whose status was mended.
    """

    def __init__(
        self,
        store: database.Database,
        backend: backends.Backend,
        on: host.Host,
        *,
        accept: leftovers.Accept,
        say_volume: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._store = store
        self._backend = backend
        self._host = on
        self._accept = accept
        self._say_volume = say_volume
        self._working = asyncio.Lock()

    async def run(self, *, repair: Collection[FindingKind] = ()) -> list[Finding]:
        """What is wrong; what is of a kind to ``repair`` is mended, and says whether it was.

        Raises:
            Unreachable: the database is away.
        """
        async with self._working:
            found = await self._look_twice()
            to_mend = [one for one in found if one.action and one.kind in repair]
            if not to_mend:
                return found
            failures = await self._mend(to_mend)
            left = {one.identity for one in await self._look_twice()}
        after = [_after(one, left, failures) if one in to_mend else one for one in found]
        for one in after:
            # The host logs its own, which each of its backends has found.
            if one.repaired and one.address == self._backend.address:
                log.warning("reconciliation.repaired", **journal.described(one))
        return after

    async def round(self) -> None:
        """Mends what is safe to mend, and logs what is new."""
        found = await self.run(repair=SAFE)
        self._host.journal.note([self._backend.address, self._host.name], found)

    async def _look_twice(self) -> list[Finding]:
        first = await self._look()
        if not first:
            return []
        await asyncio.sleep(PAUSE)
        again = {one.identity for one in await self._look()}
        return [one for one in first if one.identity in again]

    async def _look(self) -> list[Finding]:
        return [*await look.take(self._store, self._backend), *await self._host.look()]

    # Mending

    async def _mend(self, found: Sequence[Finding]) -> dict[Identity, str]:
        """Mends what can be, kind by kind; returns what failed, in words."""
        failures: dict[Identity, str] = {}
        steps: Mapping[Callable[[set[Identity]], Awaitable[Mapping[Identity, str]]], set[str]] = {
            self._settle: {FindingKind.STUCK_STATUS, FindingKind.WRONG_STATUS},
            self._serve: {FindingKind.MISSING_EXPORT, FindingKind.UNOWNED_EXPORT},
            self._host.mend: {FindingKind.UNOWNED_DEVICE, FindingKind.UNOWNED_PROCESS},
            # Last, since the jobs are at work from then on.
            self._end_left: {FindingKind.LEFT_CONNECTION},
        }
        for step, kinds in steps.items():
            wrong = {one.identity for one in found if one.kind in kinds}
            if wrong:
                failures |= await self._guarded(step, wrong)
        return failures

    async def _guarded(
        self,
        step: Callable[[set[Identity]], Awaitable[Mapping[Identity, str]]],
        wrong: set[Identity],
    ) -> Mapping[Identity, str]:
        try:
            return await step(wrong)
        except errors.Unreachable:
            raise
        except errors.VolumeWorkerError as error:
            return dict.fromkeys(wrong, error.message)

    async def _settle(self, wrong: set[Identity]) -> Mapping[Identity, str]:
        ids = {identity.subject for identity in wrong}
        for volume in await records.misplaced(self._store, self._backend.address):
            if str(volume.id) in ids and (event := await records.settle(self._store, volume)):
                self._say_volume(event)
        return {}

    async def _serve(self, wrong: set[Identity]) -> Mapping[Identity, str]:
        async with self._backend.serving.alone():
            again = await look.take_target(self._store, self._backend)
            return await self._serve_alone([one for one in again if one.identity in wrong])

    async def _serve_alone(self, wrong: Sequence[Finding]) -> Mapping[Identity, str]:
        failures: dict[Identity, str] = {}
        missing = _of(FindingKind.MISSING_EXPORT, wrong)
        if missing:
            failed = await serving.restore(self._store, self._backend)
            failures |= {
                one.identity: failed[one.volume_id].message
                for one in missing
                if one.volume_id is not None and one.volume_id in failed
            }
        unowned = {one.subject: one.identity for one in _of(FindingKind.UNOWNED_EXPORT, wrong)}
        if unowned:
            exports = await serving.recorded(self._store, self._backend)
            volumes = await records.volumes(self._store, self._backend.address)
            left = await self._backend.target.remove_unowned(
                exports, volumes.keys(), unowned.keys()
            )
            failures |= {unowned[name]: error.message for name, error in left.items()}
        return failures

    async def _end_left(self, wrong: set[Identity]) -> Mapping[Identity, str]:
        ids = {identity.subject for identity in wrong}
        address = self._backend.address
        left = [
            one
            for one in await connections.leftovers(self._store, address)
            if str(one.subject) in ids
        ]
        if left:
            await self._accept([leftovers.ending(address, one) for one in left])
        return {}


def _of(kind: FindingKind, found: Iterable[Finding]) -> list[Finding]:
    return [one for one in found if one.kind is kind]


def _after(one: Finding, left: Collection[Identity], failures: Mapping[Identity, str]) -> Finding:
    repaired = one.identity not in left
    error = None if repaired else failures.get(one.identity)
    return one.model_copy(update={"repaired": repaired, "error": error})


def to_wire(found: Sequence[Finding]) -> dict[str, Any]:
    """The result of the method ``reconcile``."""
    cut = {"truncated": True} if len(found) > MAX_FINDINGS else {}
    return {"findings": [one.to_wire() for one in found[:MAX_FINDINGS]], **cut}
