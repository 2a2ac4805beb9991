"""What tests do with volumes over and over, by AMQP alone; all that is made is removed again."""

import contextlib
import hashlib
import os
import pathlib
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

from tests.services import amqp

MIB: Final = 1024 * 1024
INITIATOR: Final = "iqn.2004-10.org.example:host"


class Volume(NamedTuple):
    """A volume that a test made."""

    id: str
    address: str
    size_bytes: int

    @property
    def at(self) -> dict[str, str]:
        """The argument that most methods take."""
        return {"volume_id": self.id}


class Volumes:
    """Makes volumes, and removes them at the end."""

    def __init__(self, caller: amqp.Caller) -> None:
        self._caller = caller
        self._made: list[Volume] = []

    async def create(
        self,
        address: str,
        size_bytes: int = MIB,
        *,
        name: str = "v",
        metadata: Mapping[str, str] | None = None,
    ) -> Volume:
        """Creates a volume."""
        new: dict[str, Any] = {"name": name, "size_bytes": size_bytes}
        if metadata is not None:
            new["metadata"] = metadata
        record = await self._caller.call("create_volume", address, {"volume": new})
        return self.adopt(record)

    def adopt(self, record: Mapping[str, Any]) -> Volume:
        """Takes a volume that was created otherwise, so that it is removed at the end."""
        volume = Volume(record["id"], record["address"], record["size_bytes"])
        self._made.append(volume)
        return volume

    async def record(self, volume: Volume) -> dict[str, Any]:
        """The volume as get_volume gives it."""
        return await self._caller.call("get_volume", volume.address, volume.at)

    async def status(self, volume: Volume, *, at: str | None = None) -> str:
        """The volume's status, as another address tells it where ``at`` is given."""
        record = await self._caller.call("get_volume", at or volume.address, volume.at)
        return str(record["status"])

    async def connect(self, volume: Volume, **connector: Any) -> dict[str, Any]:
        """Initializes a connection from another host, ``client`` unless named otherwise."""
        whole = {"host": "client", "initiator": INITIATOR, **connector}
        return await self._caller.call(
            "initialize_connection", volume.address, {**volume.at, "connector": whole}
        )

    async def disconnect(self, volume: Volume, connection_id: str) -> None:
        """Terminates a connection."""
        await self._caller.call(
            "terminate_connection", volume.address, {**volume.at, "connection_id": connection_id}
        )

    async def disconnect_all(self, volume: Volume) -> None:
        """Terminates all connections of a volume."""
        await self._caller.call(
            "terminate_connection",
            volume.address,
            {**volume.at, "connector": None, "force": True},
        )

    async def attach(self, volume: Volume, **args: Any) -> dict[str, Any]:
        """Attaches a volume to an instance."""
        whole = {**volume.at, "instance_uuid": str(uuid.UUID(int=7)), "mountpoint": "/dev/vdb"}
        return await self._caller.call("attach_volume", volume.address, {**whole, **args})

    async def detach(self, volume: Volume) -> None:
        """Ends the volume's attachment."""
        await self._caller.call("detach_volume", volume.address, volume.at)

    @contextlib.asynccontextmanager
    async def local(self, volume: Volume) -> AsyncIterator[pathlib.Path]:
        """The volume as a path of its own host, by a local connection."""
        info = await self.connect(
            volume,
            host=volume.address.partition("@")[0],
            connection_key=str(uuid.uuid4()),
            do_local_attach=True,
        )
        assert info["driver_volume_type"] == "local"
        path = pathlib.Path(info["data"]["device_path"])
        assert path.is_absolute()
        try:
            yield path
        finally:
            await self.disconnect(volume, info["connection_id"])

    async def write(self, volume: Volume, extents: Mapping[int, bytes]) -> None:
        """Writes bytes at offsets."""
        async with self.local(volume) as path:
            handle = os.open(path, os.O_WRONLY)
            for offset, data in extents.items():
                assert os.pwrite(handle, data, offset) == len(data)
            os.fsync(handle)
            os.close(handle)

    async def fill(self, volume: Volume, seed: int, *, islands: int = 4) -> None:
        """Writes random bytes here and there, at odd places too, with holes between them."""
        dice = random.Random(seed)
        step = volume.size_bytes // islands
        await self.write(
            volume,
            {
                index * step + dice.randrange(step // 4): dice.randbytes(step // 4)
                for index in range(islands)
            },
        )

    async def content(self, volume: Volume) -> bytes:
        """All bytes of the volume."""
        async with self.local(volume) as path:
            return path.read_bytes()

    async def allocated(self, volume: Volume) -> int:
        """Bytes that the volume takes on its file system."""
        async with self.local(volume) as path:
            return path.stat().st_blocks * 512

    async def copy(
        self, source: Volume, destination: Volume, at: str, **args: Any
    ) -> dict[str, Any]:
        """Copies a volume by the worker at an address."""
        return await self._caller.call(
            "copy_volume_data", at, {**self.pair(source, destination), "remote": None, **args}
        )

    @staticmethod
    def pair(source: Volume, destination: Volume) -> dict[str, str]:
        """The arguments that name the two volumes of a copy."""
        return {"source_volume_id": source.id, "destination_volume_id": destination.id}

    async def delete(self, volume: Volume) -> None:
        """Deletes a volume."""
        await self._caller.call("delete_volume", volume.address, volume.at)

    async def clean(self) -> None:
        """Removes all volumes that are left, with all that hangs on them."""
        failures = []
        while self._made:
            try:
                await self._remove(self._made.pop())
            except (AssertionError, amqp.Failed) as error:
                failures.append(error)
        assert not failures, failures

    async def _remove(self, volume: Volume) -> None:
        try:
            record = await self.record(volume)
        except amqp.Failed as error:
            if error.code == "VolumeNotFound":
                return
            raise
        if record["connections"]:
            await self.disconnect_all(volume)
        if record["attachments"]:
            await self.detach(volume)
        if record["exported"]:
            await self._caller.call("remove_export", volume.address, volume.at)
        await self.delete(volume)


def blake2b_4m(data: bytes) -> str:
    """The contract's digest over pieces of 4 MiB, by its definition."""
    outer = hashlib.blake2b(digest_size=32)
    for start in range(0, len(data), 4 * MIB):
        piece = data[start : start + 4 * MIB]
        outer.update(hashlib.blake2b(piece, digest_size=32).digest())
    return f"blake2b-4m:{outer.hexdigest()}"


def matches(digest: str, data: bytes) -> bool:
    """Whether a digest of the contract is that of ``data``."""
    algorithm, _, value = digest.partition(":")
    match algorithm:
        case "blake2b-4m":
            return digest == blake2b_4m(data)
        case "sha256":
            return hashlib.sha256(data).hexdigest() == value
        case "blake2b":
            return value in (
                hashlib.blake2b(data).hexdigest(),
                hashlib.blake2b(data, digest_size=32).hexdigest(),
            )
        case _:
            raise AssertionError(f"unknown algorithm {algorithm}")
