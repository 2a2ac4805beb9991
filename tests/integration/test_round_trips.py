"""How often a request costs a way to the database and back."""

import asyncio
import pathlib

import pytest

from messages import client
from tests.integration import service_bench
from tests.services import environment

CALLS = 64
ADDRESS = "host-a@fast"


async def test_a_create_costs_three_round_trips_to_the_database_at_most(
    installation: environment.Installation,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = {"fast": {"driver": "fake_iscsi"}}
    async with (
        service_bench.running(
            installation, tmp_path, monkeypatch, backends, control_slots=CALLS
        ) as service,
        client.Client(installation.broker_url, namespace=installation.namespace) as volumes,
    ):

        async def create(number: int) -> None:
            new = {"name": f"v{number}", "size_bytes": 1024}
            volume = await volumes.call("create_volume", ADDRESS, {"volume": new})
            assert volume["status"] == "available"

        await create(0)  # connections are made, statements prepared
        before = service.store.statements
        await asyncio.gather(*(create(number) for number in range(CALLS)))
        async with asyncio.timeout(10):
            while await installation.rows("SELECT FROM outbox"):
                await asyncio.sleep(0.05)
        each = (service.store.statements - before) / CALLS
        assert each <= 3
