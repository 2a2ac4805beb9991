"""The soak's load: owners of volumes, each with its own, and meddlers who know no bounds."""

import asyncio
import dataclasses
import os
import pathlib
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from tests.faults import soak_calls
from tests.faults.soak_calls import Call, Ledger, Line, PlainLine, Via
from tests.services import volumes
from tests.services.volumes import MIB

MOST: Final = 6 * MIB
PACE: Final = MIB
"""Bytes a second of a copy that is to be met by trouble."""
USUAL: Final = frozenset(
    {
        soak_calls.OK,
        soak_calls.AWAY,
        "VolumeIsBusy",
        "InvalidVolumeStatus",
        "InvalidConnector",
        "VolumeNotFound",
        "ConnectionNotFound",
        "AttachmentNotFound",
        "JobNotFound",
        "NotSupported",
        "Cancelled",
        "DeadlineExceeded",
        "DeviceUnavailable",
        "TargetError",
        "CommandFailed",
        "CommandTimeout",
        "DriverNotInitialized",
        "WorkerLost",
    }
)
"""What may come of a right request while others meddle and things break."""
_OVERTAKES: Final = (soak_calls.AWAY, "Cancelled", "VolumeIsBusy")
"""What may be found sooner than that a request is wrong."""


@dataclasses.dataclass(eq=False)
class Owned:
    """A volume that one owner has for itself, as far as content goes."""

    volume: volumes.Volume
    content: bytes | None = None
    """Its beginning, where that is known."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A volume that nobody writes to any more."""

    volume: volumes.Volume
    content: bytes


class Load:
    """What all who ask share."""

    def __init__(
        self,
        ledger: Ledger,
        sources: Sequence[Source],
        *,
        copiers: Sequence[str],
        addresses: Sequence[str],
    ) -> None:
        self.ledger = ledger
        self.sources = sources
        self.copiers = copiers
        """Addresses of the backends that store something."""
        self.addresses = addresses
        self.owned: list[Owned] = []
        self.is_over = asyncio.Event()

    async def ask(
        self, line: Line, method: str, address: str, args: Mapping[str, Any], **more: Any
    ) -> Call:
        """Asks, and waits until the outcome is known."""
        call = self.ledger.note(Call(method, address, args, line.via, **more))
        await line.carry_out(call)
        return call


