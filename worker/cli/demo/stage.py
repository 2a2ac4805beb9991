"""Everything that the story needs: a folder, an installation, two workers, a tgtd.

Each is taken down after the block, in reverse, however it ends. Of a demo that failed the workers'
logs stay.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pydantic

from messages import topology
from worker import process, settings
from worker.cli.demo import failure, installation, narrator, programs
from worker.storage_daemon import daemon

NEEDED: Final = 2 * 1024**3
"""Bytes of free space: three volumes, and the files on their way into the first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One storage host."""

    name: str
    backend: str
    worker: programs.Worker
    state_dir: pathlib.Path
    port: int
    """Where its target serves."""

    @property
    def address(self) -> str:
        """Where its requests go."""
        return topology.address(self.name, self.backend)


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """What is set up."""

    folder: pathlib.Path
    namespace: str
    broker_url: pydantic.SecretStr
    execute: process.Executor
    a: Host
    b: Host
    tgtd: programs.Tgtd | None


@contextlib.asynccontextmanager
async def prepare(configured: settings.Settings, told: narrator.Narrator) -> AsyncIterator[Stage]:
    """Sets everything up, and takes it down again.

    Raises:
        Unreachable: the broker or the database is away.
        DemoFailed: a worker does not start.
    """
    execute = process.Executor()
    called = installation.name()
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(installation.database(configured, called))
        addresses = ["host-a@nbd", "host-b@iscsi", "host-b@nbd"]
        await stack.enter_async_context(installation.namespace(configured, called, addresses))
        folder = stack.enter_context(_folder(told))
        told.tell(f"namespace and database {called}, files in {folder}")
        tgtd = await _start_tgtd(stack, execute, told)
        common = {
            "namespace": called,
            "broker_url": configured.broker_url.get_secret_value(),
            "database_url": database.get_secret_value(),
        }
        made = _make_hosts(folder, execute, common, tgtd)
        stack.push_async_callback(_take_down, folder, execute, made)
        for host in made:
            await host.worker.start(tgtd.env if tgtd else {})
            told.tell(
                f"volume-worker run --config {host.worker.config}  "
                f"(pid {host.worker.pid}, serves {host.address})"
            )
        yield Stage(folder, called, configured.broker_url, execute, made[0], made[1], tgtd)


def isolate() -> None:
    """Keeps this process's own configuration from the workers, and finds programs for all."""
    for variable in [name for name in os.environ if name.startswith("VOLUME_WORKER_")]:
        # It would win over their files.
        del os.environ[variable]
    # Where mke2fs and tgtd are, for a user that is not root.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def _folder(told: narrator.Narrator) -> Iterator[pathlib.Path]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="volume-worker-demo-"))
    (folder / "logs").mkdir()
    try:
        free = shutil.disk_usage(folder).free
        failure.ensure(
            free >= NEEDED,
            f"{folder.parent} has {free // 1024**2} MiB free, the demo needs {NEEDED // 1024**2}: "
            "set TMPDIR to a folder with more",
        )
        yield folder
    except Exception:
        _keep_logs(folder, told)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(folder: pathlib.Path, told: narrator.Narrator) -> None:
    for path in folder.iterdir():
        if path.name != "logs":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if any((folder / "logs").iterdir()):
        told.tell(f"the workers' logs are kept in {folder / 'logs'}", "yellow")
    else:
        shutil.rmtree(folder)


async def _start_tgtd(
    stack: contextlib.AsyncExitStack, execute: process.Executor, told: narrator.Narrator
) -> programs.Tgtd | None:
    tgtd = programs.Tgtd(execute)
    try:
        await tgtd.start()
    except programs.Unavailable as error:
        told.skip(f"iSCSI: {error.message}. Both copies go over NBD instead")
        return None
    stack.push_async_callback(tgtd.end)
    told.tell(f"tgtd --iscsi portal=127.0.0.1:{tgtd.port}  (pid {tgtd.pid}, of the demo's own)")
    return tgtd


def _make_hosts(
    folder: pathlib.Path,
    execute: process.Executor,
    common: dict[str, Any],
    tgtd: programs.Tgtd | None,
) -> list[Host]:
    if tgtd is None:
        far: dict[str, Any] = {"target": "nbd"}
    else:
        far = {"target": "tgt", "target_address": "127.0.0.1", "iscsi_port": tgtd.port}
    return [
        _make_host(folder, execute, common, "host-a", {"target": "nbd"}),
        _make_host(folder, execute, common, "host-b", far),
    ]


def _make_host(
    folder: pathlib.Path,
    execute: process.Executor,
    common: dict[str, Any],
    name: str,
    target: dict[str, Any],
) -> Host:
    state_dir = folder / name
    http_port = programs.free_port()
    backend = "nbd" if target["target"] == "nbd" else "iscsi"
    port = target.get("iscsi_port") or programs.free_port()
    if backend == "nbd":
        target = {**target, "target_listen": f"127.0.0.1:{port}"}
    top = {
        "host": name,
        **common,
        "state_dir": str(state_dir),
        "http_listen": f"127.0.0.1:{http_port}",
        "drain_timeout": 20,
    }
    options = {"driver": "file", "directory": str(folder / f"{name}-volumes"), **target}
    config = folder / f"{name}.toml"
    # JSON's texts and numbers are TOML's as well.
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    lines += ["", f"[backends.{backend}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    config.touch(mode=0o600)
    config.write_text("\n".join(lines) + "\n")
    return Host(name, backend, programs.Worker(execute, name, config, http_port), state_dir, port)


async def _take_down(folder: pathlib.Path, execute: process.Executor, hosts: list[Host]) -> None:
    await asyncio.gather(*(host.worker.end() for host in hosts))
    for host in hosts:
        if host.worker.log:
            (folder / "logs" / f"{host.name}.log").write_text(host.worker.log)
        for served in host.state_dir.glob("backends/*/nbd"):
            # What serves a volume outlives its worker, but not the demo.
            await daemon.StorageDaemon(execute, served).stop()
