"""A statement that was committed, and whose answer never came: it is sent once more."""

import pathlib
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from messages import client, errors
from tests.integration import service_bench
from tests.services import environment
from worker import attempt
from worker.store import acceptance

ADDRESS = "host-a@fast"
BACKENDS = {"fast": {"driver": "fake_iscsi"}}


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first answer to the statement that stores requests is lost."""
    accept = acceptance.accept

    async def twice(*args: Any, **options: Any) -> Sequence[acceptance.Accepted]:
        await accept(*args, **options)
        return await accept(*args, **options)

    monkeypatch.setattr(acceptance, "accept", twice)


async def test_a_job_that_is_known_to_be_stored_only_by_its_repeat_is_carried_out(
    installation: environment.Installation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        service_bench.running(installation, tmp_path, monkeypatch, BACKENDS),
        client.Client(installation.broker_url, namespace=installation.namespace) as volumes,
    ):
        new = {"volume": {"name": "v", "size_bytes": 1024}}
        volume = await volumes.call("create_volume", ADDRESS, new)
        assert volume["status"] == "available"


async def test_a_create_that_is_cancelled_before_it_began_leaves_no_record_of_that(
    installation: environment.Installation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(_: attempt.Attempt) -> None:
        raise errors.Cancelled("before it began")

    monkeypatch.setattr(attempt.Attempt, "_may_start", cancelled)
    async with (
        service_bench.running(installation, tmp_path, monkeypatch, BACKENDS),
        client.Client(installation.broker_url, namespace=installation.namespace) as volumes,
    ):
        new = {"volume": {"name": "v", "size_bytes": 1024}}
        with pytest.raises(errors.Cancelled):
            await volumes.call("create_volume", ADDRESS, new)
        assert await installation.rows("SELECT FROM volumes") == []


async def test_a_create_that_is_cancelled_before_it_began_deletes_nobodys_data(
    installation: environment.Installation, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the storage under the id that was asked for is not the job's."""

    def cancelled(_: attempt.Attempt) -> None:
        raise errors.Cancelled("before it began")

    monkeypatch.setattr(attempt.Attempt, "_may_start", cancelled)
    folder = tmp_path / "volumes"
    file = {"fast": {"driver": "file", "target": "fake", "directory": str(folder)}}
    async with (
        service_bench.running(installation, tmp_path, monkeypatch, file),
        client.Client(installation.broker_url, namespace=installation.namespace) as volumes,
    ):
        identity = uuid.uuid4()
        strangers = folder / f"volume-{identity}"
        strangers.write_bytes(b"data" * 256)
        new = {"volume": {"id": str(identity), "name": "v", "size_bytes": 1024}}
        with pytest.raises(errors.Cancelled):
            await volumes.call("create_volume", ADDRESS, new)
        assert strangers.read_bytes() == b"data" * 256
