"""The rounds of a supervisor: nothing ends them, and what is known of the target is told."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from messages import errors
from worker import gate, leftovers, supervisor
from worker.reconciliation import serving


class Target:
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.checked = 0

    async def check_health(self) -> bool:
        self.checked += 1
        if self.error is not None:
            raise self.error
        return True


class Reconciler:
    """Finds nothing."""

    async def round(self) -> None:
        return


class Backend:
    """As much of a backend as a supervisor's rounds touch."""

    address = "host-a@fast"

    def __init__(self) -> None:
        self.target = Target()
        self.target_error: errors.VolumeWorkerError | None = None
        self.changes = 0
        self.serving = gate.Gate()

    @property
    def up(self) -> bool:
        return self.target_error is None

    def note_target(self, error: errors.VolumeWorkerError | None) -> None:
        self.target_error = error


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """One for each sweep that was made; the last but one is what the next one raises."""
    made: list[Exception | None] = []

    async def sweep(_: leftovers.Sweeper) -> None:
        made.append(None)
        if len(made) == 1:
            raise RuntimeError("a fault in the sweep")

    monkeypatch.setattr(leftovers.Sweeper, "sweep", sweep)
    monkeypatch.setattr(supervisor, "HEALTH_INTERVAL", 0.001)
    return made


@contextlib.asynccontextmanager
async def rounds(looked_after: Backend) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Rounds while the block runs; what it is given waits for two more of them."""
    unused = cast("Any", None)
    made = supervisor.Supervisor(
        unused,
        cast("Any", looked_after),
        outbox=unused,
        accept=unused,
        stats_interval=60,
        on_standby=unused,
        reconciler=cast("Any", Reconciler()),
        reconcile_interval=60,
    )
    running = asyncio.create_task(made._look_after())

    async def two() -> None:
        wanted = looked_after.target.checked + 2
        async with asyncio.timeout(5):
            while looked_after.target.checked < wanted:
                await asyncio.sleep(0.001)
        assert not running.done()

    try:
        yield two
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_fault_ends_no_rounds(sweeps: list[Exception | None]) -> None:
    one = Backend()
    with capture_logs() as logs:
        async with rounds(one) as two_more:
            await two_more()
            await two_more()
            assert len(sweeps) > 1
            one.target.error = RuntimeError("a fault in a target")
            await two_more()
            assert isinstance(one.target_error, errors.Internal)
    events = [entry["event"] for entry in logs]
    assert "leftovers.sweep_failed" in events
    assert "backend.check_failed" in events


async def test_a_target_that_is_away_is_told_once_and_nothing_is_swept(
    sweeps: list[Exception | None],
) -> None:
    one = Backend()
    one.target.error = errors.TargetError("tgtd does not answer")
    with capture_logs() as logs:
        async with rounds(one) as two_more:
            await two_more()
            await two_more()
            assert one.target_error is one.target.error
            assert sweeps == []
            one.target.error = None
            await two_more()
            await two_more()
            assert one.up
            assert sweeps
    events = [entry["event"] for entry in logs]
    assert events.count("backend.target_away") == 1
    assert events.count("backend.target_back") == 1


async def test_a_database_that_is_away_says_nothing_of_the_target(
    sweeps: list[Exception | None],
) -> None:
    one = Backend()
    one.target.error = errors.Unreachable("the database does not answer")
    with capture_logs() as logs:
        async with rounds(one) as two_more:
            await two_more()
            assert one.up
    assert "backend.target_away" not in [entry["event"] for entry in logs]
    assert sweeps


async def test_a_volume_that_cannot_be_served_is_tried_again_and_logged_once(
    sweeps: list[Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    async def restore(*_: object) -> dict[uuid.UUID, errors.VolumeWorkerError]:
        tries.append(None)
        why = "No such file" if len(tries) < 6 else "Permission denied"
        return {uuid.UUID(int=1): errors.TargetError(why)}

    async def check_health() -> bool:
        one.target.checked += 1
        return False

    monkeypatch.setattr(serving, "restore", restore)
    one = Backend()
    one.target.check_health = check_health  # type: ignore[method-assign]
    with capture_logs() as logs:
        async with rounds(one) as two_more:
            while len(tries) < 10:
                await two_more()
    failed = [entry["error"] for entry in logs if entry["event"] == "backend.restore_failed"]
    assert failed == ["No such file", "Permission denied"]
    assert [entry["event"] for entry in logs].count("backend.restoring") == 1
