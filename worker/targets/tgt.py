"""Serves volumes by iSCSI from the tgtd that the machine runs.

tgtd knows nothing of its targets after a restart, and belongs to the machine: it is never started
or ended here, and only targets that this backend has recorded are touched. A record is made before
its target and removed after it.
"""

import asyncio
import contextlib
import ipaddress
import os
import pathlib
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Final, Literal

import pydantic
import structlog

from messages import errors
from worker.drivers import base as drivers
from worker.targets import base, iscsi, tgt_inventory, tgt_records, tgtadm

log = structlog.get_logger(__name__)

_PATIENCE: Final = 10.0
"""Seconds that a target may take to be gone."""
_LOOK_AGAIN: Final = 0.1
"""Seconds between two looks."""
_TRIES: Final = 20
"""How often a target id is chosen that a stranger takes in the same moment."""

# The caching mode page (SBC-3, 6.4.5) with WCE 0, so that tgtd writes each block through.
_NO_WRITE_CACHE: Final = (
    "mode_page=8:0:18:0x10:0:0xff:0xff:0:0:0xff:0xff:0xff:0xff:0x80:0x14:0:0:0:0:0:0"
)


class Options(iscsi.Options):
    """Options of the tgt target; the names are Cinder's."""

    iscsi_write_cache: Literal["on", "off"] = pydantic.Field(
        "on", description="off: each write is on the disk before it is answered"
    )


