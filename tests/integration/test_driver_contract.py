"""What every driver and every target must do alike, the fakes included."""

import dataclasses
import pathlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from messages import errors
from tests.services import tgtd
from worker import plugins, process
from worker.drivers import base as drivers
from worker.targets import base as targets
from worker.targets import fake

MIB = 1024**2
CONNECTOR = {"host": "host-b", "initiator": "iqn.1993-08.org.debian:01:contract"}
FAKES = frozenset({"fake_iscsi", "fake_iser"})


@dataclasses.dataclass(frozen=True)
class Pair:
    driver_name: str
    driver: Any
    target: Any

    def path(self, volume: drivers.Volume) -> pathlib.Path:
        needs = self.target.needs_local_path
        return self.driver.local_path(volume) if needs else pathlib.Path("/nowhere")


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[tgtd.Tgtd]:
    with tgtd.running() as daemon:
        yield daemon


@pytest.fixture(
    params=[("file", "tgt"), ("file", "fake"), ("fake_iscsi", "fake"), ("fake_iser", "fake_iser")],
    ids="-".join,
)
async def pair(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    driver_name, target_name = request.param
    driver_class = plugins.load("drivers", driver_name)
    target_class: Any = (
        fake.FakeIserTarget if target_name == "fake_iser" else plugins.load("targets", target_name)
    )
    values: dict[str, Any] = {}
    if driver_name == "file":
        values["directory"] = tmp_path / "volumes"
    if target_name == "tgt":
        daemon = request.getfixturevalue("shared_daemon")
        for name, value in daemon.env.items():
            monkeypatch.setenv(name, value)
        values["iscsi_port"] = daemon.port
    model = type("Options", (driver_class.Options, target_class.Options), {})
    options, execute = model(**values), process.Executor()
    made = Pair(
        driver_name,
        driver_class(drivers.Context("host-a", "fast", options, execute, tmp_path)),
        target_class(targets.Context("host-a", "fast", options, execute, tmp_path)),
    )
    await made.driver.do_setup()
    await made.driver.check_for_setup_error()
    await made.target.do_setup()
    yield made
    await made.target.restore([])
    await made.target.close()
    await made.driver.close()


def new_volume() -> drivers.Volume:
    return drivers.Volume(uuid.uuid4(), "v", 8 * MIB)


def new_connection(
    pair: Pair, mode: targets.AccessMode = targets.AccessMode.READ_WRITE
) -> targets.Connection:
    return targets.Connection(uuid.uuid4(), CONNECTOR, mode, pair.target.new_credentials())


# Drivers


async def test_a_volume_is_created_extended_and_deleted_each_twice(pair: Pair) -> None:
    volume = new_volume()
    for _ in range(2):
        assert isinstance(await pair.driver.create_volume(volume), drivers.Update)
    assert await pair.driver.find_volume(volume) == volume.size_bytes
    grown = dataclasses.replace(volume, size_bytes=16 * MIB)
    for _ in range(2):
        await pair.driver.extend_volume(volume, grown.size_bytes)
    assert await pair.driver.find_volume(grown) == grown.size_bytes
    for _ in range(2):
        await pair.driver.delete_volume(grown)
    if pair.driver_name not in FAKES:  # which remember nothing
        assert await pair.driver.find_volume(grown) is None


async def test_stats_have_every_member_and_capacities_in_bytes_or_words(pair: Pair) -> None:
    for refresh in (False, True):
        stats = await pair.driver.get_volume_stats(refresh=refresh)
        for name in ("total", "free", "provisioned"):
            value = stats[f"{name}_capacity_bytes"]
            assert value in {"infinite", "unknown"} or value >= 0
        for name in (
            "thin_provisioning_support",
            "thick_provisioning_support",
            "multiattach",
            "online_extend_support",
            "sparse_copy_volume",
        ):
            assert isinstance(stats[name], bool)
        assert stats["total_volumes"] >= 0
        protocol = stats.get("storage_protocol", pair.target.storage_protocol)
        assert protocol == pair.target.storage_protocol


async def test_hooks_and_shortcuts_that_a_driver_lacks_do_nothing(pair: Pair) -> None:
    volume = new_volume()
    await pair.driver.create_volume(volume)
    await pair.driver.attach_volume(volume, uuid.uuid4(), None, "/dev/vdb")
    await pair.driver.detach_volume(volume)
    await pair.driver.clear_download(volume)
    assert await pair.driver.clone_image(volume, "file:///srv/i", "raw") is None
    assert await pair.driver.backup_volume(volume, "file:///srv/b") is False
    assert await pair.driver.migrate_volume(volume, "host-b@fast") is None
    assert isinstance(await pair.driver.accept_transfer(volume, "u", "p"), drivers.Update)
    await pair.driver.delete_volume(volume)


async def test_a_local_path_is_absolute_or_not_supported(pair: Pair) -> None:
    volume = new_volume()
    try:
        path = pair.driver.local_path(volume)
    except errors.NotSupported:
        assert not pair.target.needs_local_path
    else:
        assert path.is_absolute()


# Targets


async def test_a_volume_is_exported_connected_and_all_is_undone_each_twice(pair: Pair) -> None:
    volume, connection = new_volume(), new_connection(pair)
    await pair.driver.create_volume(volume)
    path = pair.path(volume)
    location = await pair.target.create_export(volume, path)
    assert await pair.target.create_export(volume, path) == location
    info = await pair.target.initialize_connection(volume, path, connection)
    assert await pair.target.initialize_connection(volume, path, connection) == info
    assert await pair.target.check_health() is True
    for _ in range(2):
        await pair.target.terminate_connection(volume, connection)
    for _ in range(2):
        await pair.target.remove_export(volume)
    assert await pair.target.check_health() is True
    await pair.driver.delete_volume(volume)


async def test_connection_data_is_complete_and_holds_no_secret(pair: Pair) -> None:
    volume, connection = new_volume(), new_connection(pair, targets.AccessMode.READ_ONLY)
    await pair.driver.create_volume(volume)
    path = pair.path(volume)
    await pair.target.create_export(volume, path)
    info = await pair.target.initialize_connection(volume, path, connection)
    assert info.driver_volume_type == pair.target.driver_volume_type
    assert info.data["access_mode"] == "ro"
    assert info.data["volume_id"] == str(volume.id)
    assert set(info.data) >= {
        "target_discovered",
        "target_iqn",
        "target_portal",
        "target_lun",
        "auth_method",
        "auth_username",
        "encrypted",
    }
    assert set(info.secrets) == {"auth_password"}
    secret = info.secrets["auth_password"]
    assert secret not in repr(info) + repr(dict(info.data)) + repr(connection)
    await pair.target.remove_export(volume)


async def test_two_connections_share_neither_name_nor_account(pair: Pair) -> None:
    volume = new_volume()
    await pair.driver.create_volume(volume)
    path = pair.path(volume)
    await pair.target.create_export(volume, path)
    first, second = [
        await pair.target.initialize_connection(volume, path, new_connection(pair))
        for _ in range(2)
    ]
    for member in ("target_iqn", "auth_username"):
        assert first.data[member] != second.data[member]
    assert first.secrets != second.secrets
    await pair.target.remove_export(volume)


async def test_undoing_what_never_was_is_no_error(pair: Pair) -> None:
    volume = new_volume()
    await pair.target.terminate_connection(volume, new_connection(pair), force=True)
    await pair.target.remove_export(volume)
    await pair.driver.delete_volume(volume)
    if pair.driver_name not in FAKES:  # which remember nothing
        assert await pair.driver.find_volume(volume) is None


async def test_restoring_gives_the_same_connection_again(pair: Pair) -> None:
    volume, connection = new_volume(), new_connection(pair)
    await pair.driver.create_volume(volume)
    path = pair.path(volume)
    await pair.target.create_export(volume, path)
    info = await pair.target.initialize_connection(volume, path, connection)
    await pair.target.do_setup()
    assert await pair.target.restore([targets.Export(volume, path, [connection])]) == {}
    assert await pair.target.initialize_connection(volume, path, connection) == info
    assert await pair.target.restore([]) == {}
    assert await pair.target.check_health() is True


async def test_a_connector_without_what_the_target_needs_is_refused(pair: Pair) -> None:
    pair.target.validate_connector(CONNECTOR)
    for connector in ({}, {"host": "host-b"}, {"host": "host-b", "initiator": ""}):
        with pytest.raises(errors.InvalidConnector):
            pair.target.validate_connector(connector)


async def test_what_cannot_be_shown_to_a_live_connection_is_not_supported(pair: Pair) -> None:
    volume = new_volume()
    await pair.driver.create_volume(volume)
    if pair.target.extends_online:
        await pair.target.extend_volume(volume, pair.path(volume))
    else:
        with pytest.raises(errors.NotSupported):
            await pair.target.extend_volume(volume, pair.path(volume))
