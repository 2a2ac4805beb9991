"""``blake2b-4m``: a digest that can be made of many pieces at once and need not read holes.

It is the blake2b-256 over the concatenated blake2b-256 digests of each piece of 4 MiB, the last of
which may be shorter; written ``blake2b-4m:HEX``.
"""

import functools
import hashlib
import pathlib
import threading
from typing import Final

from worker.transfer import crew, endpoint, extents, file, zeros

THREADS: Final = 4
"""hashlib lets go of the interpreter while it hashes."""
_SIZE: Final = 32
_MARK: Final = 8
_CHUNK: Final = 512 * 1024


class PieceHash:
    """The digest of one piece, fed in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_SIZE)
        self._is_fresh = True

    def data(self, view: memoryview) -> None:
        self._hash.update(view)
        self._is_fresh = False

    def zeros(self, length: int) -> None:
        if self._is_fresh:
            # What a piece begins with need not be hashed each time if it is zeros.
            known = length // zeros.GRAIN
            self._hash = _after_zeros(known).copy()
            length -= known * zeros.GRAIN
            self._is_fresh = False
        for at in range(0, length, len(zeros.BLANK)):
            self._hash.update(zeros.blank(min(len(zeros.BLANK), length - at)))

    def digest(self) -> bytes:
        return self._hash.digest()


@functools.cache
def zero_piece() -> bytes:
    """The digest of a full piece of zeros."""
    return _after_zeros(extents.PIECE // zeros.GRAIN).digest()


@functools.cache
def _after_zeros(grains: int) -> "hashlib.blake2b":
    """The state of a hash that has had so many blocks of zeros; not to be fed itself."""
    state = _after_zeros(grains - 1).copy() if grains else hashlib.blake2b(digest_size=_SIZE)
    state.update(zeros.blank(zeros.GRAIN if grains else 0))
    return state


class Tree:
    """The whole digest, from pieces that come in any order, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hash = hashlib.blake2b(digest_size=_SIZE)
        self._next = 0
        self._early: dict[int, tuple[bytes, int]] = {}

    def put(self, offset: int, digest: bytes, count: int = 1) -> None:
        """Takes the digest of the piece at an offset, or of ``count`` equal ones from there on."""
        with self._lock:
            self._early[offset // extents.PIECE] = (digest, count)
            while self._next in self._early:
                digest, count = self._early.pop(self._next)
                self._next += count
                for _ in range(count):
                    self._hash.update(digest)

    def text(self) -> str:
        """``blake2b-4m:HEX``, once every piece has come."""
        assert not self._early, "a piece is missing"
        return f"blake2b-4m:{self._hash.hexdigest()}"


class Record(Tree):
    """A digest that also remembers where each piece's began: enough to tell where another differs.

    It takes 8 bytes for 4 MiB, 2 MiB for each TiB.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._marks = bytearray(-(-size // extents.PIECE) * _MARK)

    def put(self, offset: int, digest: bytes, count: int = 1) -> None:
        super().put(offset, digest, count)
        at = offset // extents.PIECE * _MARK
        self._marks[at : at + count * _MARK] = digest[:_MARK] * count

    def matches(self, offset: int, digest: bytes, count: int = 1) -> bool:
        """Whether the pieces from an offset on had this digest."""
        at = offset // extents.PIECE * _MARK
        return self._marks[at : at + count * _MARK] == digest[:_MARK] * count


def digest_path(path: pathlib.Path) -> str:
    """The digest of a file or block device.

    Raises:
        DeviceUnavailable: it is not there or cannot be read.
    """
    opened = file.File(path, writable=False, may_be_empty=True)
    try:
        return digest_endpoint(opened, opened.size)
    finally:
        opened.close()


def digest_endpoint(origin: endpoint.Endpoint, size: int) -> str:
    """The digest of an endpoint's first ``size`` bytes.

    Raises:
        DeviceUnavailable: it cannot be read.
    """
    tree = Tree()
    crew.run(
        extents.read_pieces(None, origin, size), lambda: _Reader(origin, tree), threads=THREADS
    )
    return tree.text()


class _Reader:
    def __init__(self, origin: endpoint.Endpoint, tree: Tree) -> None:
        self._origin = origin
        self._tree = tree
        self._buffer = memoryview(bytearray(_CHUNK))

    def __call__(self, piece: extents.Piece) -> None:
        if extents.is_blank(piece):
            self._tree.put(piece.offset, zero_piece(), piece.length // extents.PIECE)
            return
        hashed = PieceHash()
        for span in piece.spans:
            if span.destination_zero:
                hashed.zeros(span.length)
                continue
            for at in range(span.offset, span.offset + span.length, _CHUNK):
                view = self._buffer[: min(_CHUNK, span.offset + span.length - at)]
                self._origin.read_into(at, view)
                hashed.data(view)
        self._tree.put(piece.offset, hashed.digest())
