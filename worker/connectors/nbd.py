"""Volumes behind an NBD server, without a kernel module.

An export without TLS is used where it is by whoever wants a stream; for a path, or for TLS, which
this host's copiers need not speak, a bridge is built.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic

from messages import errors
from worker.connectors import base, bridge, connection_info, devices, exports
from worker.nbd import uri as uris

REACH_TIMEOUT: Final = 40.0
"""Seconds for the first look at an export."""
RECONNECT_DELAY: Final = 30
"""Seconds in which a server may come back before what waits for it fails."""


class Tls(pydantic.BaseModel):
    """How the client proves who it is: a pre-shared key (RFC 4279)."""

    type: Literal["psk"]
    username: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    psk_key: Annotated[str, pydantic.Field(pattern=r"^(?:[0-9A-Fa-f]{2}){16,64}$")]


class Info(pydantic.BaseModel):
    """The members of an NBD connection info that an attachment needs."""

    host: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9.:_%-]+$")]
    port: Annotated[int, pydantic.Field(ge=1, le=65535, strict=True)]
    export: Annotated[str, pydantic.Field(min_length=1, max_length=4096)]
    access_mode: Literal["rw", "ro"] = "rw"
    tls: Tls | None = None


class NbdConnector(base.Connector):
    """Attaches NBD exports in user space."""

    driver_volume_type: ClassVar[str] = "nbd"

    def __init__(self, context: base.Context) -> None:
        self._execute = context.execute
        self._bridges = bridge.Bridges(context.execute, context.state_dir / "nbd")
        self._direct: dict[str, base.Device] = {}

    async def connect_volume(
        self, data: Mapping[str, Any], *, key: str, access: base.Access, read_only: bool
    ) -> base.Device:
        """See :meth:`worker.connectors.base.Connector.connect_volume`.

        Raises:
            InvalidConnector: the connection info lacks something or contradicts itself.
            DeviceUnavailable: with nothing left behind.
        """
        info = connection_info.parse(Info, data)
        connection_info.check_access(info.access_mode, read_only=read_only)
        if info.tls is None:
            # Also before a bridge is built: this tells more of what is wrong than QEMU does.
            device = await _reach(info, read_only=read_only)
            if access is base.Access.STREAM:
                if not read_only:
                    self._direct[key] = device
                return device
        return await self._bridges.open(key, _source(info), access=access, read_only=read_only)

    async def disconnect_volume(
        self, data: Mapping[str, Any], *, key: str, force: bool = False
    ) -> None:
        """See :meth:`worker.connectors.base.Connector.disconnect_volume`."""
        device = self._direct.get(key)
        if device is not None:
            await devices.flush(self._execute, device, force=force)
            del self._direct[key]
        await self._bridges.close(key, force=force)

    async def check_valid_device(self, device: base.Device) -> bool:
        """See :meth:`worker.connectors.base.Connector.check_valid_device`."""
        return await devices.is_valid(self._execute, device)

    async def unowned(self, keys: Collection[str]) -> Sequence[str]:
        """See :meth:`worker.connectors.base.Connector.unowned`."""
        return self._bridges.unowned(keys)

    async def discard(self, name: str) -> None:
        """See :meth:`worker.connectors.base.Connector.discard`."""
        await self._bridges.discard(name)


async def _reach(info: Info, *, read_only: bool) -> base.Device:
    uri = uris.tcp_uri(info.host, info.port, info.export)
    looking = exports.visit(uri, lambda opened: opened.export.read_only)
    only_read = await devices.within(REACH_TIMEOUT, looking, who="the NBD server")
    if only_read and not read_only:
        raise errors.DeviceUnavailable("the NBD server serves this export read-only")
    return base.Device(nbd_uri=uri)


def _source(info: Info) -> bridge.Source:
    name = f"export {info.export!r} of the NBD server {info.host} port {info.port}"
    blockdev: dict[str, Any] = {
        "driver": "nbd",
        "server": {"type": "inet", "host": info.host, "port": str(info.port)},
        "export": info.export,
        "reconnect-delay": RECONNECT_DELAY,
    }
    if info.tls is None:
        return bridge.Source(name, blockdev)
    psk = (info.tls.username, info.tls.psk_key)
    return bridge.Source(name, {**blockdev, "tls-creds": bridge.TLS}, psk=psk)
