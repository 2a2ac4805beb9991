"""What the copier reads from and writes to: a file, a block device or an NBD export.

Offsets and lengths are bytes. An endpoint may be used by several threads at once, as long as no two
of them work on the same piece (:data:`worker.transfer.extents.PIECE`).
"""

from typing import NamedTuple, Protocol


class Extent(NamedTuple):
    """A run of bytes: zeros, as the endpoint knows without reading them, or data."""

    offset: int
    length: int
    zero: bool

    @property
    def end(self) -> int:
        return self.offset + self.length


class Endpoint(Protocol):
    """Random access to a fixed number of bytes.

    Every method raises ``DeviceUnavailable`` where the device cannot be reached, read or written,
    and the writing ones ``InsufficientSpace`` where it is full.
    """

    name: str
    """For messages."""
    size: int
    identity: object
    """Equal for two openings of one thing, as far as that can be told."""

    def extents(self, offset: int, length: int) -> list[Extent]:
        """What is known of a range, in order, from its start; it may end early, but is never empty.

        Data where nothing is known. Only what certainly reads as zeros is zero.
        """
        ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills the whole view."""
        ...

    def write(self, offset: int, view: memoryview) -> None:
        """Writes the whole view."""
        ...

    def zero(self, offset: int, length: int) -> None:
        """Makes a range read as zeros, whatever it held, and frees its space where it can."""
        ...

    def flush(self) -> None:
        """Returns when all that was written is on stable storage."""
        ...

    def drop_cache(self) -> None:
        """Has the next reads come from the storage, not from memory, where it can be asked for."""
        ...

    def close(self) -> None:
        """Ends the use of it. Never raises."""
        ...
