"""The connector interface: how this host attaches a volume by a connection info.

``connect_volume`` gives a :class:`Device`; what it took to make it (a daemon, a session) is known
by ``key``, is gone after ``disconnect_volume``, and ends with the worker at the latest.
"""

import dataclasses
import enum
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from messages import errors
from worker import process


class Access(enum.Enum):
    """What the caller wants to reach the volume by."""

    PATH = "path"
    """A file or block device that any program can open."""
    STREAM = "stream"
    """Whatever moves bytes fastest: a path, or an NBD server."""


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """An attached volume: exactly one of ``path`` and ``nbd_uri`` is set.

    ``nbd_uri`` follows the NBD URI specification: ``nbd://HOST:PORT/EXPORT`` or
    ``nbd+unix:///EXPORT?socket=PATH``, without TLS.
    """

    path: pathlib.Path | None = None
    nbd_uri: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a connector is made from."""

    host: str
    execute: process.Executor
    state_dir: pathlib.Path
    """A folder for connectors of this host, which exists."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Connector(Protocol):
    """Attaches volumes of one kind of connection info. Subclass it."""

    driver_volume_type: ClassVar[str]

    def __init__(self, context: Context) -> None: ...

    async def get_connector_properties(self) -> Mapping[str, Any]:
        """What this host tells a target about itself: initiator, nqn, …; {} where nothing."""
        return {}

    async def connect_volume(
        self, data: Mapping[str, Any], *, key: str, access: Access, read_only: bool
    ) -> Device:
        """Attaches; ``data`` is the connection info's, secrets included.

        Raises: ``DeviceUnavailable`` with nothing left behind.
        """
        raise NotImplementedError

    async def disconnect_volume(
        self, data: Mapping[str, Any], *, key: str, force: bool = False
    ) -> None:
        """Detaches what was attached under ``key``, flushed first; not attached is no error.

        With ``force`` a failing flush does not stop it.
        """
        raise NotImplementedError

    async def check_valid_device(self, device: Device) -> bool:
        """Whether the device can be read and is larger than nothing."""
        raise NotImplementedError

    async def unowned(self, keys: Collection[str]) -> Sequence[str]:
        """What is attached to this host, or is left of it, under none of ``keys``: a name each.

        A connector that leaves nothing when its worker ends finds nothing.
        """
        return ()

    async def discard(self, name: str) -> None:
        """Takes down what :meth:`unowned` has found; gone is no error."""
        raise errors.NotSupported("this connector leaves nothing that could be taken down")
