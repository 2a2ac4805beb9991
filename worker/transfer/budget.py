"""How fast the copies of a backend may go together, and what each of them gets of it."""

import contextlib
from collections.abc import Iterator

from worker.transfer import copying


class Share:
    """One copy's part: what :attr:`rate` says now."""

    def __init__(self, budget: "Budget", most: int | None) -> None:
        self.rate = copying.Rate()
        self.most = most
        self._budget = budget

    def ask_for(self, most: int | None) -> None:
        """Changes the most that it may have, in bytes a second; None for as much as there is."""
        self.most = most
        self._budget.divide()


class Budget:
    """So many bytes a second, or any number, in fair shares.

    A copy that may not use all of its share leaves the rest to the others (max-min fairness).
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._limit = bytes_per_second
        self._shares: list[Share] = []

    @contextlib.contextmanager
    def share(self, most: int | None) -> Iterator[Share]:
        """A share for the time of the block."""
        share = Share(self, most)
        self._shares.append(share)
        self.divide()
        try:
            yield share
        finally:
            self._shares.remove(share)
            self.divide()

    def divide(self) -> None:
        """Gives each what is its part now."""
        if self._limit is None:
            for share in self._shares:
                _give(share, share.most)
            return
        # Those that want least come first, so that what they leave is known to the others.
        left, modest_first = self._limit, sorted(self._shares, key=_most)
        for position, share in enumerate(modest_first):
            fair = max(left // (len(modest_first) - position), 1)
            part = fair if share.most is None else min(share.most, fair)
            left -= part
            _give(share, part)


def _most(share: Share) -> float:
    return float("inf") if share.most is None else share.most


def _give(share: Share, part: int | None) -> None:
    if share.rate.bytes_per_second != part:
        share.rate.set(part)
