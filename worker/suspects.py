"""Which of many messages it is that the broker ends the connection over."""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

PROOF: Final = 3
"""How often in a row the connection must be lost with one message alone for that to be why."""

T = TypeVar("T")


class Suspects(Generic[T]):
    """What the connection was lost with, to be sent again in halves, then one by one.

    A broker that cannot make sense of a message ends the connection. Were all sent again together,
    that one would keep the others from arriving, for ever.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._at_once = 1
        self._losses = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Sequence[T]) -> None:
        """The connection was lost with these."""
        if not self._items:
            self._at_once = max(len(items) // 2, 1)
        self._items += items

    def part(self) -> Sequence[T]:
        """The first of them, as many as are to be sent together now."""
        return self._items[: self._at_once]

    def sort_out(self, part: Sequence[T], left: Sequence[T], *, is_lost: bool) -> T | None:
        """Of a part that was sent, ``left`` has not arrived; the culprit, once it is known.

        With no connection there (``is_lost`` is false, and all are left) nothing has been learnt.
        """
        self._items[: len(part)] = left
        if not is_lost:
            if len(left) < len(part):
                self._losses = 0
                self._at_once *= 2
            return None
        self._at_once = max(len(left) // 2, 1)
        self._losses = self._losses + 1 if len(part) == 1 else 0
        if self._losses < PROOF:
            return None
        self._losses = 0
        return self._items.pop(0)
