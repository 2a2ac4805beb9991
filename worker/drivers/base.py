"""The driver interface: everything that a volume service asks of one backend's storage.

A driver knows nothing of messages, jobs or the database. It gets :class:`Volume` values, does its
work through :class:`worker.process.Executor`, and returns what is to be kept. Every method is
idempotent: a second call with the same arguments, after a crash at any point of the first, succeeds
and changes nothing more.
"""

import dataclasses
import enum
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import pydantic

from messages import errors
from worker import process


@dataclasses.dataclass(frozen=True, slots=True)
class Volume:
    """One volume, as a driver or a target sees it."""

    id: uuid.UUID
    name: str
    size_bytes: int
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    provider_location: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot, as a driver sees it."""

    id: uuid.UUID
    name: str
    volume_id: uuid.UUID
    size_bytes: int
    provider_location: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What is to be kept with the volume after a driver's call; None leaves a value alone."""

    provider_location: str | None = None
    metadata: Mapping[str, str] | None = None


class VolumeClear(enum.StrEnum):
    """How old data is wiped when a volume is deleted."""

    NONE = "none"
    ZERO = "zero"
    SHRED = "shred"


class Options(pydantic.BaseModel):
    """The options that every driver has; names, defaults and choices are those of Cinder."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    num_shell_tries: int = pydantic.Field(3, ge=1, le=100)
    reserved_percentage: int = pydantic.Field(0, ge=0, le=100)
    max_over_subscription_ratio: float = pydantic.Field(20.0, ge=1)
    volume_backend_name: str | None = None
    volume_clear: VolumeClear = VolumeClear.ZERO
    volume_clear_size: int = pydantic.Field(0, ge=0, le=1024, description="MiB; 0 means all")
    copy_verify: bool = True
    copy_bytes_per_second: int | None = pydantic.Field(
        None, ge=1, description="for all copies of the backend together; without it, any number"
    )
    # The next two are accepted and checked already, so that a configuration need not change later.
    use_multipath_for_image_xfer: bool = pydantic.Field(
        default=False, description="takes effect with the image methods, which are not built yet"
    )
    num_volume_device_scan_tries: int = pydantic.Field(
        3,
        ge=1,
        le=100,
        description="takes effect with kernel attach, which is not built yet",
        validation_alias=pydantic.AliasChoices(
            "num_volume_device_scan_tries", "num_iscsi_scan_tries"
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a driver is made from."""

    host: str
    backend: str
    options: Any
    """An instance of the driver's own ``Options``."""
    execute: process.Executor
    state_dir: pathlib.Path
    """A folder of this backend's own, which exists."""


