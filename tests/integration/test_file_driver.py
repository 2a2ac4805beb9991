"""The file driver on the real file system of the temporary directory."""

import asyncio
import contextlib
import os
import pathlib
import stat
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from messages import errors
from tests.services import tgtd
from worker import libc, plugins, process
from worker.drivers import base, capacity, file, wiping
from worker.drivers import directory as storage

MIB = 1024**2
GIB = 1024**3

Make = Callable[..., Any]


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "volumes"


@pytest.fixture
def make(directory: pathlib.Path, tmp_path: pathlib.Path) -> Make:
    """Makes a driver, with options of the test's own."""

    def build(**options: Any) -> Any:
        context = base.Context(
            "host-a",
            "fast",
            file.Options(**{"directory": directory, **options}),
            process.Executor(),
            tmp_path,
        )
        return plugins.load("drivers", "file")(context)

    return build


@pytest.fixture
async def driver(make: Make) -> Any:
    driver = make()
    await driver.do_setup()
    await driver.check_for_setup_error()
    return driver


def volume(size: int = 64 * MIB) -> base.Volume:
    return base.Volume(uuid.uuid4(), "../../etc/passwd", size)


def write(path: pathlib.Path, at: int, content: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def entries(directory: pathlib.Path) -> list[str]:
    """All but the marker."""
    return sorted(path.name for path in directory.iterdir() if path.name != storage.MARKER)


def look(path: pathlib.Path) -> os.stat_result:
    return path.stat()


def content(path: pathlib.Path) -> bytes:
    return path.read_bytes()


def put_blank(path: pathlib.Path, size: int) -> None:
    with path.open("wb") as stream:
        stream.truncate(size)


def watch(path: pathlib.Path, copy: pathlib.Path) -> None:
    """Gives the file a second name, so that it can be looked at when the first is gone."""
    os.link(path, copy)


# Creating


async def test_a_new_volume_is_a_sparse_file_of_exactly_its_size(
    driver: Any, directory: pathlib.Path
) -> None:
    made = volume(GIB + 512)
    assert await driver.create_volume(made) == base.Update()
    path = driver.local_path(made)
    assert path == directory / f"volume-{made.id}"
    found = look(path)
    assert found.st_size == GIB + 512
    assert found.st_blocks == 0
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(look(directory).st_mode) == 0o700
    assert await driver.find_volume(made) == GIB + 512
    assert entries(directory) == [path.name]


async def test_the_same_volume_again_is_the_same_and_counts_once(driver: Any) -> None:
    made = volume()
    await driver.create_volume(made)
    await driver.create_volume(made)
    assert await driver.find_volume(made) == made.size_bytes
    stats = await driver.get_volume_stats()
    assert stats["provisioned_capacity_bytes"] == made.size_bytes


async def test_the_same_volume_again_is_the_same_where_the_file_system_knows_no_holes(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank, full = volume(), volume()
    for made in (blank, full):
        await driver.create_volume(made)
    write(driver.local_path(full), 5, b"data")
    seek = os.lseek

    def all_is_data(descriptor: int, at: int, whence: int) -> int:
        size = os.fstat(descriptor).st_size
        return {os.SEEK_DATA: at, os.SEEK_HOLE: size}.get(whence) or seek(descriptor, at, whence)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lseek", all_is_data)
        await driver.create_volume(blank)
        with pytest.raises(errors.VolumeExists):
            await driver.create_volume(full)


async def test_the_rest_of_an_interrupted_create_is_no_volume_and_is_used(
    driver: Any, directory: pathlib.Path
) -> None:
    made = volume()
    (directory / f"volume-{made.id}").touch()
    assert await driver.find_volume(made) is None
    await driver.create_volume(made)
    assert await driver.find_volume(made) == made.size_bytes


@pytest.mark.parametrize("size", [3 * MIB, 64 * MIB, 64 * MIB - 1])
async def test_a_blank_file_of_any_size_is_taken_over_and_one_with_data_is_not(
    driver: Any, size: int
) -> None:
    blank, full = volume(64 * MIB), volume(64 * MIB)
    for foreign in (blank, full):
        put_blank(driver.local_path(foreign), size)
    write(driver.local_path(full), 0, b"somebody's")
    await driver.create_volume(blank)
    assert await driver.find_volume(blank) == blank.size_bytes
    with pytest.raises(errors.VolumeExists, match="holds data"):
        await driver.create_volume(full)
    assert driver.local_path(full).read_bytes().startswith(b"somebody's")


async def test_a_volume_beyond_what_may_be_promised_is_refused_with_nothing_left(
    make: Make, directory: pathlib.Path
) -> None:
    driver = make(max_over_subscription_ratio=1.0)
    await driver.do_setup()
    space = capacity.space(directory)
    with pytest.raises(errors.InsufficientSpace):
        await driver.create_volume(volume(space.total + GIB))
    with pytest.raises(errors.InsufficientSpace):
        await driver.create_volume(volume(space.free + GIB))
    assert entries(directory) == []
    assert (await driver.get_volume_stats())["provisioned_capacity_bytes"] == 0


async def test_what_was_promised_before_counts(make: Make, directory: pathlib.Path) -> None:
    driver = make(max_over_subscription_ratio=1.0)
    await driver.do_setup()
    most = capacity.space(directory).total
    half = int(most * 0.6)
    put_blank(directory / f"volume-{uuid.uuid4()}", half)
    await driver.do_setup()
    with pytest.raises(errors.InsufficientSpace, match="max_over_subscription_ratio"):
        await driver.create_volume(volume(half))


async def test_two_creates_at_once_cannot_promise_the_same_space(
    make: Make, directory: pathlib.Path
) -> None:
    space = capacity.space(directory.parent)
    ratio = 2.0
    driver = make(max_over_subscription_ratio=ratio)
    await driver.do_setup()
    size = min(int(space.total * ratio * 0.6), int(space.free * ratio * 0.9))
    count = int(space.total * ratio // size) + 1
    results = await asyncio.gather(
        *(driver.create_volume(volume(size)) for _ in range(count)), return_exceptions=True
    )
    assert [type(result) for result in results].count(errors.InsufficientSpace) >= 1
    stats = await driver.get_volume_stats(refresh=True)
    assert stats["provisioned_capacity_bytes"] <= space.total * ratio


async def test_the_reserved_part_is_no_volumes(make: Make) -> None:
    driver = make(reserved_percentage=100)
    await driver.do_setup()
    with pytest.raises(errors.InsufficientSpace, match="reserved_percentage"):
        await driver.create_volume(volume())


@pytest.mark.parametrize("number", ["ENOSPC", "EFBIG", "EDQUOT"])
async def test_a_full_file_system_is_insufficient_space_with_nothing_left(
    driver: Any, directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def refuse(*_: object) -> None:
        code = getattr(__import__("errno"), number)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        with pytest.raises(errors.InsufficientSpace):
            await driver.create_volume(volume())
    assert entries(directory) == []


async def test_a_size_that_no_file_can_have_is_insufficient_space(
    make: Make, directory: pathlib.Path
) -> None:
    driver = make(max_over_subscription_ratio=1e9)
    await driver.do_setup()
    with pytest.raises(errors.InsufficientSpace):
        await driver.create_volume(volume(2**63 - 1))
    assert entries(directory) == []


# Links and other things in a volume's place


def put_link(path: pathlib.Path, victim: pathlib.Path) -> None:
    path.symlink_to(victim)


def put_dangling_link(path: pathlib.Path, victim: pathlib.Path) -> None:
    path.symlink_to(victim.with_name("nothing"))


def put_fifo(path: pathlib.Path, _: pathlib.Path) -> None:
    os.mkfifo(path)


def put_directory(path: pathlib.Path, _: pathlib.Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [put_link, put_dangling_link, put_fifo, put_directory])
@pytest.mark.parametrize("clear", ["none", "zero", "shred"])
async def test_what_is_no_regular_file_is_refused_and_never_followed(
    make: Make,
    tmp_path: pathlib.Path,
    put: Callable[[pathlib.Path, pathlib.Path], None],
    clear: str,
) -> None:
    driver = make(volume_clear=clear)
    await driver.do_setup()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    target = volume(8)
    put(driver.local_path(target), victim)
    for call in (
        driver.create_volume(target),
        driver.find_volume(target),
        driver.extend_volume(target, 4096),
        driver.delete_volume(target),
    ):
        with pytest.raises(errors.DeviceUnavailable, match="remove it"):
            await asyncio.wait_for(call, 5)
    assert victim.read_bytes() == b"precious"
    assert driver.local_path(target).name in entries(driver.local_path(target).parent)


# A storage that is away


def move_away(directory: pathlib.Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def move_back(directory: pathlib.Path) -> None:
    if directory.exists():
        (directory / storage.MARKER).unlink(missing_ok=True)
        directory.rmdir()
    directory.with_name("elsewhere").rename(directory)


def leave_nothing(_: pathlib.Path) -> None:
    pass


def leave_mount_point(directory: pathlib.Path) -> None:
    directory.mkdir()


def leave_another(directory: pathlib.Path) -> None:
    directory.mkdir()
    (directory / storage.MARKER).write_text(f"{uuid.uuid4()}\n")


@pytest.mark.parametrize("leave", [leave_nothing, leave_mount_point, leave_another])
@pytest.mark.parametrize("clear", ["none", "zero", "shred"])
async def test_nothing_is_done_or_taken_for_gone_while_the_storage_is_away(
    make: Make, directory: pathlib.Path, leave: Callable[[pathlib.Path], None], clear: str
) -> None:
    driver = make(volume_clear=clear)
    await driver.do_setup()
    made, new = volume(), volume()
    await driver.create_volume(made)
    move_away(directory)
    leave(directory)
    for call in (
        driver.delete_volume(made),
        driver.find_volume(made),
        driver.extend_volume(made, GIB),
        driver.create_volume(new),
        driver.list_volumes(),
        driver.get_volume_stats(refresh=True),
    ):
        with pytest.raises(errors.DeviceUnavailable, match="mount the storage"):
            await call
    for again in (driver, make()):
        with pytest.raises(errors.DriverNotInitialized, match=f"remove .*{storage.REMEMBERED}"):
            await again.do_setup()
    move_back(directory)
    assert await driver.list_volumes() == {made.id: made.size_bytes}
    await driver.delete_volume(made)
    assert entries(directory) == []


async def test_a_storage_of_a_version_without_markers_is_marked_and_known_again(
    make: Make, directory: pathlib.Path
) -> None:
    directory.mkdir()
    put_blank(directory / f"volume-{(old := volume()).id}", old.size_bytes)
    await make().do_setup()
    move_away(directory)
    directory.mkdir()
    with pytest.raises(errors.DriverNotInitialized):
        await make().do_setup()
    move_back(directory)
    driver = make()
    await driver.do_setup()
    assert await driver.find_volume(old) == old.size_bytes


async def test_another_storage_is_used_when_the_remembered_id_is_removed(
    make: Make, directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    await make().do_setup()
    move_away(directory)
    directory.mkdir()
    (tmp_path / storage.REMEMBERED).unlink()
    driver = make()
    await driver.do_setup()
    made = volume()
    await driver.create_volume(made)
    assert await driver.find_volume(made) == made.size_bytes


async def test_hosts_that_share_a_storage_know_it_by_one_marker(
    make: Make, tmp_path: pathlib.Path
) -> None:
    first, second = make(), make()
    await first.do_setup()
    (tmp_path / storage.REMEMBERED).unlink()
    await second.do_setup()
    made = volume()
    await first.create_volume(made)
    assert await second.find_volume(made) == made.size_bytes


@pytest.mark.parametrize("content", ["", "nonsense"])
async def test_an_unfinished_marker_is_finished_and_a_damaged_one_told_of(
    make: Make, directory: pathlib.Path, content: str
) -> None:
    directory.mkdir()
    (directory / storage.MARKER).write_text(content)
    if content:
        with pytest.raises(errors.DriverNotInitialized, match="remove it"):
            await make().do_setup()
    else:
        await make().do_setup()
        await make().do_setup()


@pytest.mark.parametrize("call", ["open", "fstat", "lstat", "ftruncate", "fsync", "unlink"])
async def test_what_the_system_refuses_is_worth_another_try(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver = make(volume_clear="none" if call in {"lstat", "unlink"} else "zero")
    await driver.do_setup()
    made = volume()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted", made.name)

    if call != "ftruncate":
        await driver.create_volume(made)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        work = driver.create_volume if call == "ftruncate" else driver.delete_volume
        with pytest.raises(errors.DeviceUnavailable, match="not permitted"):
            await work(made)
    await driver.create_volume(made)
    await driver.delete_volume(made)
    assert await driver.find_volume(made) is None


# Deleting


@pytest.mark.parametrize("clear", ["none", "zero", "shred"])
async def test_a_deleted_volume_is_gone_and_deleting_it_again_is_no_error(
    make: Make, directory: pathlib.Path, clear: str
) -> None:
    driver = make(volume_clear=clear)
    await driver.do_setup()
    made = volume()
    await driver.create_volume(made)
    await driver.delete_volume(made)
    await driver.delete_volume(made)
    assert entries(directory) == []
    assert await driver.find_volume(made) is None
    stats = await driver.get_volume_stats(refresh=False)
    assert (stats["provisioned_capacity_bytes"], stats["total_volumes"]) == (0, 0)


async def test_zero_leaves_nothing_of_the_data(driver: Any, tmp_path: pathlib.Path) -> None:
    made = volume(GIB)
    await driver.create_volume(made)
    path, copy = driver.local_path(made), tmp_path / "copy"
    for at in (0, 10 * MIB + 5, GIB - 6):
        write(path, at, b"secret")
    watch(path, copy)
    await driver.delete_volume(made)
    assert copy.stat().st_size == GIB
    assert copy.stat().st_blocks == 0


async def test_zero_writes_where_the_file_system_cannot_punch(
    driver: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = volume(8 * MIB)
    await driver.create_volume(made)
    path, copy = driver.local_path(made), tmp_path / "copy"
    write(path, 3 * MIB - 1, b"secret" * (MIB // 2))
    watch(path, copy)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(libc, "fallocate", refuse)
        await driver.delete_volume(made)
    assert copy.read_bytes() == bytes(8 * MIB)


@pytest.mark.parametrize("clear", ["zero", "shred"])
async def test_only_the_first_part_is_wiped_where_so_configured(
    make: Make, tmp_path: pathlib.Path, clear: str
) -> None:
    tgtd.require_program("shred")
    driver = make(volume_clear=clear, volume_clear_size=1)
    await driver.do_setup()
    made = volume(8 * MIB)
    await driver.create_volume(made)
    path, copy = driver.local_path(made), tmp_path / "copy"
    write(path, 0, b"x" * 2 * MIB)
    watch(path, copy)
    await driver.delete_volume(made)
    left = copy.read_bytes()
    assert b"xxxxxxxx" not in left[:MIB]
    if clear == "zero":
        assert left[MIB : 2 * MIB] == b"x" * MIB
    else:
        assert len(left) == MIB


async def test_shred_overwrites_the_data_in_place_and_fills_no_hole(
    make: Make, tmp_path: pathlib.Path
) -> None:
    tgtd.require_program("shred")
    driver = make(volume_clear="shred")
    await driver.do_setup()
    made = volume(20 * GIB)
    await driver.create_volume(made)
    path, copy = driver.local_path(made), tmp_path / "copy"
    for at in (0, 7 * GIB, 19 * GIB + 5 * MIB):
        write(path, at, b"secret!!" * (MIB // 8))
    blocks = path.stat().st_blocks
    watch(path, copy)
    await asyncio.wait_for(driver.delete_volume(made), 60)
    assert not path.exists()
    assert copy.stat().st_blocks <= blocks
    left = copy.read_bytes()
    assert len(left) == 3 * MIB
    assert b"secret!!" not in left
    assert left != bytes(3 * MIB)


async def test_shred_overwrites_the_data_where_the_file_system_cannot_cut_holes_out(
    make: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgtd.require_program("shred")
    driver = make(volume_clear="shred")
    await driver.do_setup()
    made = volume(8 * MIB)
    await driver.create_volume(made)
    path, copy = driver.local_path(made), tmp_path / "copy"
    write(path, 2 * MIB, b"secret!!" * (MIB // 8))
    watch(path, copy)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(libc, "fallocate", refuse)
        await driver.delete_volume(made)
    assert look(copy).st_size == 3 * MIB
    assert b"secret!!" not in content(copy)


async def test_shred_that_fails_keeps_the_volume_to_be_deleted_again(
    make: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgtd.require_program("shred")
    driver = make(volume_clear="shred", num_shell_tries=1)
    await driver.do_setup()
    made = volume()
    await driver.create_volume(made)
    write(driver.local_path(made), 0, b"secret")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.CommandFailed):
            await driver.delete_volume(made)
    assert driver.local_path(made).exists()
    await driver.delete_volume(made)
    assert not driver.local_path(made).exists()


async def test_a_cancelled_delete_stops_and_can_be_run_again(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = volume()
    await driver.create_volume(made)
    write(driver.local_path(made), 0, b"x" * MIB)
    began = threading.Event()
    stopped: list[bool] = []

    def slow(_: int, __: int, stop: threading.Event) -> None:
        began.set()
        stopped.append(stop.wait(10))

    with monkeypatch.context() as patched:
        patched.setattr(wiping, "zero", slow)
        task = asyncio.create_task(driver.delete_volume(made))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert stopped == [True]
    assert await driver.find_volume(made) == made.size_bytes
    await driver.delete_volume(made)
    assert await driver.find_volume(made) is None


# Extending


async def test_an_extended_volume_keeps_its_data_and_the_new_part_is_zeros(driver: Any) -> None:
    made = volume(MIB)
    await driver.create_volume(made)
    path = driver.local_path(made)
    write(path, MIB - 4, b"data")
    await driver.extend_volume(made, 2 * MIB + 512)
    await driver.extend_volume(made, 2 * MIB + 512)
    assert path.read_bytes() == bytes(MIB - 4) + b"data" + bytes(MIB + 512)
    stats = await driver.get_volume_stats()
    assert stats["provisioned_capacity_bytes"] == 2 * MIB + 512
    assert stats["total_volumes"] == 1


async def test_a_volume_never_shrinks(driver: Any) -> None:
    made = volume(2 * MIB)
    await driver.create_volume(made)
    with pytest.raises(errors.InvalidRequest, match="never shrinks"):
        await driver.extend_volume(made, MIB)
    assert await driver.find_volume(made) == 2 * MIB


async def test_a_volume_that_is_not_there_cannot_be_extended(driver: Any) -> None:
    with pytest.raises(errors.VolumeNotFound):
        await driver.extend_volume(volume(), GIB)


async def test_an_extension_that_does_not_fit_changes_nothing(
    driver: Any, directory: pathlib.Path
) -> None:
    made = volume(MIB)
    await driver.create_volume(made)
    with pytest.raises(errors.InsufficientSpace):
        await driver.extend_volume(made, capacity.space(directory).total * 21)
    assert await driver.find_volume(made) == MIB
    assert (await driver.get_volume_stats())["provisioned_capacity_bytes"] == MIB


# Set-up and stats


async def test_stats_are_in_bytes_and_fresh_when_asked_to_be(
    driver: Any, directory: pathlib.Path
) -> None:
    first = await driver.get_volume_stats()
    assert first["total_capacity_bytes"] >= first["free_capacity_bytes"] > 0
    assert first["thin_provisioning_support"] is True
    assert first["sparse_copy_volume"] is True
    assert first["online_extend_support"] is True
    assert first["multiattach"] is False
    (directory / "lost+found").mkdir()
    (directory / "volume-1").write_bytes(b"not ours")
    put_blank(directory / f"volume-{uuid.uuid4()}", MIB)
    later = await driver.get_volume_stats(refresh=True)
    assert (later["provisioned_capacity_bytes"], later["total_volumes"]) == (MIB, 1)


async def test_set_up_tells_what_to_do_about_a_missing_parent(
    make: Make, tmp_path: pathlib.Path
) -> None:
    driver = make(directory=tmp_path / "no" / "volumes")
    with pytest.raises(errors.DriverNotInitialized, match="mkdir -p"):
        await driver.do_setup()
    (tmp_path / "no").mkdir()
    await driver.do_setup()


async def test_set_up_tells_that_a_file_is_no_directory(make: Make, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.DriverNotInitialized, match="no directory"):
        await make(directory=tmp_path / "file").do_setup()


async def test_set_up_misses_shred_before_it_is_needed(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    driver = make(volume_clear="shred")
    await driver.do_setup()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.DriverNotInitialized, match="coreutils"):
        await driver.check_for_setup_error()


@pytest.mark.parametrize(
    "options",
    [
        {"directory": "volumes"},
        {"directory": ""},
        {},
        {"volume_clear": "shredd"},
        {"volume_clear_size": 1025},
        {"reserved_percentage": 101},
        {"unknown": 1},
    ],
)
def test_wrong_options_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        file.Options(**{**({"directory": "/srv"} if "unknown" in options else {}), **options})


async def test_blocking_work_leaves_the_loop_free(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    truncate = os.ftruncate

    def spy(descriptor: int, size: int) -> None:
        threads.append(threading.get_ident())
        truncate(descriptor, size)

    with monkeypatch.context() as patched, contextlib.suppress(errors.InsufficientSpace):
        patched.setattr(os, "ftruncate", spy)
        await driver.create_volume(volume())
    assert threads
    assert threading.get_ident() not in threads
