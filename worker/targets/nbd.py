"""Serves volumes by NBD from one qemu-storage-daemon for the backend.

Each connection has an NBD export of its own, named by the connection's id, so that it can be ended
without any other. The daemon runs while there is an export; a volume's node is open only while it
has a connection, so that drivers may resize, replace or revert what nobody uses, and the next
connection sees it as it is then.

NBD servers show the names of their exports to whoever may connect, and QEMU checks a pre-shared key
against all of the server: TLS-PSK keeps strangers out, and does not part one connected host from
the volumes of another. A key ends with its connection.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import structlog

from messages import errors
from worker import process
from worker.drivers import base as drivers
from worker.nbd import uri as uris
from worker.storage_daemon import daemon, server
from worker.targets import base, nbd_inventory, nbd_keys, nbd_options

log = structlog.get_logger(__name__)

_TLS: Final = "tls"


@dataclasses.dataclass(slots=True)
class _Served:
    """One exported volume, as it has to be served."""

    path: pathlib.Path
    connections: dict[uuid.UUID, base.Connection] = dataclasses.field(default_factory=dict)


class NbdTarget(base.Target):
    """The NBD target."""

    Options = nbd_options.Options
    storage_protocol: ClassVar[str] = "NBD"
    driver_volume_type: ClassVar[str] = "nbd"
    extends_online: ClassVar[bool] = False
    """An NBD export has the size that it had when it began, and QEMU refuses ``block_resize``."""

    def __init__(self, context: base.Context) -> None:
        options: nbd_options.Options = context.options
        self._listen = options.listen
        self._address = options.address
        self._tls = options.target_tls is not None
        self._keys = nbd_keys.Keys(context.state_dir / "nbd-tls")
        self._scheme = "nbds" if self._tls else "nbd"
        self._state_dir = context.state_dir
        self._daemon = daemon.StorageDaemon(context.execute, context.state_dir / "nbd")
        self._server = server.Server(self._daemon)
        self._served: dict[uuid.UUID, _Served] = {}
        self._mutex = asyncio.Lock()
        self._host_lock: int | None = None

    # Life cycle

    async def do_setup(self) -> None:
        """Takes this host's lock, and the daemon that an earlier worker left.

        Raises:
            TargetError: QEMU is not installed, or another worker process drives the daemon.
        """
        if process.find_program(daemon.PROGRAM) is None:
            raise errors.TargetError(f"{daemon.PROGRAM} is not on PATH: install QEMU's")
        async with self._mutex:
            if self._host_lock is None:
                self._host_lock = _lock(self._state_dir / "nbd.lock")
            if not self._daemon.connected:
                await self._daemon.adopt(configuration=self._configuration)

    async def restore(
        self, exports: Sequence[base.Export]
    ) -> Mapping[uuid.UUID, errors.VolumeWorkerError]:
        """See :meth:`worker.targets.base.Target.restore`."""
        async with self._mutex:
            self._served = {
                export.volume.id: _Served(
                    export.path, {connection.id: connection for connection in export.connections}
                )
                for export in exports
            }
            if not self._served:
                await self._daemon.stop()
                return {}
            await self._connect()
            return await self._reconcile()

    async def check_health(self) -> bool:
        """See :meth:`worker.targets.base.Target.check_health`."""
        async with self._mutex:
            if not self._served:
                return True
            if not self._daemon.connected:
                return False
            exports = await self._server.exports()
            return all(
                nbd_inventory.export_id(connection) in exports
                for served in self._served.values()
                for connection in served.connections.values()
            )

    async def compare(
        self, exports: Sequence[base.Export], volumes: Collection[uuid.UUID]
    ) -> Sequence[base.Difference]:
        """See :meth:`worker.targets.base.Target.compare`.

        The daemon and its keys are this backend's alone: all that is there was made by it.
        """
        async with self._mutex:
            found: list[base.Difference] = []
            if await self._reach():
                shown, nodes = await self._server.exports(), await self._server.nodes()
                found += nbd_inventory.compare(exports, shown, nodes)
            elif exports:
                found += nbd_inventory.all_missing(exports)
            if self._tls:
                found += nbd_inventory.compare_keys(exports, self._keys.usernames())
            return found

    async def remove_unowned(
        self,
        exports: Sequence[base.Export],
        volumes: Collection[uuid.UUID],
        names: Collection[str],
    ) -> Mapping[str, errors.VolumeWorkerError]:
        """See :meth:`worker.targets.base.Target.remove_unowned`.

        All that the daemon serves beside ``exports`` is unowned: it goes, and the keys with it.
        """
        failures = await self.restore(exports)
        for volume_id, error in failures.items():
            log.warning("nbd.not_served", volume_id=str(volume_id), error=error.message)
        return {}

    async def close(self) -> None:
        """See :meth:`worker.targets.base.Target.close`."""
        async with self._mutex:
            await self._daemon.release()
            if self._host_lock is not None:
                os.close(self._host_lock)
                self._host_lock = None

    # Exports

    async def create_export(self, volume: drivers.Volume, path: pathlib.Path) -> str | None:
        """See :meth:`worker.targets.base.Target.create_export`."""
        async with self._mutex:
            await self._ensure()
            self._served.setdefault(volume.id, _Served(path)).path = path
        return f"{self._scheme}://{self._address}/"

    async def remove_export(self, volume: drivers.Volume) -> None:
        """See :meth:`worker.targets.base.Target.remove_export`."""
        async with self._mutex:
            self._served.pop(volume.id, None)
            async with self._keys_taken():
                if not self._served:
                    await self._daemon.stop()
                elif await self._reach():
                    await self._remove_node(nbd_inventory.node_name(volume.id))

    async def extend_volume(self, volume: drivers.Volume, path: pathlib.Path) -> None:
        """See :meth:`worker.targets.base.Target.extend_volume`."""
        served = self._served.get(volume.id)
        if served is not None and served.connections:
            raise errors.NotSupported("NBD cannot show a connected client a new size")

    # Connections

    def validate_connector(self, connector: Mapping[str, Any]) -> None:
        """See :meth:`worker.targets.base.Target.validate_connector`."""
        host = connector.get("host")
        if not isinstance(host, str) or not host.strip():
            raise errors.InvalidConnector("the connector needs a host: a text that is not empty")

    def new_credentials(self) -> Mapping[str, str]:
        """A pre-shared key of its own for each connection; {} without TLS."""
        return nbd_keys.new_credentials() if self._tls else {}

    async def initialize_connection(
        self, volume: drivers.Volume, path: pathlib.Path, connection: base.Connection
    ) -> base.Info:
        """See :meth:`worker.targets.base.Target.initialize_connection`."""
        if self._tls and "psk_key" not in connection.credentials:
            raise errors.TargetError("the connection was made without a key: end it, make it anew")
        async with self._mutex:
            await self._ensure()
            try:
                await self._serve(volume.id, path, connection)
            except BaseException:
                await asyncio.shield(self._withdraw(volume.id, connection.id))
                raise
        return self._info(volume, connection)

    async def terminate_connection(
        self, volume: drivers.Volume, connection: base.Connection, *, force: bool = False
    ) -> None:
        """See :meth:`worker.targets.base.Target.terminate_connection`."""
        async with self._mutex:
            await self._withdraw(volume.id, connection.id)

    async def _serve(
        self, volume_id: uuid.UUID, path: pathlib.Path, connection: base.Connection
    ) -> None:
        served = self._served.setdefault(volume_id, _Served(path))
        served.connections[connection.id] = connection
        await self._write_keys()
        exports = await self._server.exports()
        if nbd_inventory.export_id(connection) in exports:
            return
        node = nbd_inventory.node_name(volume_id)
        if node not in exports.values():
            # Nobody uses it: opened now, it has the volume's size and content of now.
            served.path = path
            await self._server.remove_node(node)
            await self._server.add_node(node, path)
        await self._server.add_export(
            nbd_inventory.export_id(connection),
            node,
            name=str(connection.id),
            writable=connection.access_mode is base.AccessMode.READ_WRITE,
        )

    async def _withdraw(self, volume_id: uuid.UUID, connection_id: uuid.UUID) -> None:
        if served := self._served.get(volume_id):
            served.connections.pop(connection_id, None)
        async with self._keys_taken():
            if not await self._reach():
                return
            # What the daemon says counts, not what is remembered: an earlier try may have failed.
            ids = (f"{mode}-{connection_id}" for mode in base.AccessMode)
            await self._server.remove_exports(*ids)
            node = nbd_inventory.node_name(volume_id)
            if node not in (await self._server.exports()).values():
                await self._server.remove_node(node)

    def _info(self, volume: drivers.Volume, connection: base.Connection) -> base.Info:
        host, port = self._address
        export = str(connection.id)
        data: dict[str, Any] = {
            "uri": uris.tcp_uri(host, port, export),
            "host": host,
            "port": port,
            "export": export,
            "access_mode": str(connection.access_mode),
            "volume_id": str(volume.id),
            "encrypted": False,
        }
        if not self._tls:
            return base.Info(self.driver_volume_type, data)
        user = connection.credentials["username"]
        data["uri"] = uris.tcp_uri(host, port, export, tls_user=user)
        data["tls"] = {"type": "psk", "username": user}
        return base.Info(
            self.driver_volume_type, data, {"tls.psk_key": connection.credentials["psk_key"]}
        )

    # The daemon

    async def _reach(self) -> bool:
        """Whether there is a daemon, which is connected then."""
        return self._daemon.connected or await self._daemon.adopt(configuration=self._configuration)

    async def _connect(self) -> None:
        if await self._reach():
            return
        await self._write_keys()
        try:
            await self._daemon.start(
                *self._arguments(), outlives_worker=True, configuration=self._configuration
            )
        except errors.TargetError as error:
            raise errors.TargetError(
                f"NBD cannot be served on {self._listen}: {error.message}",
                listen=str(self._listen),
            ) from error

    async def _ensure(self) -> None:
        """Makes sure of a daemon; one that had to be started serves all that the last one did."""
        if not self._daemon.connected:
            await self._connect()
            for volume_id, error in (await self._reconcile()).items():
                log.warning("nbd.not_served", volume_id=str(volume_id), error=error.message)

    async def _reconcile(self) -> dict[uuid.UUID, errors.VolumeWorkerError]:
        """Makes the daemon serve what has to be served, and nothing else."""
        async with self._keys_taken():
            await self._remove_unwanted()
        failures: dict[uuid.UUID, errors.VolumeWorkerError] = {}
        for volume_id, served in self._served.items():
            try:
                for connection in list(served.connections.values()):
                    await self._serve(volume_id, served.path, connection)
            except errors.VolumeWorkerError as error:
                failures[volume_id] = error
        return failures

    async def _remove_unwanted(self) -> None:
        wanted = {
            nbd_inventory.export_id(connection)
            for served in self._served.values()
            for connection in served.connections.values()
        }
        await self._server.remove_exports(*(set(await self._server.exports()) - wanted))
        paths = {
            nbd_inventory.node_name(volume_id): str(s.path) for volume_id, s in self._served.items()
        }
        used = set((await self._server.exports()).values())
        for node, path in (await self._server.nodes()).items():
            if node not in used or paths.get(node) != path:
                await self._remove_node(node)

    async def _remove_node(self, node: str) -> None:
        exports = await self._server.exports()
        await self._server.remove_exports(*(id_ for id_, used in exports.items() if used == node))
        await self._server.remove_node(node)

    @property
    def _configuration(self) -> str:
        return json.dumps([str(self._listen), self._scheme])

    def _arguments(self) -> Sequence[str]:
        host, port = self._listen
        # QEMU would let in no more than 100 clients; which ones may come is not its to say.
        listen = f"addr.type=inet,addr.host={host},addr.port={port},max-connections=0"
        if not self._tls:
            return "--nbd-server", listen
        credentials = daemon.json_argument(self._keys.server_object(_TLS))
        return "--object", credentials, "--nbd-server", f"{listen},tls-creds={_TLS}"

    @contextlib.asynccontextmanager
    async def _keys_taken(self) -> AsyncIterator[None]:
        """Takes back the keys of who is served no more, and then lets their exports be removed.

        The keys go first, so that who is put out cannot come back in. Where that fails, as on a
        full disk, the exports are removed all the same, and the failure is raised afterwards.
        """
        try:
            await self._write_keys()
        except errors.TargetError:
            yield
            raise
        yield

    async def _write_keys(self) -> None:
        if self._tls:
            await self._keys.write(
                connection.credentials
                for served in self._served.values()
                for connection in served.connections.values()
                if "psk_key" in connection.credentials
            )


def _lock(path: pathlib.Path) -> int:
    """Takes this host's lock on the daemon, which is held until the handle is closed."""
    handle: int | None = None
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, BlockingIOError):
            raise base.ServedElsewhere(
                f"another worker process of this host drives the NBD server; {path} is locked"
            ) from None
        raise errors.TargetError(f"{path} cannot be locked: {error.strerror}") from error
    return handle