class Driver(Protocol):
    """One backend's storage. Subclass it: what a driver cannot do answers ``NotSupported``."""

    Options: ClassVar[type[pydantic.BaseModel]] = Options
    VERSION: ClassVar[str] = "1.0"
    vendor_name: ClassVar[str] = "Open Source"
    default_target: ClassVar[str] = "nbd"
    """The target used where the configuration names none."""
    target_aliases: ClassVar[Mapping[str, str]] = {}
    """Targets that the configuration may name, by what they mean for this driver."""

    def __init__(self, context: Context) -> None: ...

    # Life cycle

    async def do_setup(self) -> None:
        """Prepares the backend; called before any other method, again after a failure.

        Raises: any error of the tree; the set-up is then tried again with backoff.
        """

    async def check_for_setup_error(self) -> None:
        """Looks whether the backend can work: tools, rights, space."""

    async def close(self) -> None:
        """Lets go of what the driver holds; nothing that serves a volume is ended."""

    async def get_volume_stats(self, *, refresh: bool = False) -> Mapping[str, Any]:
        """Capacities in bytes, and what this driver can do.

        Members: ``total_capacity_bytes``, ``free_capacity_bytes``, ``provisioned_capacity_bytes``
        (numbers, or the words ``infinite`` or ``unknown``), ``storage_protocol``,
        ``thin_provisioning_support``, ``thick_provisioning_support``, ``multiattach``,
        ``online_extend_support``, ``sparse_copy_volume``, ``total_volumes``. The worker adds the
        rest (names, reserved percentage, the same capacities in GiB).
        """
        raise errors.NotSupported("this driver tells no stats")

    # Volumes

    async def create_volume(self, volume: Volume) -> Update:
        """Makes a volume of ``size_bytes``, rounded up as its storage must, that reads as zeros.

        Raises: ``InsufficientSpace`` with nothing made.
        """
        raise errors.NotSupported("this driver cannot create a volume")

    async def delete_volume(self, volume: Volume) -> None:
        """Removes the volume, wiped as ``volume_clear`` says; one that is gone is no error."""
        raise errors.NotSupported("this driver cannot delete a volume")

    async def extend_volume(self, volume: Volume, new_size_bytes: int) -> None:
        """Grows the volume; the new part reads as zeros."""
        raise errors.NotSupported("this driver cannot extend a volume")

    async def find_volume(self, volume: Volume) -> int | None:
        """The size in bytes that the volume really has on the storage, or None."""
        raise errors.NotSupported("this driver cannot find a volume")

    async def list_volumes(self) -> Mapping[uuid.UUID, int] | None:
        """The sizes in bytes of all that the storage has under names of volumes, by their ids.

        None where it cannot be listed; then each volume is asked for by :meth:`find_volume`.
        """
        return None

    def local_path(self, volume: Volume) -> pathlib.Path:
        """Where this host can open the volume.

        Raises: ``NotSupported`` where the storage shows no local path.
        """
        raise errors.NotSupported("this driver has no local path")

    async def create_volume_from_snapshot(self, volume: Volume, snapshot: Snapshot) -> Update:
        """Makes a volume with a snapshot's content."""
        raise errors.NotSupported("this driver cannot create a volume from a snapshot")

    async def create_cloned_volume(self, volume: Volume, source: Volume) -> Update:
        """Makes a volume with another volume's content."""
        raise errors.NotSupported("this driver cannot clone a volume")

    # Snapshots

    async def create_snapshot(self, snapshot: Snapshot, volume: Volume) -> Update:
        """Keeps the volume's content of now."""
        raise errors.NotSupported("this driver cannot make snapshots")

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        """Removes a snapshot; one that is gone is no error."""
        raise errors.NotSupported("this driver cannot delete snapshots")

    async def revert_to_snapshot(self, volume: Volume, snapshot: Snapshot) -> None:
        """Puts the snapshot's content back into its volume."""
        raise errors.NotSupported("this driver cannot revert to a snapshot")

    # Images, backups, migration: a driver implements these only where its storage has a shorter
    # way than attaching the volume and moving its bytes; None or False means that it has none.

    async def clone_image(self, volume: Volume, location: str, image_format: str) -> Update | None:
        """Makes a volume from an image that the storage itself can reach."""
        return None

    async def copy_image_to_volume(
        self, volume: Volume, location: str, image_format: str
    ) -> Update | None:
        """Writes an image into the volume by the storage's own means."""
        return None

    async def copy_volume_to_image(self, volume: Volume, location: str, image_format: str) -> bool:
        """Writes the volume to an image by the storage's own means."""
        return False

    async def backup_volume(self, volume: Volume, location: str) -> bool:
        """Backs the volume up by the storage's own means."""
        return False

    async def restore_backup(self, volume: Volume, location: str) -> bool:
        """Restores a backup by the storage's own means."""
        return False

    async def clear_download(self, volume: Volume) -> None:
        """Removes what an interrupted image download left."""

    async def migrate_volume(self, volume: Volume, destination: str) -> Update | None:
        """Moves the volume to another address by the storage's own means."""
        return None

    async def accept_transfer(self, volume: Volume, new_user: str, new_project: str) -> Update:
        """Told that the volume has a new owner."""
        return Update()

    # Hooks

    async def attach_volume(
        self,
        volume: Volume,
        instance_uuid: uuid.UUID | None,
        host_name: str | None,
        mountpoint: str,
    ) -> None:
        """Told that an instance or host uses the volume."""

    async def detach_volume(self, volume: Volume) -> None:
        """Told that an instance or host uses the volume no more."""