class TgtTarget(iscsi.IscsiTarget):
    """The tgt target."""

    Options: ClassVar[type[pydantic.BaseModel]] = Options

    def __init__(self, context: base.Context) -> None:
        super().__init__(context)
        self._write_cache = context.options.iscsi_write_cache == "on"
        self._tgtadm = tgtadm.Tgtadm(context.execute)
        self._records = tgt_records.Records(context.state_dir / "tgt")
        self._choosing_id = asyncio.Lock()
        self._served: set[str] = set()
        """The names of what this worker process made or found served."""
        self._set_up_at = time.time()

    # Life cycle

    async def do_setup(self) -> None:
        """See :meth:`worker.targets.base.Target.do_setup`.

        Raises:
            TargetError: tgtd or tgtadm is missing or refuses to talk.
        """
        self._set_up_at = time.time()
        self._records.make()
        served = await self._tgtadm.portals()
        if not any(_covers(listening, self.portal) for listening in served):
            # Not an error: something between tgtd and the initiators may translate addresses.
            log.warning(
                "target.portal_not_served", portal=str(self.portal), served=[*map(str, served)]
            )

    async def restore(
        self, exports: Sequence[base.Export]
    ) -> Mapping[uuid.UUID, errors.VolumeWorkerError]:
        """See :meth:`worker.targets.base.Target.restore`.

        What another worker process of this host has recorded since this one was set up is left
        alone: it may be newer than ``exports``.
        """
        wanted = {iqn for export in exports for iqn in self._names(export)}
        for iqn in self._records.names():
            newer = self._records.made_at(iqn) > self._set_up_at and iqn not in self._served
            if iqn not in wanted and not newer:
                await self._sweep(iqn)
        failures: dict[uuid.UUID, errors.VolumeWorkerError] = {}
        for export in exports:
            try:
                await self._restore(export)
            except tgtadm.DaemonAway:
                raise
            except errors.VolumeWorkerError as error:
                failures[export.volume.id] = error
        return failures

    async def _sweep(self, iqn: str) -> None:
        try:
            await self._remove(iqn)
        except tgtadm.DaemonAway:
            raise
        except errors.VolumeWorkerError as error:
            log.warning("target.not_removed", target_iqn=iqn, error=error.message)

    async def check_health(self) -> bool:
        """See :meth:`worker.targets.base.Target.check_health`."""
        shown = await self._tgtadm.targets()
        lost = [iqn for iqn in self._served if not _is_whole(shown.get(iqn))]
        # One that another worker process of this host has ended is no loss.
        return not any(self._records.has(iqn) for iqn in lost)

    async def compare(
        self, exports: Sequence[base.Export], volumes: Collection[uuid.UUID]
    ) -> Sequence[base.Difference]:
        """See :meth:`worker.targets.base.Target.compare`."""
        shown = await self._tgtadm.targets()
        return [one.difference for one in self._differences(shown, exports, volumes)]

    async def remove_unowned(
        self,
        exports: Sequence[base.Export],
        volumes: Collection[uuid.UUID],
        names: Collection[str],
    ) -> Mapping[str, errors.VolumeWorkerError]:
        """See :meth:`worker.targets.base.Target.remove_unowned`."""
        shown = await self._tgtadm.targets()
        unowned = [
            one
            for one in self._differences(shown, exports, volumes)
            if one.difference.fault is base.Fault.UNOWNED and one.difference.name in names
        ]
        failures: dict[str, errors.VolumeWorkerError] = {}
        # Whoever is cut logs in again at once where any way in is left: first all of these go.
        for step in (self._remove_difference, self._cut_intruders):
            for one in unowned:
                try:
                    await step(one)
                except tgtadm.DaemonAway:
                    raise
                except errors.VolumeWorkerError as error:
                    failures[one.difference.name] = error
        return failures

    def _differences(
        self,
        shown: Mapping[str, tgtadm.Target],
        exports: Sequence[base.Export],
        volumes: Collection[uuid.UUID],
    ) -> list[tgt_inventory.Found]:
        wanted = [entry for export in exports for entry in self._entries(export)]
        ours = tgt_inventory.Ours(f"{self.prefix}volume-", volumes, self._records.names())
        return list(tgt_inventory.compare(wanted, shown, ours))

    def _entries(self, export: base.Export) -> Iterable[tgt_inventory.Wanted]:
        volume_id, path = export.volume.id, os.fspath(export.path)
        yield tgt_inventory.Wanted(self.volume_iqn(volume_id), volume_id, path)
        for connection in export.connections:
            yield tgt_inventory.Wanted(
                self.connection_iqn(volume_id, connection.id),
                volume_id,
                path,
                initiator=_initiator(connection),
                user=connection.credentials.get("auth_username"),
                is_read_only=connection.access_mode is base.AccessMode.READ_ONLY,
            )

    async def _remove_difference(self, found: tgt_inventory.Found) -> None:
        if found.target is None or found.intruder is None:
            # Recorded first, as what is made is: an end that fails is found again.
            await self._records.add(found.iqn, None)
            await self._remove(found.iqn)
        elif found.intruder in found.target.accounts:
            await self._tgtadm.unbind_account(found.target.tid, found.intruder)
        else:
            await self._tgtadm.unbind_initiator(found.target.tid, found.intruder)

    async def _cut_intruders(self, found: tgt_inventory.Found) -> None:
        target = (await self._tgtadm.targets()).get(found.iqn)
        if found.intruder is None or target is None:
            return
        for session, connection in target.connections:
            if target.sessions.get(session) != found.initiator:
                await self._tgtadm.close_connection(target.tid, session, connection)

    # Exports

    async def create_export(self, volume: drivers.Volume, path: pathlib.Path) -> str | None:
        """See :meth:`worker.targets.base.Target.create_export`.

        The export lets nobody in: each connection has a target of its own.
        """
        await self._serve(self.volume_iqn(volume.id), volume.id, path, None)
        return self.provider_location(volume.id)

    async def remove_export(self, volume: drivers.Volume) -> None:
        """See :meth:`worker.targets.base.Target.remove_export`."""
        export = self.volume_iqn(volume.id)
        names = [iqn for iqn in self._records.names() if iqn.startswith(f"{export}-")]
        await self._remove_all([*names, export])

    # Connections

    async def initialize_connection(
        self, volume: drivers.Volume, path: pathlib.Path, connection: base.Connection
    ) -> base.Info:
        """See :meth:`worker.targets.base.Target.initialize_connection`."""
        self.validate_connector(connection.connector)
        iqn = self.connection_iqn(volume.id, connection.id)
        await self._serve(iqn, volume.id, path, connection)
        return self.info(volume, connection)

    async def terminate_connection(
        self, volume: drivers.Volume, connection: base.Connection, *, force: bool = False
    ) -> None:
        """See :meth:`worker.targets.base.Target.terminate_connection`.

        Sessions are cut with or without ``force``: the caller has ended them, or cannot.
        """
        await self._remove(self.connection_iqn(volume.id, connection.id))

    # Making

    async def _restore(self, export: base.Export) -> None:
        volume_id = export.volume.id
        await self._serve(self.volume_iqn(volume_id), volume_id, export.path, None)
        for connection in export.connections:
            iqn = self.connection_iqn(volume_id, connection.id)
            await self._serve(iqn, volume_id, export.path, connection)

    def _names(self, export: base.Export) -> Iterable[str]:
        yield self.volume_iqn(export.volume.id)
        for connection in export.connections:
            yield self.connection_iqn(export.volume.id, connection.id)

    async def _serve(
        self,
        iqn: str,
        volume_id: uuid.UUID,
        path: pathlib.Path,
        connection: base.Connection | None,
    ) -> None:
        """Makes a target as far as it is not there; one that was not made whole is removed."""
        user = self.account(connection)[0] if connection else None
        await self._records.add(iqn, user)
        target = await self._target(iqn)
        if connection is None or not _is_complete(target, path, connection, user):
            try:
                await self._complete(target, volume_id, path, connection)
            except BaseException:
                with contextlib.suppress(errors.VolumeWorkerError):
                    await asyncio.shield(self._remove(iqn))
                raise
        self._served.add(iqn)

    async def _complete(
        self,
        target: tgtadm.Target,
        volume_id: uuid.UUID,
        path: pathlib.Path,
        connection: base.Connection | None,
    ) -> None:
        read_only = connection is not None and connection.access_mode is base.AccessMode.READ_ONLY
        await self._add_unit(target, volume_id, path, read_only=read_only)
        if connection is not None:
            await self._add_account(target, connection)
            # Last, so that nobody is let in before the access mode and the secret hold.
            if _initiator(connection) not in target.initiators:
                await self._tgtadm.bind_initiator(target.tid, _initiator(connection))

    async def _target(self, iqn: str) -> tgtadm.Target:
        async with self._choosing_id:
            for _ in range(_TRIES):
                shown = await self._tgtadm.targets()
                if iqn in shown:
                    return shown[iqn]
                tid = _lowest_free({target.tid for target in shown.values()})
                try:
                    await self._tgtadm.new_target(tid, iqn)
                except tgtadm.Refused as error:
                    refusal = error
                else:
                    return tgtadm.Target(tid, iqn)
            raise refusal

    async def _add_unit(
        self,
        target: tgtadm.Target,
        volume_id: uuid.UUID,
        path: pathlib.Path,
        *,
        read_only: bool,
    ) -> None:
        unit = target.units.get(iscsi.LUN)
        if unit is not None and unit.path != os.fspath(path):
            await self._tgtadm.delete_unit(target.tid, iscsi.LUN)
            unit = None
        if unit is None:
            await self._tgtadm.new_unit(target.tid, iscsi.LUN, path)
        parameters = [
            # Holes in the file are then seen as such, and UNMAP makes new ones.
            "thin_provisioning=1",
            f"readonly={read_only:d}",
            # By its own number, tgtd would name units of two hosts alike, and multipath would take
            # two volumes for one. The first digit is the format's (NAA 6, SPC-4, 7.8.6.6).
            f"scsi_id=6{volume_id.hex[1:]}",
            f"scsi_sn={volume_id.hex}",
        ]
        if not self._write_cache:
            parameters.append(_NO_WRITE_CACHE)
        await self._tgtadm.update_unit(target.tid, iscsi.LUN, parameters)

    async def _add_account(self, target: tgtadm.Target, connection: base.Connection) -> None:
        user, secret = self.account(connection)
        if user in target.accounts:
            return
        if user not in await self._tgtadm.accounts():
            await self._tgtadm.new_account(user, secret)
        await self._tgtadm.bind_account(target.tid, user)

    # Removing

    async def _remove_all(self, names: Iterable[str]) -> None:
        failures = []
        for iqn in names:
            try:
                await self._remove(iqn)
            except errors.VolumeWorkerError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _remove(self, iqn: str) -> None:
        """Removes a recorded target with its sessions and account; what is gone is no error."""
        if self._records.has(iqn):
            user = self._records.user(iqn)
            await self._remove_target(iqn)
            if user is not None and user in await self._tgtadm.accounts():
                await self._tgtadm.delete_account(user)
            self._records.remove(iqn)
        self._served.discard(iqn)

    async def _remove_target(self, iqn: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        pause = 0.0
        while (target := (await self._tgtadm.targets()).get(iqn)) is not None:
            if time.monotonic() > deadline:
                raise errors.TargetError(
                    f"tgtd does not let go of {iqn} within {_PATIENCE:g} s", target_iqn=iqn
                )
            try:
                await self._take_down(target)
            except tgtadm.Refused as error:
                # Its state has changed since it was looked at; the next look tells.
                log.info("target.removal_refused", target_iqn=iqn, error=error.message)
            await asyncio.sleep(pause)
            pause = _LOOK_AGAIN

    async def _take_down(self, target: tgtadm.Target) -> None:
        # An initiator logs in again at once where it still may.
        for initiator in target.initiators:
            await self._tgtadm.unbind_initiator(target.tid, initiator)
        for session, connection in target.connections:
            await self._tgtadm.close_connection(target.tid, session, connection)
        await self._tgtadm.delete_target(target.tid)


def _covers(listening: iscsi.Portal, portal: iscsi.Portal) -> bool:
    everywhere = ipaddress.ip_address(listening.address).is_unspecified
    return listening.port == portal.port and (everywhere or listening.address == portal.address)


def _initiator(connection: base.Connection) -> str:
    return str(connection.connector["initiator"])


def _is_complete(
    target: tgtadm.Target, path: pathlib.Path, connection: base.Connection, user: str | None
) -> bool:
    unit = target.units.get(iscsi.LUN)
    return (
        unit is not None
        and unit.path == os.fspath(path)
        and unit.read_only == (connection.access_mode is base.AccessMode.READ_ONLY)
        and _initiator(connection) in target.initiators
        and user in target.accounts
    )


def _is_whole(target: tgtadm.Target | None) -> bool:
    return target is not None and iscsi.LUN in target.units


def _lowest_free(taken: set[int]) -> int:
    return next(tid for tid in range(1, len(taken) + 2) if tid not in taken)
