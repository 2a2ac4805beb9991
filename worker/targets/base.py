"""The target interface: how a volume is served to other hosts.

An *export* makes a volume servable; a *connection* is the right of one connector to it. A target is
told what to make after that was recorded, so whatever it made can be found again and undone. Every
method is idempotent, and undoing what is not there is no error. A service that is away is
``TargetError``.
"""

import dataclasses
import enum
import pathlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import pydantic

from messages import errors
from worker import process
from worker.drivers import base as drivers


class AccessMode(enum.StrEnum):
    """What a connection may do to the volume; the target enforces it."""

    READ_WRITE = "rw"
    READ_ONLY = "ro"


class ServedElsewhere(errors.TargetError):
    """Another worker process of this host drives the target; this one stands by."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """One connector's right to one volume."""

    id: uuid.UUID
    connector: Mapping[str, Any]
    """os-brick's connector properties as the caller gave them: host, ip, initiator, nqn, …"""
    access_mode: AccessMode
    credentials: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """What :meth:`Target.new_credentials` made for it; secret."""


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
    """One exported volume with its connections, as recorded: what has to be served."""

    volume: drivers.Volume
    path: pathlib.Path
    connections: Sequence[Connection]


@dataclasses.dataclass(frozen=True, slots=True)
class Info:
    """What a connector needs to attach: os-brick's connection info, its secrets apart.

    ``secrets`` are dotted paths into ``data`` with their values, such as ``auth_password``.
    """

    driver_volume_type: str
    data: Mapping[str, Any]
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


class Fault(enum.Enum):
    """How what is served differs from what is recorded."""

    MISSING = enum.auto()
    """Recorded, and not served, or not as recorded: :meth:`Target.restore` mends it."""
    UNOWNED = enum.auto()
    """Served of this backend's own making, or somebody let in, and recorded by nobody."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is served otherwise than recorded."""

    fault: Fault
    name: str
    """What the target calls it."""
    what: str
    """In words, for people."""
    volume_id: uuid.UUID | None = None
    """Where it is known."""


class Options(pydantic.BaseModel):
    """Options that every target has."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    target_address: str | None = pydantic.Field(
        None, description="what connections carry; needed where target_listen is a wildcard"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a target is made from."""

    host: str
    backend: str
    options: Any
    """An instance of the target's own ``Options``."""
    execute: process.Executor
    state_dir: pathlib.Path
    """A folder of this backend's own, which exists."""


class Target(Protocol):
    """Serves the volumes of one backend. Subclass it."""

    Options: ClassVar[type[pydantic.BaseModel]] = Options
    storage_protocol: ClassVar[str]
    """As Cinder's stats call it: iSCSI, NBD, NVMe-oF, …"""
    driver_volume_type: ClassVar[str]
    """As os-brick calls it: iscsi, nbd, …"""
    needs_local_path: ClassVar[bool] = True

    def __init__(self, context: Context) -> None: ...

    async def do_setup(self) -> None:
        """Prepares the target and checks that it can serve; raises what keeps it from that."""

    async def restore(
        self, exports: Sequence[Export]
    ) -> Mapping[uuid.UUID, errors.VolumeWorkerError]:
        """Makes every recorded export and connection be served again, under the same names.

        Called after every :meth:`do_setup`, and again when the service behind the target came back.
        What is served already is left undisturbed; of what this target recorded as its own and is
        not in ``exports`` nothing stays. Returns the errors by volume id: one bad volume does not
        stop the rest.
        """
        raise NotImplementedError

    async def check_health(self) -> bool:
        """Whether all that :meth:`restore` or later calls made is still served.

        False asks the worker to call :meth:`restore` again. Raises ``TargetError`` while the
        service is away. Cheap: called every few seconds.
        """
        return True

    async def compare(
        self, exports: Sequence[Export], volumes: Collection[uuid.UUID]
    ) -> Sequence[Difference]:
        """Compares what is really served with ``exports``, and changes nothing.

        ``volumes`` are all that the backend has: what a target shared with others shows is this
        backend's only where it recorded it, or where it is named after one of these. A target that
        remembers nothing finds nothing.
        """
        return ()

    async def remove_unowned(
        self,
        exports: Sequence[Export],
        volumes: Collection[uuid.UUID],
        names: Collection[str],
    ) -> Mapping[str, errors.VolumeWorkerError]:
        """Ends what :meth:`compare` finds unowned, still, and that is among ``names``.

        Nothing else changes what is served meanwhile. Returns the errors by name: one does not stop
        the rest.
        """
        return {}

    async def close(self) -> None:
        """Lets go of what the target holds; what serves a volume goes on serving."""

    def validate_connector(self, connector: Mapping[str, Any]) -> None:
        """Raises ``InvalidConnector`` naming what is missing or wrong in the connector."""

    async def create_export(self, volume: drivers.Volume, path: pathlib.Path) -> str | None:
        """Makes the volume servable; returns its ``provider_location``."""
        raise NotImplementedError

    async def remove_export(self, volume: drivers.Volume) -> None:
        """Undoes :meth:`create_export`, with any connection that is left."""
        raise NotImplementedError

    def new_credentials(self) -> Mapping[str, str]:
        """Makes the secrets of a new connection; they are recorded before they are used."""
        return {}

    async def initialize_connection(
        self, volume: drivers.Volume, path: pathlib.Path, connection: Connection
    ) -> Info:
        """Lets the connector in, and tells it how to attach; the export exists."""
        raise NotImplementedError

    async def terminate_connection(
        self, volume: drivers.Volume, connection: Connection, *, force: bool = False
    ) -> None:
        """Withdraws this connection's access and ends its sessions, and no other's."""
        raise NotImplementedError

    async def extend_volume(self, volume: drivers.Volume, path: pathlib.Path) -> None:
        """Shows live connections the volume's new size; called after the driver has grown it.

        Raises: ``NotSupported`` where the target cannot; :attr:`extends_online` says so beforehand.
        """
        raise errors.NotSupported("this target cannot extend a volume that is connected")

    extends_online: ClassVar[bool] = False
