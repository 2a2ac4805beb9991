"""Header tables that are nested deeper than anybody could read them."""

import types
from typing import Any

import pytest

from messages import envelope, letters


def nested(depth: int) -> dict[str, Any]:
    """A table with ``depth`` tables within."""
    table: dict[str, Any] = {"end": 1}
    for _ in range(depth):
        table = {"deeper": [table]}
    return table


@pytest.mark.parametrize("depth", [letters.MAX_DEPTH, 400, 100_000])
def test_headers_that_are_nested_too_deep_are_malformed_and_left_out(depth: int) -> None:
    headers = nested(depth)
    with pytest.raises(envelope.Malformed, match="too deep"):
        envelope.read_properties(None, None, None, headers)
    message: Any = types.SimpleNamespace(**dict.fromkeys(letters._PLAIN), headers=headers)
    kept = letters.keep_properties(message)
    assert letters.restore(b"", kept, {"reason": "x"}).headers == {"reason": "x"}


def test_headers_as_anybody_sends_them_are_not_too_deep() -> None:
    assert not letters.is_too_deep(nested(letters.MAX_DEPTH // 2 - 1))
    assert not letters.is_too_deep({"a": "text", "b": [1, {"c": b"x"}]})
