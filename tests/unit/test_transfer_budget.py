"""What copies get of what their backend's copies may move together."""

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.transfer import budget


def _divided(limit: int | None, wanted: Sequence[int | None]) -> list[int | None]:
    """What copies get that want so much each, at the same time."""
    whole = budget.Budget(limit)
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(whole.share(most)) for most in wanted]
        return [share.rate.bytes_per_second for share in shares]


@pytest.mark.parametrize(
    ("limit", "wanted", "parts"),
    [
        (None, [None, 5], [None, 5]),
        (90, [None], [90]),
        (90, [None, None, None], [30, 30, 30]),
        (90, [10, None, None], [10, 40, 40]),
        (90, [None, 20, 10], [60, 20, 10]),
        (90, [100, 100], [45, 45]),
        (1, [None, None], [1, 1]),
    ],
)
def test_what_is_left_by_those_that_want_less_goes_to_the_others(
    limit: int | None, wanted: list[int | None], parts: list[int | None]
) -> None:
    assert _divided(limit, wanted) == parts


@given(
    limit=st.integers(1_000, 10**9),
    wanted=st.lists(st.none() | st.integers(1, 10**9), min_size=1, max_size=20),
)
def test_nobody_gets_more_than_its_part_and_none_is_wasted(
    limit: int, wanted: list[int | None]
) -> None:
    parts = [part for part in _divided(limit, wanted) if part is not None]
    assert len(parts) == len(wanted)
    assert sum(parts) <= limit
    assert all(most is None or part <= most for part, most in zip(parts, wanted, strict=True))
    # Who gets less than it wants gets as much as anybody.
    hungry = [p for p, most in zip(parts, wanted, strict=True) if most is None or p < most]
    assert all(part >= max(parts) - len(parts) for part in hungry)
    assert not hungry or sum(parts) >= limit - len(parts)


def test_a_copy_that_comes_or_goes_changes_what_the_others_get() -> None:
    whole = budget.Budget(100)
    with whole.share(None) as first:
        assert first.rate.bytes_per_second == 100
        with whole.share(None) as second:
            assert first.rate.bytes_per_second == second.rate.bytes_per_second == 50
            second.ask_for(10)
            assert (first.rate.bytes_per_second, second.rate.bytes_per_second) == (90, 10)
            second.ask_for(None)
            assert first.rate.bytes_per_second == 50
        assert first.rate.bytes_per_second == 100
