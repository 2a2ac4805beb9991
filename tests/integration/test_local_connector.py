"""The connector of volumes that are on this host."""

import asyncio
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from messages import errors
from tests.services import attaching
from worker.connectors import base, local

STREAM, PATH = base.Access.STREAM, base.Access.PATH


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: pathlib.Path) -> Iterator[None]:
    with attaching.nothing_left(tmp_path):
        yield


@pytest.fixture
def backing(tmp_path: pathlib.Path) -> pathlib.Path:
    return attaching.new_volume(tmp_path)


@pytest.fixture
def context(tmp_path: pathlib.Path) -> base.Context:
    return attaching.new_context(tmp_path)


async def test_a_local_volume_is_its_path(context: base.Context, backing: pathlib.Path) -> None:
    connector = local.LocalConnector(context)
    data = {"device_path": str(backing)}
    for access in (STREAM, PATH):
        device = await connector.connect_volume(data, key="k", access=access, read_only=False)
        assert device == base.Device(path=backing)
        assert await connector.check_valid_device(device)
    await connector.disconnect_volume(data, key="k")
    await connector.disconnect_volume(data, key="k")


async def test_a_local_path_that_cannot_be_used_is_told(
    context: base.Context, tmp_path: pathlib.Path, backing: pathlib.Path
) -> None:
    connector = local.LocalConnector(context)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(errors.DeviceUnavailable, match=path.name):
            await connector.connect_volume(
                {"device_path": str(path)}, key="k", access=PATH, read_only=True
            )
    wrong: tuple[Any, ...] = (None, "", "relative", 7, "/nul\0")
    for value in wrong:
        with pytest.raises(errors.InvalidConnector, match="device_path"):
            await connector.connect_volume(
                {"device_path": value}, key="k", access=PATH, read_only=True
            )
    os.truncate(backing, 0)
    assert not await connector.check_valid_device(base.Device(path=backing))


async def test_a_local_volume_that_is_gone_fails_the_flush_unless_forced(
    context: base.Context, backing: pathlib.Path
) -> None:
    connector = local.LocalConnector(context)
    data = {"device_path": str(backing)}
    await connector.connect_volume(data, key="k", access=PATH, read_only=False)
    await asyncio.to_thread(backing.unlink)
    with pytest.raises(errors.DeviceUnavailable, match="flush"):
        await connector.disconnect_volume(data, key="k")
    await connector.disconnect_volume(data, key="k", force=True)
