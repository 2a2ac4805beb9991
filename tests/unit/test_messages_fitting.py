"""What is too large for the broker, and what is sent of it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from messages import fitting

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=8)
    ),
    max_leaves=60,
)


def cut(result: dict[str, Any], most: int) -> dict[str, Any]:
    body = {"job_id": "j", "ok": True, "result": result}
    data = fitting.encode(body, within="result", most=most)
    read: dict[str, Any] = json.loads(data)
    assert read["job_id"] == "j"
    found: dict[str, Any] = read["result"]
    return found


def test_what_fits_is_sent_as_it_is() -> None:
    assert cut({"a": [1, 2, 3]}, 1000) == {"a": [1, 2, 3]}


def test_a_long_list_keeps_its_beginning_and_the_small_members_beside_it() -> None:
    found = cut({"many": list(range(100_000)), "id": "v", "size_bytes": 5}, 2000)
    assert found["truncated"] is True
    assert (found["id"], found["size_bytes"]) == ("v", 5)
    assert found["many"] == list(range(len(found["many"])))
    assert len(found["many"]) > 100


def test_a_long_text_keeps_its_beginning() -> None:
    found = cut({"stderr": "x" * 100_000, "code": 1}, 2000)
    assert found["truncated"] is True
    assert found["code"] == 1
    assert set(found["stderr"]) == {"x"}


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=8))
def test_whatever_is_cut_has_the_members_of_the_whole(result: dict[str, Any]) -> None:
    most = 400
    body = {"result": result}
    found = json.loads(fitting.encode(body, within="result", most=most))["result"]
    if len(json.dumps(body).encode()) <= most:
        assert found == result
    else:
        assert found == {**found, "truncated": True}
        assert set(result) - {"truncated"} <= set(found)


@given(st.integers(1000, 3000), st.lists(st.text(max_size=30), max_size=20))
def test_what_was_cut_is_not_larger_than_allowed(most: int, texts: list[str]) -> None:
    body = {"ok": True, "result": {"texts": texts * 20, "more": {"again": texts * 10}}}
    assert len(fitting.encode(body, within="result", most=most)) <= max(most, 1000)
