"""Volumes behind an iSCSI target, without the kernel's initiator.

QEMU's own initiator (libiscsi, ``qapi/block-core.json``: ``BlockdevOptionsIscsi``) logs in, and a
bridge shows the volume as an NBD server or a file.
"""

import hashlib
import ipaddress
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic

from worker import durable
from worker.connectors import base, bridge, connection_info, devices

COMMAND_TIMEOUT: Final = 30
"""Seconds for a SCSI command, after which libiscsi takes the session for lost."""

_SYSTEM_NAME: Final = pathlib.Path("/etc/iscsi/initiatorname.iscsi")
_NAME_LINE: Final = re.compile(r"^\s*InitiatorName\s*=\s*(\S+)\s*$", re.MULTILINE)
# RFC 7143, 4.2.7: type, then date and reversed domain, or 16 or 32 hexadecimal digits.
_NAME: Final = re.compile(
    r"iqn\.\d{4}-(?:0[1-9]|1[0-2])\.[A-Za-z0-9][A-Za-z0-9.-]*(?::[^\s,;\x00-\x1f\x7f]+)?"
    r"|eui\.[0-9A-Fa-f]{16}"
    r"|naa\.(?:[0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})"
)
_NAME_LIMIT: Final = 223
"""Bytes."""
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def check_name(name: str) -> str:
    """Returns an iSCSI name as it is.

    Raises:
        ValueError: it is not one by RFC 7143.
    """
    if len(name.encode()) > _NAME_LIMIT or not _NAME.fullmatch(name):
        raise ValueError("is not an iSCSI name (iqn.YYYY-MM.DOMAIN[:TEXT], eui. or naa.)")
    return name


def check_portal(portal: str) -> str:
    """Returns ``HOST:PORT`` as it is; an IPv6 address stands in brackets.

    Raises:
        ValueError: it is not one.
    """
    host, _, port = portal.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError("is not HOST:PORT with a port from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        ipaddress.IPv6Address(host[1:-1])
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError("is not HOST:PORT; an IPv6 address stands in brackets")
    return portal


class Info(pydantic.BaseModel):
    """The members of an iSCSI connection info that an attachment needs; the names are Cinder's."""

    target_portal: Annotated[str, pydantic.AfterValidator(check_portal)]
    target_iqn: Annotated[str, pydantic.AfterValidator(check_name)]
    target_lun: Annotated[int, pydantic.Field(ge=0, le=16383, strict=True)]
    auth_method: Literal["CHAP"] | None = None
    auth_username: Annotated[str, pydantic.Field(min_length=1, max_length=255)] | None = None
    auth_password: Annotated[str, pydantic.Field(min_length=1, max_length=255)] | None = None
    access_mode: Literal["rw", "ro"] = "rw"

    @pydantic.model_validator(mode="after")
    def _has_credentials(self) -> "Info":
        if self.auth_method and not (self.auth_username and self.auth_password):
            raise ValueError("auth_method CHAP needs auth_username and auth_password")
        return self


class IscsiConnector(base.Connector):
    """Attaches iSCSI LUNs in user space."""

    driver_volume_type: ClassVar[str] = "iscsi"

    def __init__(self, context: base.Context) -> None:
        self._host = context.host
        self._execute = context.execute
        self._state_dir = context.state_dir
        self._bridges = bridge.Bridges(context.execute, context.state_dir / "iscsi")

    async def get_connector_properties(self) -> Mapping[str, Any]:
        """This host's initiator name: the system's, or one of the worker's own that stays."""
        return {"initiator": await self._initiator()}

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
        source = _source(info, await self._initiator())
        return await self._bridges.open(key, source, access=access, read_only=read_only)

    async def disconnect_volume(
        self, data: Mapping[str, Any], *, key: str, force: bool = False
    ) -> None:
        """See :meth:`worker.connectors.base.Connector.disconnect_volume`."""
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

    async def _initiator(self) -> str:
        own = self._state_dir / "initiatorname.iscsi"
        for path in (own, _SYSTEM_NAME):
            if name := _read_name(path):
                return name
        digest = hashlib.blake2b(self._host.encode(), digest_size=8).hexdigest()
        name = f"iqn.2026-11.org.volume-worker:{digest}"
        # Two processes that do this at once write the same.
        await durable.write(own, f"InitiatorName={name}\n".encode())
        return name


def _source(info: Info, initiator: str) -> bridge.Source:
    name = f"LUN {info.target_lun} of {info.target_iqn} at {info.target_portal}"
    blockdev: dict[str, Any] = {
        "driver": "iscsi",
        "transport": "tcp",
        "portal": info.target_portal,
        "target": info.target_iqn,
        "lun": info.target_lun,
        "initiator-name": initiator,
        "timeout": COMMAND_TIMEOUT,
    }
    if info.auth_method is None:
        return bridge.Source(name, blockdev)
    credentials = {"user": info.auth_username, "password-secret": bridge.SECRET}
    return bridge.Source(name, {**blockdev, **credentials}, secret=info.auth_password)


def _read_name(path: pathlib.Path) -> str | None:
    try:
        found = _NAME_LINE.search(path.read_text())
        return check_name(found[1]) if found else None
    except (OSError, ValueError):
        return None
