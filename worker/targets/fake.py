"""Targets that serve nothing and tell a connector all that a real one would."""

import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import pydantic

from messages import errors
from worker.drivers import base as drivers
from worker.targets import base, iscsi


class FakeTarget(iscsi.IscsiTarget):
    """Serves every volume by iSCSI, so it says: no program is run and nothing is remembered."""

    needs_local_path: ClassVar[bool] = False
    extends_online: ClassVar[bool] = True

    async def restore(
        self, exports: Sequence[base.Export]
    ) -> Mapping[uuid.UUID, errors.VolumeWorkerError]:
        """See :meth:`worker.targets.base.Target.restore`."""
        return {}

    async def create_export(self, volume: drivers.Volume, path: pathlib.Path) -> str | None:
        """See :meth:`worker.targets.base.Target.create_export`."""
        return self.provider_location(volume.id)

    async def remove_export(self, volume: drivers.Volume) -> None:
        """See :meth:`worker.targets.base.Target.remove_export`."""

    async def initialize_connection(
        self, volume: drivers.Volume, path: pathlib.Path, connection: base.Connection
    ) -> base.Info:
        """See :meth:`worker.targets.base.Target.initialize_connection`."""
        return self.info(volume, connection)

    async def terminate_connection(
        self, volume: drivers.Volume, connection: base.Connection, *, force: bool = False
    ) -> None:
        """See :meth:`worker.targets.base.Target.terminate_connection`."""

    async def extend_volume(self, volume: drivers.Volume, path: pathlib.Path) -> None:
        """See :meth:`worker.targets.base.Target.extend_volume`."""


class IserOptions(base.Options):
    """Options of an iSER target; the names are Cinder's."""

    target_address: iscsi.Address | None = pydantic.Field(
        None, description="what connections carry"
    )
    iser_target_prefix: iscsi.Prefix = "iqn.2010-10.org.iser.openstack:"
    iser_ip_address: iscsi.Address | None = pydantic.Field(
        None, description="the older name of target_address; 127.0.0.1 where neither is given"
    )
    iser_port: iscsi.Port = 3260

    @pydantic.model_validator(mode="after")
    def _one_address(self) -> Self:
        iscsi.check_agreement(self.target_address, self.iser_ip_address, "iser_ip_address")
        return self

    @property
    def prefix(self) -> str:
        """What every target's name begins with."""
        return self.iser_target_prefix

    @property
    def portal(self) -> iscsi.Portal:
        """Where every target is reached."""
        address = self.target_address or self.iser_ip_address or "127.0.0.1"
        return iscsi.Portal(address, self.iser_port)


class FakeIserTarget(FakeTarget):
    """Serves every volume by iSER, so it says."""

    Options: ClassVar[type[pydantic.BaseModel]] = IserOptions
    storage_protocol: ClassVar[str] = "iSER"
    driver_volume_type: ClassVar[str] = "iser"
