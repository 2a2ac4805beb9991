"""Whether a copy's source counts as one that changes."""

import types
import uuid
from typing import Any, cast

import pytest

from messages import errors
from messages.resources import AccessMode, VolumeStatus
from worker.operations import copies
from worker.store import connections, volumes
from worker.transfer import copying

JOB = uuid.uuid4()
DESTINATION = uuid.uuid4()
MARK = 4 * 1024 * 1024


class Site:
    """A source, who is connected to it, and what becomes of each copy."""

    def __init__(self) -> None:
        self.status = VolumeStatus.AVAILABLE
        self.seq = 7
        self.connected: list[tuple[AccessMode, str]] = []
        self.outcomes: list[errors.VolumeWorkerError | None] = []
        self.copies: list[bool] = []
        self.resumed_from: list[int] = []
        self.writers = 3
        self.checkpoint: dict[str, Any] | None = None
        self.source = types.SimpleNamespace(id=uuid.uuid4(), size_bytes=1)
        self.comes_meanwhile = False

    async def get(self, *_: object) -> object:
        return types.SimpleNamespace(seq=self.seq, status=self.status, attachments=[])

    async def of_volume(self, *_: object) -> list[object]:
        return [
            types.SimpleNamespace(access_mode=mode, connector={"connection_key": key})
            for mode, key in self.connected
        ]

    async def count_writers(self, *_: object) -> int:
        return self.writers

    async def keep_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint

    async def copy(
        self,
        *_: object,
        source_changes: bool,
        resume_from: int,
        on_mark: copying.OnMark,
        **__: object,
    ) -> str:
        self.copies.append(source_changes)
        self.resumed_from.append(resume_from)
        await on_mark(MARK)
        self.seq += self.comes_meanwhile
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return "copied"

    async def move(self) -> object:
        args = types.SimpleNamespace(
            verify=True, bytes_per_second=None, destination_volume_id=DESTINATION
        )
        context = types.SimpleNamespace(
            store=None,
            args=args,
            job=types.SimpleNamespace(id=JOB, checkpoint=self.checkpoint),
            connectors=types.SimpleNamespace(execute=None),
            keep_checkpoint=self.keep_checkpoint,
            on_child=None,
            lease=30.0,
        )
        unused = cast("Any", None)
        return await copies._move(
            cast("Any", context), cast("Any", self.source), unused, unused, copying.Rate()
        )


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site()
    monkeypatch.setattr(volumes, "get", made.get)
    monkeypatch.setattr(connections, "of_volume", made.of_volume)
    monkeypatch.setattr(connections, "count_writers", made.count_writers)
    monkeypatch.setattr(copying, "copy", made.copy)
    return made


def mismatch() -> errors.DeviceUnavailable:
    return errors.DeviceUnavailable("other data", reason="verify_mismatch")


@pytest.mark.parametrize(
    ("status", "connected", "changes"),
    [
        ("available", [], False),
        ("available", [("ro", "other"), ("rw", str(JOB))], False),
        ("available", [("rw", "other")], True),
        ("in-use", [], True),
    ],
)
async def test_a_source_that_somebody_may_write_to_changes(
    site: Site, status: str, connected: list[tuple[str, str]], changes: bool
) -> None:
    site.status = VolumeStatus(status)
    site.connected = [(AccessMode(mode), key) for mode, key in connected]
    assert await site.move() == "copied"
    assert site.copies == [changes]


async def test_a_mismatch_means_nothing_where_somebody_has_come_meanwhile(site: Site) -> None:
    site.outcomes = [mismatch()]
    site.comes_meanwhile = True
    assert await site.move() == "copied"
    assert site.copies == [False, True]


@pytest.mark.parametrize("error", [mismatch(), errors.DeviceUnavailable("it is gone")])
async def test_a_failure_is_one_where_nobody_has_come(
    site: Site, error: errors.VolumeWorkerError
) -> None:
    site.outcomes = [error]
    with pytest.raises(errors.DeviceUnavailable):
        await site.move()
    assert site.copies == [False]


async def test_a_mismatch_of_what_was_sent_is_one(site: Site) -> None:
    site.outcomes = [mismatch(), mismatch()]
    site.comes_meanwhile = True
    with pytest.raises(errors.DeviceUnavailable):
        await site.move()
    assert site.copies == [False, True]


# Going on from where an earlier attempt came


async def test_the_next_attempt_goes_on_from_the_checkpoint(site: Site) -> None:
    site.outcomes = [errors.DeviceUnavailable("cut")]
    with pytest.raises(errors.DeviceUnavailable):
        await site.move()
    assert await site.move() == "copied"
    assert site.resumed_from == [0, MARK]


async def test_nothing_is_taken_for_done_once_somebody_could_have_written(site: Site) -> None:
    await site.move()
    site.writers += 1
    await site.move()
    assert site.resumed_from == [0, 0]


async def test_a_source_that_is_written_to_now_is_copied_from_its_start(site: Site) -> None:
    await site.move()
    site.connected = [(AccessMode.READ_WRITE, "other")]
    await site.move()
    assert site.resumed_from == [0, 0]
    assert site.copies == [False, True]


async def test_a_volume_that_has_another_size_now_is_copied_from_its_start(site: Site) -> None:
    await site.move()
    site.source.size_bytes += 1
    await site.move()
    assert site.resumed_from == [0, 0]


async def test_what_was_resumed_and_differs_is_copied_from_its_start(site: Site) -> None:
    await site.move()
    site.outcomes = [mismatch()]
    assert await site.move() == "copied"
    assert site.resumed_from == [0, MARK, 0]
    assert site.copies == [False, False, False]