class Owner:
    """Makes a volume, does this and that with it, deletes it, and begins anew."""

    def __init__(self, load: Load, line: Line, address: str, seed: str) -> None:
        self._load = load
        self._line = line
        self._address = address
        self._dice = random.Random(seed)
        self._stores = address in load.copiers

    async def run(self) -> None:
        """Goes on until the load is over."""
        while not self._load.is_over.is_set():
            owned = await self._create()
            if owned is None:
                continue
            for _ in range(self._dice.randrange(4, 10)):
                if self._load.is_over.is_set():
                    break
                await self._dice.choice(self._deeds())(owned)
            if not self._load.is_over.is_set():
                await self._delete(owned)

    def _deeds(self) -> list[Callable[[Owned], Awaitable[None]]]:
        both: list[Callable[[Owned], Awaitable[None]]]
        both = [self._extend, self._export, self._connect, self._connect, self._attach, self._look]
        if not self._stores:
            return both
        return [*both, self._copy, self._copy, self._copy, self._write]

    async def _ask(self, method: str, owned: Owned, **args: Any) -> Call:
        whole = {**owned.volume.at, **args}
        timeout = self._dice.choice((0.01, 1.0)) if self._dice.random() < 0.05 else None
        return await self._load.ask(
            self._line, method, owned.volume.address, whole, timeout=timeout
        )

    async def _create(self) -> Owned | None:
        new: dict[str, Any] = {"name": "soak", "size_bytes": self._dice.randint(2, 4) * MIB}
        if self._dice.random() < 0.5:
            new["id"] = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
        made = await self._load.ask(self._line, "create_volume", self._address, {"volume": new})
        if not made.is_ok:
            return None
        result = made.result
        owned = Owned(volumes.Volume(result["id"], result["address"], result["size_bytes"]))
        self._load.owned.append(owned)
        return owned

    async def _delete(self, owned: Owned) -> None:
        await self._ask("terminate_connection", owned, connector=None, force=True)
        await self._ask("detach_volume", owned)
        await self._ask("remove_export", owned)
        if (await self._ask("delete_volume", owned)).is_ok:
            self._load.owned.remove(owned)

    async def _extend(self, owned: Owned) -> None:
        size = min(owned.volume.size_bytes + MIB, MOST)
        if (await self._ask("extend_volume", owned, new_size_bytes=size)).is_ok:
            owned.volume = owned.volume._replace(size_bytes=size)

    async def _export(self, owned: Owned) -> None:
        await self._ask(self._dice.choice(("create_export", "ensure_export")), owned)
        if self._dice.random() < 0.7:
            await self._ask("remove_export", owned)

    async def _connect(self, owned: Owned) -> None:
        connector = {
            "host": f"client-{self._dice.randrange(2)}",
            "initiator": volumes.INITIATOR,
            "connection_key": str(self._dice.randrange(2)),
        }
        made = await self._ask("initialize_connection", owned, connector=connector)
        match self._dice.randrange(4):
            case 0:
                await self._ask("terminate_connection", owned, connector=connector)
            case 1 if made.is_ok:
                await self._ask(
                    "terminate_connection", owned, connection_id=made.result["connection_id"]
                )
            case 2:
                await self._ask("terminate_connection", owned, connector=None, force=True)

    async def _attach(self, owned: Owned) -> None:
        instance = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
        args = {"instance_uuid": instance, "mountpoint": "/dev/vdb"}
        await self._ask("attach_volume", owned, **args)
        if self._dice.random() < 0.8:
            await self._ask("detach_volume", owned)

    async def _look(self, owned: Owned) -> None:
        await self._ask("get_volume", owned)
        address = self._dice.choice(self._load.addresses)
        args = {"limit": self._dice.randint(1, 20), "all": True}
        await self._load.ask(
            self._line, self._dice.choice(("list_volumes", "list_jobs")), address, args
        )

    async def _write(self, owned: Owned) -> None:
        """Writes through a local connection, as a program of the host would."""
        host = owned.volume.address.partition("@")[0]
        connector = {"host": host, "do_local_attach": True, "connection_key": "write"}
        made = await self._ask("initialize_connection", owned, connector=connector)
        if made.is_ok:
            data = self._dice.randbytes(self._dice.randrange(1, 65536))
            path = pathlib.Path(made.result["data"]["device_path"])
            await asyncio.to_thread(_write, path, data)
            if owned.content is not None:
                owned.content = data + owned.content[len(data) :]
        await self._ask("terminate_connection", owned, connector=connector)

    async def _copy(self, owned: Owned) -> None:
        await self._ask("terminate_connection", owned, connector=None, force=True)
        await self._ask("detach_volume", owned)
        source = self._dice.choice(self._load.sources)
        args: dict[str, Any] = volumes.Volumes.pair(source.volume, owned.volume)
        if self._dice.random() < 0.5:
            args["bytes_per_second"] = PACE
        owned.content = None
        done = await self._load.ask(
            self._line, "copy_volume_data", self._dice.choice(self._load.copiers), args
        )
        if done.is_ok:
            owned.content = source.content


def _may_be_read(call: Call) -> bool:
    """Whether it may have left no job."""
    return call.method == "get_volume_stats"


