"""Drivers that store nothing, for trying out everything around a driver.

No program is run, nothing is written, and nothing is remembered: every volume exists, in the size
that it is said to have.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import structlog

from worker.drivers import base

log = structlog.get_logger(__name__)


class FakeISCSIDriver(base.Driver):
    """Storage without an end that is served by iSCSI, so it says."""

    default_target: ClassVar[str] = "fake"
    storage_protocol: ClassVar[str] = "iSCSI"

    def __init__(self, context: base.Context) -> None:
        self._log = log.bind(backend=context.backend)

    async def get_volume_stats(self, *, refresh: bool = False) -> Mapping[str, Any]:
        """See :meth:`worker.drivers.base.Driver.get_volume_stats`."""
        return {
            "total_capacity_bytes": "infinite",
            "free_capacity_bytes": "infinite",
            "provisioned_capacity_bytes": 0,
            "storage_protocol": self.storage_protocol,
            "thin_provisioning_support": True,
            "thick_provisioning_support": False,
            "multiattach": False,
            "online_extend_support": True,
            "sparse_copy_volume": True,
            "total_volumes": 0,
        }

    async def create_volume(self, volume: base.Volume) -> base.Update:
        """See :meth:`worker.drivers.base.Driver.create_volume`."""
        return self._pretend("create_volume", volume_id=str(volume.id))

    async def delete_volume(self, volume: base.Volume) -> None:
        """See :meth:`worker.drivers.base.Driver.delete_volume`."""
        self._pretend("delete_volume", volume_id=str(volume.id))

    async def extend_volume(self, volume: base.Volume, new_size_bytes: int) -> None:
        """See :meth:`worker.drivers.base.Driver.extend_volume`."""
        self._pretend("extend_volume", volume_id=str(volume.id), size_bytes=new_size_bytes)

    async def find_volume(self, volume: base.Volume) -> int | None:
        """See :meth:`worker.drivers.base.Driver.find_volume`."""
        return volume.size_bytes

    async def create_volume_from_snapshot(
        self, volume: base.Volume, snapshot: base.Snapshot
    ) -> base.Update:
        """See :meth:`worker.drivers.base.Driver.create_volume_from_snapshot`."""
        return self._pretend("create_volume_from_snapshot", volume_id=str(volume.id))

    async def create_cloned_volume(self, volume: base.Volume, source: base.Volume) -> base.Update:
        """See :meth:`worker.drivers.base.Driver.create_cloned_volume`."""
        return self._pretend("create_cloned_volume", volume_id=str(volume.id))

    async def create_snapshot(self, snapshot: base.Snapshot, volume: base.Volume) -> base.Update:
        """See :meth:`worker.drivers.base.Driver.create_snapshot`."""
        return self._pretend("create_snapshot", snapshot_id=str(snapshot.id))

    async def delete_snapshot(self, snapshot: base.Snapshot) -> None:
        """See :meth:`worker.drivers.base.Driver.delete_snapshot`."""
        self._pretend("delete_snapshot", snapshot_id=str(snapshot.id))

    async def revert_to_snapshot(self, volume: base.Volume, snapshot: base.Snapshot) -> None:
        """See :meth:`worker.drivers.base.Driver.revert_to_snapshot`."""
        self._pretend("revert_to_snapshot", volume_id=str(volume.id))

    def _pretend(self, method: str, **details: Any) -> base.Update:
        self._log.debug("driver.pretended", method=method, **details)
        return base.Update()


class FakeISERDriver(FakeISCSIDriver):
    """Storage without an end that is served by iSER, so it says."""

    default_target: ClassVar[str] = "fake_iser"
    target_aliases: ClassVar[Mapping[str, str]] = {"fake": "fake_iser"}
    storage_protocol: ClassVar[str] = "iSER"
