"""The block nodes and NBD exports of one daemon: what is there, what is added, what is removed.

Removing what is not there is no error. The commands are those of QEMU's ``qapi/block-core.json``
and ``qapi/block-export.json``.
"""

import asyncio
import pathlib
import stat
from collections.abc import Mapping
from typing import Final

from messages import errors
from worker.storage_daemon import daemon

REMOVAL_TIMEOUT: Final = 20.0
"""Seconds for an export's requests in flight to end."""


class Server:
    """What a connected :class:`~worker.storage_daemon.daemon.StorageDaemon` serves."""

    def __init__(self, storage_daemon: daemon.StorageDaemon) -> None:
        self._daemon = storage_daemon

    async def nodes(self) -> Mapping[str, str]:
        """The file or device of each named node."""
        found = await self._daemon.execute("query-named-block-nodes", {"flat": True})
        # QEMU names the nodes below ours itself, with a # in front.
        return {node["node-name"]: node["file"] for node in found if node["node-name"][0] != "#"}

    async def exports(self) -> Mapping[str, str]:
        """The node of each export, by the export's id."""
        found = await self._daemon.execute("query-block-exports")
        return {export["id"]: export["node-name"] for export in found}

    async def add_node(self, name: str, path: pathlib.Path) -> None:
        """Opens a file or block device.

        Raises:
            TargetError: it cannot be opened.
        """
        driver = await asyncio.to_thread(_driver_for, path)
        # The worker's records say who may use a volume; QEMU's locks would keep drivers and
        # several readers out. Without discard a hole that is punched would keep the old data.
        common = {"discard": "unmap", "auto-read-only": True}
        file = {
            "driver": driver,
            "filename": str(path),
            "locking": "off",
            **common,
        }
        await self._daemon.execute(
            "blockdev-add", {"driver": "raw", "node-name": name, "file": file, **common}
        )

    async def remove_node(self, name: str) -> None:
        """Closes a node that has no export."""
        # Asked for directly: with many nodes, QEMU takes long to list them.
        try:
            await self._daemon.execute("blockdev-del", {"node-name": name})
        except errors.TargetError as error:
            if not str(error.details.get("refusal", "")).startswith("Failed to find node"):
                raise

    async def add_export(self, export_id: str, node: str, *, name: str, writable: bool) -> None:
        """Serves a node under ``name``."""
        await self._daemon.execute(
            "block-export-add",
            {"type": "nbd", "id": export_id, "node-name": node, "name": name, "writable": writable},
        )

    async def remove_exports(self, *export_ids: str) -> None:
        """Ends exports and cuts their clients; waits until they are gone.

        Raises:
            TargetError: the requests in flight of one do not end.
        """
        for export_id in set(await self.exports()).intersection(export_ids):
            await self._daemon.execute("block-export-del", {"id": export_id, "mode": "hard"})
        for _ in range(int(REMOVAL_TIMEOUT / daemon.POLL_INTERVAL)):
            left = set(await self.exports()).intersection(export_ids)
            if not left:
                return
            await asyncio.sleep(daemon.POLL_INTERVAL)
        raise errors.TargetError(f"exports {left} do not end: their storage does not answer")


def _driver_for(path: pathlib.Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise errors.TargetError(f"{path} cannot be served: {error.strerror}") from error
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISBLK(mode):
        return "host_device"
    raise errors.TargetError(f"{path} is neither a file nor a block device")