def _write(path: pathlib.Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(handle, data, 0) == len(data)
        os.fsync(handle)
    finally:
        os.close(handle)


class Meddler:
    """Cancels what others asked, asks twice, asks nonsense, and waits for nobody's turn."""

    def __init__(self, load: Load, line: PlainLine, seed: str) -> None:
        self._load = load
        self._line = line
        self._dice = random.Random(seed)

    async def run(self) -> None:
        """Goes on until the load is over."""
        deeds = (
            self._cancel,
            self._repeat,
            self._reuse,
            self._cast,
            self._cast,
            self._disturb,
            self._stats,
            self._nonsense,
            self._nonsense,
        )
        while not self._load.is_over.is_set():
            await self._dice.choice(deeds)()
            await asyncio.sleep(self._dice.uniform(0, 0.3))

    def _address(self) -> str:
        return self._dice.choice(self._load.addresses)

    def _stranger(self) -> str:
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    async def _cancel(self) -> None:
        jobs = [one for one in self._load.ledger.pending() if one.has_job]
        if jobs:
            which = self._dice.choice(jobs)
            expects = (soak_calls.OK, "JobNotFound", "Cancelled")
            args = {"job_id": which.id}
            await self._load.ask(self._line, "cancel_job", self._address(), args, expects=expects)

    async def _repeat(self) -> None:
        mine = [one for one in self._load.ledger.calls if one.via is Via.PLAIN and one.has_job]
        if mine:
            await self._line.repeat(self._dice.choice(mine[-50:]))

    async def _reuse(self) -> None:
        calls = self._load.ledger.calls
        done = [one for one in calls if one.is_ok and one.has_job and not _may_be_read(one)]
        if done:
            args = {"volume": {"name": "another", "size_bytes": MIB}}
            which = self._dice.choice(done)
            await self._wrong(
                "create_volume", args, "InvalidRequest", at=which.address, id=which.id
            )

    async def _cast(self) -> None:
        owned = self._someones()
        if owned is None:
            return
        choices: list[tuple[str, Mapping[str, Any]]] = [
            ("ensure_export", owned.volume.at),
            ("get_volume_stats", {"refresh": True}),
            ("extend_volume", {**owned.volume.at, "new_size_bytes": MIB}),
            ("delete_volume", {"volume_id": self._stranger()}),
            ("detach_volume", owned.volume.at),
        ]
        method, args = self._dice.choice(choices)
        call = self._load.ledger.note(Call(method, owned.volume.address, args, Via.CAST))
        await self._line.cast(call)

    async def _disturb(self) -> None:
        """Connects a volume of somebody else's, and ends that again."""
        owned = self._someones()
        if owned is not None:
            args = {**owned.volume.at, "connector": {"host": "meddler", "mode": "ro"}}
            for method in ("initialize_connection", "terminate_connection"):
                await self._load.ask(self._line, method, owned.volume.address, args)

    def _someones(self) -> Owned | None:
        return self._dice.choice(self._load.owned) if self._load.owned else None

    async def _stats(self) -> None:
        args = {"refresh": self._dice.random() < 0.5}
        await self._load.ask(self._line, "get_volume_stats", self._address(), args)

    async def _nonsense(self) -> None:
        volume = self._load.sources[0].volume
        itself = {"source_volume_id": volume.id, "destination_volume_id": volume.id}
        elsewhere = next(one for one in self._load.copiers if one != volume.address)
        nobody = {"volume_id": self._stranger()}
        wrong: list[tuple[str, Mapping[str, Any], str]] = [
            ("make_coffee", {}, "UnknownMethod"),
            ("create_volume", {"volume": {"name": "a/b", "size_bytes": MIB}}, "InvalidRequest"),
            (
                "create_volume",
                {"volume": {"name": "big", "size_bytes": 2**60}},
                "InsufficientSpace",
            ),
            ("delete_volume", volume.at, "WrongAddress"),
            ("delete_volume", nobody, "VolumeNotFound"),
            ("get_volume", nobody, "VolumeNotFound"),
            ("cancel_job", {"job_id": self._stranger()}, "JobNotFound"),
            ("create_snapshot", {}, "NotSupported"),
            ("copy_volume_data", itself, "InvalidRequest"),
        ]
        method, args, code = self._dice.choice(wrong)
        at = elsewhere if code in ("WrongAddress", "InsufficientSpace") else self._address()
        if self._dice.random() < 0.1:
            await self._wrong(method, args, "InvalidRequest", at=at, body=b'{"method": "get_')
        else:
            await self._wrong(method, args, code, at=at)

    async def _wrong(
        self, method: str, args: Mapping[str, Any], code: str, *, at: str, **more: Any
    ) -> None:
        has_job = "id" not in more
        call = self._load.ledger.note(
            Call(method, at, args, self._line.via, expects=(code, *_OVERTAKES), **more)
        )
        call.has_job = call.has_job and has_job
        await self._line.carry_out(call)
