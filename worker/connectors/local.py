"""Volumes of this host itself: the connection info names the path, and nothing is attached."""

import asyncio
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any, ClassVar

from messages import errors
from worker.connectors import base, devices


class LocalConnector(base.Connector):
    """Gives the path in ``data["device_path"]``."""

    driver_volume_type: ClassVar[str] = "local"

    def __init__(self, context: base.Context) -> None:
        self._execute = context.execute
        self._attached: dict[str, base.Device] = {}

    async def connect_volume(
        self, data: Mapping[str, Any], *, key: str, access: base.Access, read_only: bool
    ) -> base.Device:
        """See :meth:`worker.connectors.base.Connector.connect_volume`."""
        path = await asyncio.to_thread(_usable_path, data, read_only=read_only)
        device = base.Device(path=path)
        if not read_only:
            self._attached[key] = device
        return device

    async def disconnect_volume(
        self, data: Mapping[str, Any], *, key: str, force: bool = False
    ) -> None:
        """See :meth:`worker.connectors.base.Connector.disconnect_volume`."""
        device = self._attached.get(key)
        if device is not None:
            await devices.flush(self._execute, device, force=force)
            del self._attached[key]

    async def check_valid_device(self, device: base.Device) -> bool:
        """See :meth:`worker.connectors.base.Connector.check_valid_device`."""
        return await devices.is_valid(self._execute, device)


def _usable_path(data: Mapping[str, Any], *, read_only: bool) -> pathlib.Path:
    given = data.get("device_path")
    if not isinstance(given, str) or not given.startswith("/") or "\0" in given:
        raise errors.InvalidConnector("the connection info needs an absolute device_path")
    path = pathlib.Path(given)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise errors.DeviceUnavailable(f"{path} cannot be found: {error.strerror}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise errors.DeviceUnavailable(f"{path} is neither a file nor a block device")
    wanted = os.R_OK if read_only else os.R_OK | os.W_OK
    if not os.access(path, wanted):
        right = "read" if read_only else "read and written"
        raise errors.DeviceUnavailable(f"{path} cannot be {right} by this worker's user")
    return path
