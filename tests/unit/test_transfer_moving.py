"""Copying and reading back between endpoints in memory, some of which misbehave."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import errors
from worker.transfer import digest, endpoint, mover, pace, verifier

PIECE = 4 * 1024 * 1024
GRAIN = 64 * 1024
OLD = b"\xee"


class Memory:
    """An endpoint in memory whose zeros are told by blocks."""

    def __init__(self, content: bytes, *, tells: bool = True) -> None:
        self.name = "memory"
        self.identity: object = object()
        self.content = bytearray(content)
        self.size = len(content)
        self.tells = tells
        self.flushed = False
        self.zeroed = 0

    def extents(self, offset: int, length: int) -> list[endpoint.Extent]:
        if not self.tells:
            return [endpoint.Extent(offset, length, zero=False)]
        count = min(length, GRAIN - offset % GRAIN)
        start = offset // GRAIN * GRAIN
        return [endpoint.Extent(offset, count, not any(self.content[start : start + GRAIN]))]

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.content[offset : offset + len(view)]

    def write(self, offset: int, view: memoryview) -> None:
        self.flushed = False
        self.content[offset : offset + len(view)] = view

    def zero(self, offset: int, length: int) -> None:
        self.zeroed += length
        self.flushed = False
        self.content[offset : offset + length] = bytes(length)

    def flush(self) -> None:
        self.flushed = True

    def drop_cache(self) -> None: ...

    def close(self) -> None: ...


class Corrupting(Memory):
    """Changes one byte of what it stores."""

    def __init__(self, content: bytes, *, at: int) -> None:
        super().__init__(content)
        self.at = at

    def flush(self) -> None:
        self.content[self.at] ^= 1
        super().flush()


def copy(
    source: endpoint.Endpoint,
    destination: endpoint.Endpoint,
    size: int,
    *,
    source_changes: bool = False,
    before_verify: Callable[[], None] = lambda: None,
) -> tuple[pace.Meter, str]:
    meter = pace.Meter(size)
    sent = digest.Record(size) if source_changes else None
    mover.move(source, destination, size, sent=sent, throttle=pace.Throttle(None), meter=meter)
    before_verify()
    return meter, verifier.verify(source, destination, size, sent=sent, meter=meter)


def blocks(pattern: list[bool], tail: int) -> bytes:
    """Blocks of random data or zeros, and an odd tail."""
    rng = random.Random(repr(pattern))
    return b"".join(rng.randbytes(GRAIN) if data else bytes(GRAIN) for data in pattern) + (
        rng.randbytes(tail)
    )


@settings(deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=140),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_copy_equals_its_source(
    pattern: list[bool], tail: int, source_tells: bool, destination_tells: bool, changes: bool
) -> None:
    content = blocks(pattern, tail)
    source = Memory(content, tells=source_tells)
    destination = Memory(OLD * (len(content) + 700), tells=destination_tells)
    meter, text = copy(source, destination, len(content), source_changes=changes)
    assert destination.content == content + OLD * 700
    assert destination.flushed
    assert meter.copied + meter.zeroed == len(content)
    assert meter.copied == pattern.count(True) * GRAIN + tail
    other = Memory(content, tells=not source_tells)
    assert text == digest.digest_endpoint(other, len(content))


def test_zeros_that_the_destination_already_has_are_not_made_again() -> None:
    source = Memory(bytes(3 * PIECE))
    destination = Memory(bytes(3 * PIECE))
    meter, _ = copy(source, destination, 3 * PIECE)
    assert destination.zeroed == 0
    assert meter.zeroed == 3 * PIECE


@pytest.mark.parametrize("source_changes", [True, False])
@pytest.mark.parametrize("at", [0, PIECE + 5, 2 * PIECE + 99])
def test_a_destination_that_gives_back_other_data_is_found_out(
    at: int, source_changes: bool
) -> None:
    content = random.Random(1).randbytes(PIECE) + bytes(PIECE) + random.Random(2).randbytes(100)
    with pytest.raises(errors.DeviceUnavailable, match="other data") as caught:
        copy(
            Memory(content),
            Corrupting(OLD * len(content), at=at),
            len(content),
            source_changes=source_changes,
        )
    assert caught.value.details["offset"] == at // PIECE * PIECE


def test_a_source_that_changes_after_it_was_sent_is_no_fault_of_the_destination() -> None:
    content = random.Random(3).randbytes(PIECE + 10)
    source, destination = Memory(content), Memory(bytes(PIECE + 10))

    def change() -> None:
        source.content[5] ^= 1

    _, text = copy(source, destination, PIECE + 10, source_changes=True, before_verify=change)
    assert destination.content == content
    assert text == digest.digest_endpoint(Memory(content), PIECE + 10)
