"""The count of what was promised: takers see each other, and nobody sees one who is refused."""

import pytest

from messages import errors
from worker.drivers import capacity

SPACE = capacity.Space(total=100, free=100)


def test_one_who_is_refused_does_not_take_the_room_of_another() -> None:
    ledger = capacity.Ledger(1.0, 0)
    with ledger.taking(1000) as large, ledger.taking(100) as small:
        with pytest.raises(errors.InsufficientSpace):
            ledger.check(SPACE, large)
        ledger.check(SPACE, small)
        small.kept = True
    assert (ledger.provisioned, ledger.volumes) == (100, 1)


def test_two_takers_see_each_other_and_what_is_not_kept_is_given_back() -> None:
    ledger = capacity.Ledger(1.0, 0)
    with ledger.taking(60) as first, ledger.taking(60) as second:
        ledger.check(SPACE, first)
        with pytest.raises(errors.InsufficientSpace):
            ledger.check(SPACE, second)
    assert ledger.provisioned == 0
