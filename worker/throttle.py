"""How fast one job may go: as its request says, until somebody says otherwise."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Throttle:
    """What was said of a job after it was sent.

    Args:
        said: ``bytes_per_second``, None for as fast as it goes; None where nothing was said.
    """

    def __init__(self, said: Mapping[str, Any] | None) -> None:
        self._said = said
        self._heed: Callable[[], None] | None = None

    def limit(self, asked: int | None) -> int | None:
        """Bytes a second, where the request ``asked`` for so many; None for any number."""
        if self._said is None:
            return asked
        limit: int | None = self._said["bytes_per_second"]
        return limit

    def say(self, said: Mapping[str, Any]) -> None:
        """Somebody has said it, perhaps once more."""
        if said != self._said:
            self._said = said
            if self._heed is not None:
                self._heed()

    @contextlib.contextmanager
    def heeded_by(self, heed: Callable[[], None]) -> Iterator[None]:
        """Calls ``heed`` when something else is said, for the time of the block."""
        self._heed = heed
        try:
            yield
        finally:
            self._heed = None
