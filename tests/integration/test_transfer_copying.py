"""Copies by the real child process, between files and real NBD servers."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from messages import errors
from tests.services import copies
from worker import process
from worker.connectors import base
from worker.transfer import copying

MIB = 1024 * 1024
OLD = b"\xee"
COMBINATIONS = [
    ("file", "file"),
    ("file", "nbd"),
    ("nbd", "file"),
    ("nbd", "nbd"),
]

needs_qemu_nbd = pytest.mark.skipif(
    not copies.QEMU_NBD.exists() and "CI" not in os.environ, reason="needs qemu-nbd (qemu-utils)"
)


@pytest.fixture
def servers(tmp_path: pathlib.Path) -> Iterator[copies.Servers]:
    made = copies.Servers(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def executor() -> process.Executor:
    return process.Executor()


@pytest.fixture
def copier(tmp_path: pathlib.Path, servers: copies.Servers) -> copies.Copier:
    return copies.Copier(tmp_path, servers)


ISLANDS = st.lists(
    st.tuples(st.integers(0, 9 * MIB), st.integers(1, 2 * MIB)), min_size=0, max_size=5
)


@needs_qemu_nbd
@pytest.mark.parametrize("kinds", COMBINATIONS, ids="-to-".join)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    size=st.integers(1, 9 * MIB),
    islands=ISLANDS,
    verify=st.booleans(),
    source_changes=st.booleans(),
)
@example(size=1, islands=[], verify=True, source_changes=False)
@example(size=8 * MIB + 1, islands=[(0, 9 * MIB)], verify=True, source_changes=True)
@example(size=5 * MIB + 4097, islands=[(4 * MIB - 1, 2)], verify=True, source_changes=False)
def test_a_copy_over_old_data_equals_its_source(
    copier: copies.Copier,
    kinds: tuple[str, str],
    size: int,
    islands: list[tuple[int, int]],
    verify: bool,
    source_changes: bool,
) -> None:
    content = copies.write_source(copier.source, size, islands)
    copier.destination.write_bytes(OLD * (size + 5000))
    try:
        copied = asyncio.run(copier.copy(kinds, size, verify=verify, source_changes=source_changes))
    finally:
        copier._servers.stop()
    written = copier.destination.read_bytes()
    assert written[:size] == content
    assert written[size:] == OLD * 5000, "what is beyond the copied bytes is untouched"
    assert copied.total_bytes == size
    assert copied.copied_bytes + copied.zeroed_bytes == size
    assert copied.digest == (copies.digest_of(content) if verify else None)


@needs_qemu_nbd
@pytest.mark.parametrize("kinds", COMBINATIONS, ids="-to-".join)
@pytest.mark.parametrize("old", [b"", OLD], ids=["empty", "full"])
async def test_holes_stay_holes(copier: copies.Copier, kinds: tuple[str, str], old: bytes) -> None:
    size = 64 * MIB
    copies.write_source(copier.source, size, [(MIB, MIB), (30 * MIB, 2 * MIB)])
    copier.destination.write_bytes(old * size)
    os.truncate(copier.destination, size)
    copied = await copier.copy(kinds, size)
    assert copied.copied_bytes <= 4 * MIB
    assert copies.data_bytes(copier.destination) <= 4 * MIB


@pytest.mark.parametrize("which", ["source", "destination"])
async def test_a_device_that_is_too_small_is_refused_before_a_byte_moves(
    copier: copies.Copier, which: str
) -> None:
    copier.source.write_bytes(b"new" * MIB)
    copier.destination.write_bytes(OLD * 3 * MIB)
    os.truncate(copier.source if which == "source" else copier.destination, 3 * MIB - 1)
    before = copier.destination.read_bytes()
    with pytest.raises(errors.InvalidRequest) as caught:
        await copier.copy(("file", "file"), 3 * MIB)
    assert caught.value.details["device_bytes"] == 3 * MIB - 1
    assert copier.destination.read_bytes() == before


async def test_a_missing_destination_is_unavailable_and_not_made(copier: copies.Copier) -> None:
    copier.source.write_bytes(b"new")
    with pytest.raises(errors.DeviceUnavailable, match="No such file"):
        await copier.copy(("file", "file"), 3)
    assert not copier.destination.exists()


async def test_a_volume_is_not_copied_to_itself(copier: copies.Copier) -> None:
    copier.source.write_bytes(b"data" * 1000)
    copier.destination.hardlink_to(copier.source)
    with pytest.raises(errors.InvalidRequest, match="the same volume"):
        await copier.copy(("file", "file"), 4000)
    assert copier.source.read_bytes() == b"data" * 1000


@needs_qemu_nbd
@pytest.mark.parametrize(
    ("number", "kind"), [(28, errors.InsufficientSpace), (5, errors.DeviceUnavailable)]
)
async def test_a_server_that_cannot_write_is_told_by_its_error(
    copier: copies.Copier,
    servers: copies.Servers,
    executor: process.Executor,
    number: int,
    kind: type[errors.VolumeWorkerError],
) -> None:
    copies.write_source(copier.source, 8 * MIB, [(0, 8 * MIB)])
    copier.destination.write_bytes(OLD * 8 * MIB)
    with pytest.raises(kind) as caught:
        await copying.copy(
            executor,
            base.Device(path=copier.source),
            servers.serve_failing(copier.destination, number),
            size_bytes=8 * MIB,
            verify=True,
            source_changes=False,
        )
    assert caught.value.details["errno"] == number


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem")
async def test_a_full_filesystem_is_insufficient_space(
    copier: copies.Copier, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs"]
    if subprocess.run([*mount, folder], check=False, capture_output=True).returncode:
        pytest.skip("filesystems cannot be mounted here")
    try:
        copies.write_source(copier.source, 16 * MIB, [(0, 16 * MIB)])
        copier.destination = folder / "destination"
        copier.destination.touch()
        os.truncate(copier.destination, 16 * MIB)
        with pytest.raises(errors.InsufficientSpace):
            await copier.copy(("file", "file"), 16 * MIB)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def loop_device(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A block device of 16 MiB of old data."""
    image = tmp_path / "image"
    image.write_bytes(OLD * 16 * MIB)
    made = subprocess.run(
        ["losetup", "--find", "--show", image], check=False, capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    yield pathlib.Path(made.stdout.strip())
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


@pytest.mark.skipif(not shutil.which("losetup"), reason="needs losetup (util-linux)")
async def test_a_block_device_is_copied_to(
    copier: copies.Copier, loop_device: pathlib.Path
) -> None:
    size = 12 * MIB + 700
    content = copies.write_source(copier.source, size, [(0, MIB + 1), (5 * MIB - 3, 2 * MIB)])
    copier.destination = loop_device
    copied = await copier.copy(("file", "file"), size)
    assert loop_device.read_bytes() == content + OLD * (16 * MIB - size)
    assert copied.digest == copies.digest_of(content)
    assert copied.copied_bytes < 4 * MIB


@pytest.fixture
def fuse_file(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file of 16 MiB of old data, exported by FUSE without discard: punching holes is a lie."""
    image, mountpoint = tmp_path / "image", tmp_path / "mounted"
    image.write_bytes(OLD * 16 * MIB)
    mountpoint.touch()
    command = [
        "qemu-storage-daemon",
        "--blockdev",
        f"driver=file,filename={image},node-name=n,discard=ignore",
        "--export",
        f"type=fuse,id=f,node-name=n,mountpoint={mountpoint},writable=on",
    ]
    with subprocess.Popen(command) as daemon:
        deadline = time.monotonic() + 20
        while not mountpoint.stat().st_size:
            if daemon.poll() is not None:
                pytest.skip("files cannot be exported by FUSE here")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield mountpoint
        daemon.terminate()


@pytest.mark.skipif(
    not shutil.which("qemu-storage-daemon") and "CI" not in os.environ,
    reason="needs qemu-storage-daemon (qemu-system-common)",
)
async def test_no_old_data_is_left_on_a_file_that_lies_about_holes(
    copier: copies.Copier, fuse_file: pathlib.Path
) -> None:
    size = 15 * MIB + 512
    content = copies.write_source(copier.source, size, [(5 * MIB, MIB)])
    copier.destination = fuse_file
    copied = await copier.copy(("file", "file"), size)
    assert fuse_file.read_bytes() == content + OLD * (16 * MIB - size)
    assert copied.digest == copies.digest_of(content)


def slow(copier: copies.Copier, kinds: tuple[str, str], **options: object) -> asyncio.Task[object]:
    copies.write_source(copier.source, 32 * MIB, [(0, 32 * MIB)])
    copier.destination.write_bytes(OLD * 32 * MIB)
    return asyncio.create_task(
        copier.copy(kinds, 32 * MIB, bytes_per_second=MIB, **options)  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def children() -> dict[int, list[str]]:
    """Copiers of this test process, by pid."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            arguments = (entry / "cmdline").read_text().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if "worker.transfer.copier" in arguments and parent == os.getpid():
                found[int(entry.name)] = arguments
    return found


def begun(copier: copies.Copier) -> Callable[[], bool]:
    def has_begun() -> bool:
        with copier.destination.open("rb") as destination:
            return destination.read(1000) != OLD * 1000

    return has_begun


@needs_qemu_nbd
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_server_killed_in_the_middle_is_an_error_and_no_hang(
    copier: copies.Copier, servers: copies.Servers, killed: int
) -> None:
    copying_ = slow(copier, ("nbd", "nbd"))
    await until(begun(copier))
    servers.processes[killed].kill()
    async with asyncio.timeout(20):
        with pytest.raises(errors.DeviceUnavailable):
            await copying_


@needs_qemu_nbd
async def test_a_cancelled_copy_leaves_no_process(copier: copies.Copier) -> None:
    copying_ = slow(copier, ("nbd", "file"))
    await until(begun(copier))
    assert children()
    copying_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying_
    assert not children()


async def test_a_killed_child_is_a_failed_command(copier: copies.Copier) -> None:
    copying_ = slow(copier, ("file", "file"))
    await until(begun(copier))
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.CommandFailed, match="without a result") as caught:
        await copying_
    assert caught.value.details["exit_code"] == -signal.SIGKILL


async def test_a_child_that_talks_nonsense_is_a_failed_command(
    copier: copies.Copier, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho no such thing >&2\necho nonsense\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    copier.source.write_bytes(b"data")
    copier.destination.write_bytes(b"data")
    with pytest.raises(errors.CommandFailed, match="something else than a message"):
        await copier.copy(("file", "file"), 4)


async def test_progress_is_told_now_and_then_and_rises(copier: copies.Copier) -> None:
    told: list[tuple[float, copying.Progress]] = []

    async def tell(progress: copying.Progress) -> None:
        told.append((time.monotonic(), progress))

    copies.write_source(copier.source, 6 * MIB, [(0, 6 * MIB)])
    copier.destination.write_bytes(OLD * 6 * MIB)
    started = time.monotonic()
    copied = await copier.copy(
        ("file", "file"), 6 * MIB, bytes_per_second=3 * MIB, on_progress=tell
    )
    seconds = time.monotonic() - started
    assert 1.3 < seconds < 15, "the rate is roughly held"
    assert 2 <= len(told) <= 2 * seconds + 2
    done = [progress.done_bytes for _, progress in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][1].total_bytes == copied.total_bytes == 6 * MIB
    assert any(MIB < progress.bytes_per_second < 6 * MIB for _, progress in told)


async def test_a_rate_can_be_changed_while_a_copy_runs(copier: copies.Copier) -> None:
    rate = copying.Rate(64 * 1024)
    copies.write_source(copier.source, 32 * MIB, [(0, 32 * MIB)])
    copier.destination.write_bytes(OLD * 32 * MIB)
    copying_ = asyncio.create_task(copier.copy(("file", "file"), 32 * MIB, bytes_per_second=rate))
    await until(begun(copier))
    rate.set(None)
    async with asyncio.timeout(20):
        await copying_
    assert copier.destination.read_bytes() == copier.source.read_bytes()


@pytest.mark.parametrize("how", ["stdin closed", "not fed"])
def test_a_child_ends_when_its_parent_is_gone_or_stands_still(
    copier: copies.Copier, tmp_path: pathlib.Path, how: str
) -> None:
    copies.write_source(copier.source, 32 * MIB, [(0, 32 * MIB)])
    copier.destination.write_bytes(OLD * 32 * MIB)
    request = {
        "source": {"path": str(copier.source)},
        "destination": {"path": str(copier.destination)},
        "size_bytes": 32 * MIB,
        "verify": False,
        "source_changes": False,
        "bytes_per_second": MIB,
        "lease_seconds": 0.3 if how == "not fed" else None,
        "resume_from": 0,
    }
    command = [sys.executable, "-P", "-m", "worker.transfer.copier"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        if how == "stdin closed":
            child.stdin.close()
        assert child.wait(10) == 1
        assert b"the copier ends: " in child.stderr.read()


# Going on from a mark


class Killer:
    """Ends a copy by kill -9 at its first mark."""

    def __init__(self) -> None:
        self.mark = 0
        self._pid = 0

    async def on_child(self, pid: int) -> None:
        self._pid = pid

    async def on_mark(self, mark: int) -> None:
        self.mark = mark
        os.kill(self._pid, signal.SIGKILL)


async def killed(copier: copies.Copier, kinds: tuple[str, str], size: int) -> int:
    """A copy that was killed at its first mark, which is returned."""
    killer = Killer()
    with pytest.raises(errors.CommandFailed):
        await copier.copy(
            kinds,
            size,
            bytes_per_second=64 * MIB,
            on_mark=killer.on_mark,
            on_child=killer.on_child,
        )
    assert 0 < killer.mark < size
    assert killer.mark % (4 * MIB) == 0
    return killer.mark


@needs_qemu_nbd
@pytest.mark.parametrize("kinds", [("file", "file"), ("file", "nbd"), ("nbd", "file")])
async def test_a_copy_that_was_killed_goes_on_from_its_mark(
    copier: copies.Copier, kinds: tuple[str, str]
) -> None:
    size = 100 * MIB + 1
    content = copies.write_source(copier.source, size, [(0, 70 * MIB), (90 * MIB, 20 * MIB)])
    copier.destination.write_bytes(OLD * size)
    mark = await killed(copier, kinds, size)
    copied = await copier.copy(kinds, size, resume_from=mark)
    assert copied.resumed_from_bytes == mark
    assert copied.copied_bytes + copied.zeroed_bytes + mark == copied.total_bytes == size
    assert copied.digest == copies.digest_of(content)
    assert copier.destination.read_bytes() == content


async def test_a_mark_is_not_taken_where_what_stands_before_it_differs(
    copier: copies.Copier,
) -> None:
    content = copies.write_source(copier.source, 100 * MIB, [(0, 100 * MIB)])
    copier.destination.write_bytes(OLD * 100 * MIB)
    mark = await killed(copier, ("file", "file"), 100 * MIB)
    with copier.destination.open("r+b") as destination:
        destination.seek(mark - 1)
        destination.write(bytes([content[mark - 1] ^ 1]))
    copied = await copier.copy(("file", "file"), 100 * MIB, verify=False, resume_from=mark)
    assert copied.resumed_from_bytes == 0
    assert copier.destination.read_bytes() == content


async def test_what_differs_far_before_the_mark_is_found_by_the_reading_back(
    copier: copies.Copier,
) -> None:
    size = 200 * MIB
    content = copies.write_source(copier.source, size, [(0, size)])
    copier.destination.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(errors.DeviceUnavailable) as refused:
        await copier.copy(("file", "file"), size, resume_from=160 * MIB)
    assert refused.value.details["reason"] == "verify_mismatch"


async def test_a_source_that_changes_gives_no_mark(copier: copies.Copier) -> None:
    marks: list[int] = []

    async def on_mark(mark: int) -> None:
        marks.append(mark)

    copies.write_source(copier.source, 100 * MIB, [(0, 100 * MIB)])
    copier.destination.write_bytes(OLD * 100 * MIB)
    await copier.copy(
        ("file", "file"),
        100 * MIB,
        source_changes=True,
        bytes_per_second=64 * MIB,
        on_mark=on_mark,
    )
    assert marks == []
