"""Whether a volume fits: Cinder's rule, and the count of what was promised."""

import contextlib
import dataclasses
import math
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence

from messages import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """A file system's space, in bytes."""

    total: int
    free: int


def space(directory: pathlib.Path | int) -> Space:
    """The space of the file system that a directory, or its handle, is on.

    As an ordinary user has it.
    """
    found = os.statvfs(directory)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


@dataclasses.dataclass(slots=True)
class Taken:
    """Bytes for something that is being made; given back unless ``kept``."""

    amount: int
    is_counted: bool = False
    kept: bool = False


class Ledger:
    """What the volumes of a thin backend may grow to, counted as they come and go.

    Args:
        ratio: ``max_over_subscription_ratio``.
        reserved_percentage: of the total, that no volume gets.
    """

    def __init__(self, ratio: float, reserved_percentage: int) -> None:
        self._ratio = ratio
        self._reserved_percentage = reserved_percentage
        self._counted = 0
        self._in_the_making = 0
        self._checking = threading.Lock()
        self.volumes = 0

    @property
    def provisioned(self) -> int:
        """Bytes promised, with those that are being taken."""
        return self._counted + self._in_the_making

    def set(self, sizes: Sequence[int]) -> None:
        """Begins anew with what was found."""
        self._counted = sum(sizes)
        self.volumes = len(sizes)

    @contextlib.contextmanager
    def taking(self, amount: int, *, volumes: int = 1) -> Iterator[Taken]:
        """For something of ``amount`` bytes to be made, which :meth:`check` counts beforehand."""
        taken = Taken(amount)
        try:
            yield taken
        finally:
            if taken.is_counted:
                with self._checking:
                    self._in_the_making -= amount
            if taken.kept:
                self._counted += amount
                self.volumes += volumes

    def give_back(self, amount: int) -> None:
        """Counts a volume of ``amount`` bytes out."""
        self._counted = max(0, self._counted - amount)
        self.volumes = max(0, self.volumes - 1)

    def check(self, space: Space, taken: Taken) -> None:
        """Cinder's capacity filter for thin storage; counts what passes it.

        At once, so that two takers see each other, and nobody one who is refused.

        Raises:
            InsufficientSpace: more would be promised than ``max_over_subscription_ratio`` allows,
                or the free space less what is reserved cannot carry it.
        """
        with self._checking:
            self._check(space, taken.amount)
            self._in_the_making += taken.amount
            taken.is_counted = True

    def _check(self, space: Space, amount: int) -> None:
        promised = self.provisioned + amount
        if promised > space.total * self._ratio:
            raise errors.InsufficientSpace(
                f"{promised} bytes would be promised of {space.total}; allowed are"
                f" {self._ratio:g} times as many (max_over_subscription_ratio)"
            )
        reserved = math.floor(space.total * self._reserved_percentage / 100)
        usable = space.free - reserved
        if usable * self._ratio < amount:
            raise errors.InsufficientSpace(
                f"{amount} bytes do not fit: {space.free} are free, {reserved} of them reserved"
                f" (reserved_percentage), each promised {self._ratio:g} times at most"
            )
