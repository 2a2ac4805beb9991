"""The story: a volume with a file system goes from host to host and back, and nothing stays."""

import asyncio
import pathlib
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from messages import client
from worker.cli import output
from worker.cli.demo import content, narrator, programs, stage, traces
from worker.cli.demo.failure import ensure
from worker.drivers import directory
from worker.transfer import digest

VOLUME_SIZE: Final = 512 * 1024**2
COPY_TIMEOUT: Final = 120.0
"""Seconds."""
_COMPUTE: Final = {"host": "compute-1", "initiator": "iqn.2026-01.example:compute-1"}


class Story:
    """What is done, step by step."""

    def __init__(
        self, set_up: stage.Stage, told: narrator.Narrator, volumes: client.Client
    ) -> None:
        self._stage = set_up
        self._told = told
        self._client = volumes
        self._a = set_up.a.address
        self._b = set_up.b.address
        self._processes = traces.Processes(
            [set_up.a.worker.pid, set_up.b.worker.pid], [set_up.a.state_dir, set_up.b.state_dir]
        )

    async def tell(self) -> None:
        """All of it.

        Raises:
            DemoFailed, VolumeWorkerError: where it did not come out as it must.
        """
        workers = (self._stage.a.worker, self._stage.b.worker)
        beside = [asyncio.create_task(worker.death()) for worker in workers]
        beside.append(asyncio.create_task(self._processes.run()))
        told = asyncio.create_task(self._steps())
        try:
            # Nobody would answer any more: the end of one is the end of the story.
            ended, _ = await asyncio.wait([told, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in (told, *beside):
                task.cancel()
            await asyncio.gather(told, *beside, return_exceptions=True)
        await self._end_workers()

    async def _steps(self) -> None:
        origin, middle, final = await self._create()
        expected = await self._fill(origin)
        await self._attach(origin)
        await self._copy_there(origin, middle, expected)
        await self._copy_back(middle, final, expected)
        await self._detach(origin)
        await self._check(final, expected)
        await self._delete([(self._a, origin), (self._b, middle), (self._a, final)])
        await self._nothing_left()

    # The steps

    async def _create(self) -> tuple[str, str, str]:
        self._told.step("Three volumes: two on host-a, one on host-b")
        made = []
        for name, address in (("origin", self._a), ("middle", self._b), ("final", self._a)):
            volume = {"name": name, "size_bytes": VOLUME_SIZE}
            found = await self._call(
                "create_volume", address, {"volume": volume}, show=("id", "status")
            )
            self._told.call_it(str(found["id"]), name)
            made.append(str(found["id"]))
        return made[0], made[1], made[2]

    async def _fill(self, volume_id: str) -> str:
        self._told.step("A real file system on the first, through a connection of its own host")
        path = await self._connect_locally(volume_id)
        begin = time.monotonic()
        count, total = await content.fill(self._stage.execute, path, self._stage.folder / "staging")
        self._told.tell(
            f"mke2fs -t ext4 -d: {count} files of this machine, {output.size(total)}  "
            f"({time.monotonic() - begin:.2f} s)"
        )
        expected = await asyncio.to_thread(digest.digest_path, path)
        self._told.tell(f"volume-worker digest: {expected}")
        await self._disconnect_locally(volume_id)
        return expected

    async def _attach(self, volume_id: str) -> None:
        self._told.step("An instance uses it: a connection for its host, and the attachment")
        connector = {"volume_id": volume_id, "connector": _COMPUTE}
        await self._call(
            "initialize_connection", self._a, connector, show=("driver_volume_type", "data")
        )
        instance = {"instance_uuid": str(uuid.uuid4()), "mountpoint": "/dev/vdb"}
        await self._call(
            "attach_volume", self._a, {"volume_id": volume_id, **instance}, show=("status", "mode")
        )
        volume = await self._get(volume_id)
        ensure(volume["status"] == "in-use", f"the volume is {volume['status']}, not in-use")
        users = len(volume["attachments"]), len(volume["connections"])
        ensure(users == (1, 1), f"there are {users} attachments and connections, not one of each")

    async def _copy_there(self, source: str, destination: str, expected: str) -> None:
        self._told.step("Its data to host-b, over NBD, while it is in use")
        self._told.tell("host-b finds out by itself that the source is remote, and attaches it")
        await self._copy(self._b, source, destination, expected)

    async def _copy_back(self, source: str, destination: str, expected: str) -> None:
        if self._stage.tgtd is None:
            self._told.step("And back to another volume on host-a, over NBD")
        else:
            self._told.step("And back to another volume on host-a, over iSCSI with CHAP")
            connector = {"volume_id": source, "connector": _COMPUTE}
            info = await self._call(
                "initialize_connection", self._b, connector, show=("driver_volume_type", "data")
            )
            ensure(info["data"]["auth_method"] == "CHAP", "the connection has no CHAP account")
            await self._call("terminate_connection", self._b, connector)
        await self._copy(self._a, source, destination, expected)

    async def _copy(self, address: str, source: str, destination: str, expected: str) -> None:
        args = {"source_volume_id": source, "destination_volume_id": destination}
        result = await self._call(
            "copy_volume_data", address, args, timeout=COPY_TIMEOUT, progress="copying"
        )
        ensure(
            result["digest"] == expected,
            f"the copy's digest is {result['digest']}, the original's {expected}",
        )
        self._told.good("read back at the destination, the digest is that of the original")
        for volume_id in (source, destination):
            volume = await self._record(volume_id)
            ensure(volume["status"] in ("available", "in-use"), f"a volume is {volume['status']}")

    async def _detach(self, volume_id: str) -> None:
        self._told.step("The instance is done")
        connector = {"volume_id": volume_id, "connector": _COMPUTE}
        await self._call("terminate_connection", self._a, connector)
        await self._call("detach_volume", self._a, {"volume_id": volume_id})
        volume = await self._get(volume_id)
        ensure(volume["status"] == "available", f"the volume is {volume['status']}")

    async def _check(self, volume_id: str, expected: str) -> None:
        self._told.step("The final copy, looked at by others")
        path = await self._connect_locally(volume_id)
        summary = await content.check_file_system(self._stage.execute, path)
        self._told.good(f"e2fsck -fn: {summary.removeprefix(str(path)).lstrip(': ')}")
        found = await asyncio.to_thread(digest.digest_path, path)
        ensure(found == expected, f"the final copy's digest is {found}, the original's {expected}")
        self._told.good(f"volume-worker digest: {found}, as the original")
        await self._disconnect_locally(volume_id)

    async def _delete(self, volumes: Sequence[tuple[str, str]]) -> None:
        self._told.step("Everything is given back")
        for _, volume_id in volumes:
            volume = await self._record(volume_id)
            left = [*volume["attachments"], *volume["connections"]]
            ensure(not left, f"volume {volume_id} still has {left}")
        self._told.good("database: no attachment and no connection is left")
        for address, volume_id in volumes:
            await self._call("delete_volume", address, {"volume_id": volume_id})

    async def _nothing_left(self) -> None:
        self._told.step("What is left")
        listed = await self._client.call("list_volumes", self._a, {"all": True})
        ensure(not listed["volumes"], f"there are still volumes: {listed['volumes']}")
        self._told.good("database: no volume")
        hosts = (self._stage.a, self._stage.b)
        for host in hosts:
            files = [path.name for path in self._files(host)]
            ensure(not files, f"{host.name} still has {files}")
        self._told.good("storage: no file of a volume")
        for host in hosts:
            if host.backend == "nbd":
                ensure(not programs.is_open(host.port), f"port {host.port} is still open")
                self._told.good(f"{host.name}: the NBD port {host.port} is closed")
        if self._stage.tgtd is not None:
            targets = await self._stage.tgtd.targets()
            ensure(not targets, f"tgtd still has {targets}")
            self._told.good("tgtadm --op show --mode target: nothing")
        children = await asyncio.to_thread(self._processes.children)
        ensure(not children, f"the workers still have children: {children}")
        alive = self._processes.alive()
        ensure(not alive, f"still running: {alive}")
        self._told.good(f"processes seen at work, all gone: {self._processes.names()}")

    async def _end_workers(self) -> None:
        self._told.step("The workers are told to end")
        for host in (self._stage.a, self._stage.b):
            code = await host.worker.drain()
            ensure(code == 0, f"the worker of {host.name} ended with exit code {code}")
            self._told.good(f"SIGTERM to the worker of {host.name}: exit code 0")

    # What they share

    async def _connect_locally(self, volume_id: str) -> pathlib.Path:
        info = await self._call(
            "initialize_connection", self._a, self._local(volume_id), show=("data",)
        )
        return pathlib.Path(info["data"]["device_path"])

    async def _disconnect_locally(self, volume_id: str) -> None:
        await self._call("terminate_connection", self._a, self._local(volume_id))

    def _local(self, volume_id: str) -> Mapping[str, Any]:
        connector = {"host": self._stage.a.name, "do_local_attach": True}
        return {"volume_id": volume_id, "connector": connector}

    def _files(self, host: stage.Host) -> list[pathlib.Path]:
        there = (self._stage.folder / f"{host.name}-volumes").iterdir()
        return [path for path in there if path.name != directory.MARKER]

    async def _get(self, volume_id: str) -> Mapping[str, Any]:
        return await self._call(
            "get_volume",
            self._a,
            {"volume_id": volume_id},
            show=("status", "attach_status", "exported"),
        )

    async def _record(self, volume_id: str) -> Mapping[str, Any]:
        return await self._client.call("get_volume", self._a, {"volume_id": volume_id})

    async def _call(
        self,
        method: str,
        address: str,
        args: Mapping[str, Any],
        *,
        show: Sequence[str] | None = None,
        timeout: float = 60.0,
        progress: str | None = None,
    ) -> Mapping[str, Any]:
        """Sends a request, and tells of it; of the result only what ``show`` names."""
        self._told.sent(method, address, args)
        begin = time.monotonic()
        if progress is None:
            result = await self._client.call(method, address, args, timeout=timeout)
        else:
            with self._told.bar(progress) as bar:
                result = await self._client.call(
                    method, address, args, timeout=timeout, on_status=bar
                )
        shown = {name: value for name, value in result.items() if show is None or name in show}
        self._told.came_back(shown, time.monotonic() - begin)
        return result
