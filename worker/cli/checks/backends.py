"""Each backend: its driver and its target, and what its host needs to attach volumes.

A driver and a target of their own are made, whose state is in a folder that goes afterwards: the
locks, records and daemons of a worker that runs are in another one, and none of them is touched.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import tempfile
from typing import Any, Final

from messages import errors, topology
from worker import plugins, process, settings
from worker.cli.checks import finding, host
from worker.connectors import bridge
from worker.drivers import base as drivers
from worker.drivers import directory
from worker.storage_daemon import daemon, record
from worker.targets import base as targets

_PROBE_TIMEOUT: Final = 30.0
"""Seconds."""


async def look(configured: settings.Settings) -> list[finding.Finding]:
    """Findings about every backend, and about attaching."""
    backends = settings.backends(configured)
    if not backends:
        return [finding.warn("backends", "none is configured: add a table [backends.NAME]")]
    execute = process.Executor(configured.root_command())
    found: list[finding.Finding] = []
    with tempfile.TemporaryDirectory(prefix="volume-worker-check-") as folder:
        for number, backend in enumerate(backends):
            state_dir = pathlib.Path(folder, str(number))
            await asyncio.to_thread(state_dir.mkdir)
            found += await _backend(configured, backend, execute, state_dir)
    return found + await _attaching(execute)


async def _backend(
    configured: settings.Settings,
    backend: settings.Backend,
    execute: process.Executor,
    state_dir: pathlib.Path,
) -> list[finding.Finding]:
    address = topology.address(configured.host, backend.name)
    parts = (configured.host, backend.name, backend.options, execute, state_dir)
    own_dir = configured.state_dir / "backends" / backend.name
    await asyncio.to_thread(_remember, own_dir, state_dir)
    driver = await _driver(f"{address} driver {backend.driver}", backend, drivers.Context(*parts))
    found = [
        # What the operator has to do is meant for the worker's own folder.
        dataclasses.replace(driver, message=driver.message.replace(str(state_dir), str(own_dir))),
        await _target(f"{address} target {backend.target}", backend, targets.Context(*parts)),
    ]
    if backend.target == "nbd" and found[-1].state is finding.State.OK:
        found.append(_nbd_port(f"{address} target_listen", backend.options, own_dir / "nbd"))
    return found


def _remember(own_dir: pathlib.Path, state_dir: pathlib.Path) -> None:
    """Lets the driver know which storage is the worker's, if it was ever set up."""
    with contextlib.suppress(OSError):
        content = (own_dir / directory.REMEMBERED).read_bytes()
        (state_dir / directory.REMEMBERED).write_bytes(content)


async def _driver(
    subject: str, backend: settings.Backend, context: drivers.Context
) -> finding.Finding:
    driver: drivers.Driver = plugins.load("drivers", backend.driver)(context)
    try:
        await driver.do_setup()
        await driver.check_for_setup_error()
        stats = await driver.get_volume_stats()
    except errors.VolumeWorkerError as error:
        return finding.fail(subject, error.message)
    except Exception as error:
        return finding.fail(subject, f"{type(error).__name__}: {error}")
    finally:
        await driver.close()
    return finding.ok(subject, f"set up, {_free(stats.get('free_capacity_bytes'))}")


def _free(free: Any) -> str:
    if isinstance(free, int | float):
        return f"{free / 1024**3:.1f} GiB free"
    return f"free space {free}"


async def _target(
    subject: str, backend: settings.Backend, context: targets.Context
) -> finding.Finding:
    target: targets.Target = plugins.load("targets", backend.target)(context)
    try:
        await target.do_setup()
    except errors.VolumeWorkerError as error:
        return finding.fail(subject, error.message)
    except Exception as error:
        return finding.fail(subject, f"{type(error).__name__}: {error}")
    finally:
        await target.close()
    return finding.ok(subject, "its tools are there and answer")


def _nbd_port(subject: str, options: Any, kept: pathlib.Path) -> finding.Finding:
    listen = options.listen
    reason = host.bind_error(listen.host, listen.port)
    if reason is None:
        return finding.ok(subject, f"{listen} is free")
    serving = record.read(kept)
    if (
        serving is not None
        and serving.pid is not None
        and process.start_time(serving.pid) == serving.started
    ):
        return finding.ok(subject, f"this backend's own server (pid {serving.pid}) serves {listen}")
    return finding.fail(subject, f"{listen} cannot be listened on: {reason}")


async def _attaching(execute: process.Executor) -> list[finding.Finding]:
    """What copies from and to other hosts need, and what else may be wanted."""
    missing = [name for name in (daemon.PROGRAM, "setpriv") if process.find_program(name) is None]
    if missing:
        return [
            finding.fail(
                "attaching",
                f"{' and '.join(missing)} not on PATH: install QEMU's storage daemon "
                "(qemu-system-common or qemu-storage-daemon) and util-linux; without them no "
                "volume of another host can be attached",
            )
        ]
    return [
        finding.ok("attaching nbd", f"{daemon.PROGRAM} is there"),
        await _iscsi(execute),
        _fuse(),
    ]


async def _iscsi(execute: process.Executor) -> finding.Finding:
    """Whether QEMU has its iSCSI initiator: it says so before it finds nobody at the portal."""
    nobody = (
        "driver=iscsi,node-name=n,transport=tcp,portal=127.0.0.1:1,target=iqn.2026-01.a:b,lun=1"
    )
    try:
        await execute.run(daemon.PROGRAM, "--blockdev", nobody, timeout=_PROBE_TIMEOUT)
    except errors.VolumeWorkerError as error:
        words = str(error.details.get("stderr", ""))
        if "Unknown driver" in words or "does not accept value 'iscsi'" in words:
            return finding.warn(
                "attaching iscsi",
                f"{daemon.PROGRAM} has no iSCSI: install qemu-block-extra, if volumes of other "
                "hosts are to be reached that way",
            )
    return finding.ok("attaching iscsi", f"{daemon.PROGRAM} has its initiator")


def _fuse() -> finding.Finding:
    try:
        bridge.check_fuse()
    except errors.VolumeWorkerError as error:
        return finding.warn("attaching as a file", f"{error.message}. Copies do not need it")
    return finding.ok("attaching as a file", "/dev/fuse can be used")
