"""The blake2b-4m digest against a naive one."""

import hashlib
import os
import pathlib
import random

import pytest

from messages import errors
from worker.transfer import digest, extents

MIB = 1024 * 1024


def naive(data: bytes) -> str:
    outer = hashlib.blake2b(digest_size=32)
    for at in range(0, len(data), 4 * MIB):
        outer.update(hashlib.blake2b(data[at : at + 4 * MIB], digest_size=32).digest())
    return f"blake2b-4m:{outer.hexdigest()}"


@pytest.mark.parametrize("size", [0, 1, 4095, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 13 * MIB + 513])
def test_a_file_has_the_digest_of_its_bytes(tmp_path: pathlib.Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "volume"
    path.write_bytes(data)
    assert digest.digest_path(path) == naive(data)


@pytest.mark.parametrize("island", [0, 5000, 4 * MIB, 9 * MIB + 77, 18 * MIB])
def test_holes_count_as_zeros(tmp_path: pathlib.Path, island: int) -> None:
    size = 20 * MIB + 4097
    path = tmp_path / "volume"
    with path.open("wb") as volume:
        volume.truncate(size)
        volume.seek(island)
        volume.write(b"data" * 1000)
    assert digest.digest_path(path) == naive(path.read_bytes())


def test_a_hole_of_any_size_is_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "volume"
    with path.open("wb") as volume:
        volume.truncate(64 * 1024 * MIB)
    zero = hashlib.blake2b(bytes(4 * MIB), digest_size=32).digest()
    expected = hashlib.blake2b(zero * (16 * 1024), digest_size=32).hexdigest()
    assert digest.digest_path(path) == f"blake2b-4m:{expected}"


def test_pieces_may_come_in_any_order() -> None:
    values = [os.urandom(32) for _ in range(5)]
    places = [0, 1, 2, 5, 6]
    counts = [1, 1, 3, 1, 1]
    tree = digest.Tree()
    for value, place, count in random.sample(
        list(zip(values, places, counts, strict=True)), len(values)
    ):
        tree.put(place * extents.PIECE, value, count)
    joined = b"".join(v * c for v, c in zip(values, counts, strict=True))
    expected = hashlib.blake2b(joined, digest_size=32).hexdigest()
    assert tree.text() == f"blake2b-4m:{expected}"


def test_a_record_knows_its_own_pieces_from_others() -> None:
    record = digest.Record(3 * extents.PIECE + 1)
    record.put(0, b"a" * 32, 3)
    record.put(3 * extents.PIECE, b"b" * 32)
    assert record.matches(extents.PIECE, b"a" * 32, 2)
    assert not record.matches(extents.PIECE, b"a" * 32, 3)
    assert not record.matches(3 * extents.PIECE, b"a" * 32)


def test_what_is_not_there_has_no_digest(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.DeviceUnavailable, match="No such file"):
        digest.digest_path(tmp_path / "nothing")
    assert not list(tmp_path.iterdir())
