"""A bridge: a volume that is reached through a protocol of QEMU's, as a file path or an NBD server.

One qemu-storage-daemon for each attached volume, known by the attachment's key. It dies with the
worker; what it leaves then, a folder and perhaps a dead FUSE mount, goes when the key is detached.
"""

import dataclasses
import hashlib
import os
import pathlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from messages import errors
from worker import durable, process
from worker.connectors import base, devices
from worker.nbd import uri as uris
from worker.storage_daemon import daemon

NODE: Final = "volume"
CONNECT_TIMEOUT: Final = 30.0
"""Seconds for QEMU to reach the volume: libiscsi itself would try for ever."""
SECRET: Final = "secret"  # noqa: S105 - the object's name
TLS: Final = "tls"

_FUSE_DEVICE: Final = pathlib.Path("/dev/fuse")
_MOUNTS: Final = pathlib.Path("/proc/self/mountinfo")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What the bridge leads to.

    Attributes:
        name: for people.
        blockdev: arguments of QMP's ``blockdev-add``, without the node's name.
        secret: becomes the object :data:`SECRET`, to which ``blockdev`` may refer.
        psk: identity and key in hexadecimal; become the TLS credentials :data:`TLS`.
    """

    name: str
    blockdev: Mapping[str, Any]
    secret: str | None = dataclasses.field(default=None, repr=False)
    psk: tuple[str, str] | None = dataclasses.field(default=None, repr=False)


class Bridges:
    """The bridges of one connector.

    Args:
        folder: where each has a folder of its own; made when needed.
    """

    def __init__(self, execute: process.Executor, folder: pathlib.Path) -> None:
        self._execute = execute
        self._folder = folder
        self._devices: dict[str, base.Device] = {}
        self._daemons: dict[str, daemon.StorageDaemon] = {}

    async def open(
        self, key: str, source: Source, *, access: base.Access, read_only: bool
    ) -> base.Device:
        """Builds the bridge; one that the key has already is replaced.

        Raises:
            DeviceUnavailable: with the reason in QEMU's words, and nothing left.
        """
        if access is base.Access.PATH:
            check_fuse()
        await self.close(key, force=True)
        folder = self._folder_of(key)
        built = self._daemons[key] = daemon.StorageDaemon(self._execute, folder)
        try:
            await built.start()
            await _add_node(built, folder, source, read_only=read_only)
            device = await _add_export(built, folder, access=access, read_only=read_only)
        except BaseException as error:
            # At once: one that cannot connect does not hear that it should end.
            await built.stop(at_once=True)
            await self.close(key, force=True)
            if isinstance(error, errors.TargetError):
                raise errors.DeviceUnavailable(
                    f"{source.name} cannot be attached: {error.message}"
                ) from None
            raise
        self._devices[key] = device
        return device

    async def close(self, key: str, *, force: bool = False) -> None:
        """Takes the bridge down, also one of an earlier worker; none is no error.

        Raises:
            DeviceUnavailable: what was written could not be made durable; the bridge stays.
        """
        folder = self._folder_of(key)
        built = self._daemons.get(key) or daemon.StorageDaemon(self._execute, folder)
        device = self._devices.get(key)
        if device is not None and built.alive:
            await devices.flush(self._execute, device, force=force)
        await self._take_down(built, folder)
        self._devices.pop(key, None)
        self._daemons.pop(key, None)

    async def _take_down(self, built: daemon.StorageDaemon, folder: pathlib.Path) -> None:
        await built.stop()
        await self._unmount(folder / NODE)
        shutil.rmtree(folder, ignore_errors=True)

    def unowned(self, keys: Collection[str]) -> Sequence[str]:
        """The folders of bridges that have none of these keys, by name."""
        owned = {self._folder_of(key).name for key in keys}
        try:
            return sorted(path.name for path in self._folder.iterdir() if path.name not in owned)
        except FileNotFoundError:
            return ()

    async def discard(self, name: str) -> None:
        """Takes the bridge in a folder down, whatever its key was."""
        folder = self._folder / name
        known = next((key for key in self._daemons if self._folder_of(key) == folder), None)
        if known is not None:
            await self.close(known, force=True)
        else:
            await self._take_down(daemon.StorageDaemon(self._execute, folder), folder)

    def _folder_of(self, key: str) -> pathlib.Path:
        # A short name, whatever the key is: sockets will lie below.
        return self._folder / hashlib.blake2b(key.encode(), digest_size=10).hexdigest()

    async def _unmount(self, mountpoint: pathlib.Path) -> None:
        # A daemon that ends by itself unmounts; one that was killed leaves a dead mount.
        if not _is_mounted(mountpoint):
            return
        command = ("umount", "-l") if os.geteuid() == 0 else ("fusermount3", "-uz")
        await self._execute.run(*command, mountpoint, timeout=30)


def check_fuse() -> None:
    """Looks whether this host can show a volume as a file.

    Raises:
        DeviceUnavailable: it cannot, and why.
    """
    if not _FUSE_DEVICE.exists():
        reason = "there is no /dev/fuse: load the module fuse, or give the container that device"
    elif os.access(_FUSE_DEVICE, os.R_OK | os.W_OK) and (
        os.geteuid() == 0 or process.find_program("fusermount3")
    ):
        return
    else:
        reason = "/dev/fuse cannot be used: run as root, or make it accessible and install fuse3"
    raise errors.DeviceUnavailable(f"the volume cannot be shown as a file: {reason}")


async def _add_node(
    built: daemon.StorageDaemon, folder: pathlib.Path, source: Source, *, read_only: bool
) -> None:
    if source.secret is not None:
        await built.add_secret(SECRET, source.secret)
    if source.psk is not None:
        await _add_psk(built, folder, source.psk)
    # discard: without it a hole that is punched keeps the old data, and success is reported.
    node = {"node-name": NODE, "read-only": read_only, "discard": "unmap", **source.blockdev}
    await built.execute("blockdev-add", node, timeout=CONNECT_TIMEOUT)


async def _add_psk(built: daemon.StorageDaemon, folder: pathlib.Path, psk: tuple[str, str]) -> None:
    identity, key = psk
    keys = folder / "keys.psk"
    try:
        await durable.write(keys, f"{identity}:{key}\n".encode())
        credentials = {"qom-type": "tls-creds-psk", "id": TLS, "endpoint": "client"}
        await built.execute("object-add", {**credentials, "dir": str(folder), "username": identity})
    finally:
        keys.unlink(missing_ok=True)


async def _add_export(
    built: daemon.StorageDaemon, folder: pathlib.Path, *, access: base.Access, read_only: bool
) -> base.Device:
    export = {"id": NODE, "node-name": NODE, "writable": not read_only}
    if access is base.Access.PATH:
        mountpoint = folder / NODE
        mountpoint.touch(mode=0o600)
        fuse = {"type": "fuse", "mountpoint": str(mountpoint), "allow-other": "off"}
        await built.execute("block-export-add", {**export, **fuse})
        return base.Device(path=mountpoint)
    address = {"type": "unix", "data": {"path": str(built.data_socket)}}
    await built.execute("nbd-server-start", {"addr": address})
    await built.execute("block-export-add", {**export, "type": "nbd", "name": NODE})
    return base.Device(nbd_uri=uris.unix_uri(str(built.data_socket), NODE))


def _is_mounted(mountpoint: pathlib.Path) -> bool:
    # Not os.path.ismount: stat of a mount whose server is dead fails or hangs.
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in str(mountpoint))
    return any(line.split(" ")[4] == escaped for line in _MOUNTS.read_text().splitlines())
