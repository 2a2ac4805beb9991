"""What was typed becomes the arguments of a request."""

from typing import Any

import pytest
import typer

from worker.cli import arguments


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {}),
        (["name=v"], {"name": "v"}),
        (["name="], {"name": ""}),
        (["name=a=b"], {"name": "a=b"}),
        (["count=3"], {"count": 3}),
        (["flag=true", "nothing=null"], {"flag": True, "nothing": None}),
        (['text="3"'], {"text": "3"}),
        (["list=[1, 2]"], {"list": [1, 2]}),
        (["number=NaN"], {"number": "NaN"}),
        (["number=-Infinity"], {"number": "-Infinity"}),
        (
            ["volume.name=v", "volume.size_bytes=1GiB"],
            {"volume": {"name": "v", "size_bytes": 2**30}},
        ),
        (
            ['volume={"name": "v"}', "volume.size_bytes=1"],
            {"volume": {"name": "v", "size_bytes": 1}},
        ),
        (["a.b.c=1", "a.b.d=2"], {"a": {"b": {"c": 1, "d": 2}}}),
    ],
)
def test_pairs_become_members(pairs: list[str], expected: dict[str, Any]) -> None:
    assert arguments.parse(pairs, None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 2**30),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("10 KiB", 10240),
        ("2PiB", 2**51),
        ("1GB", 10**9),
        ("7B", 7),
        ("null", None),
    ],
)
def test_keys_of_bytes_take_sizes(text: str, expected: int | None) -> None:
    assert arguments.parse([f"size_bytes={text}"], None) == {"size_bytes": expected}


def test_rates_take_sizes_too() -> None:
    assert arguments.parse(["bytes_per_second=16MiB"], None) == {"bytes_per_second": 2**24}


def test_other_keys_keep_what_looks_like_a_size() -> None:
    assert arguments.parse(["name=1GiB"], None) == {"name": "1GiB"}


def test_pairs_win_over_the_object() -> None:
    given = arguments.parse(["volume.name=new"], '{"volume": {"name": "old", "size_bytes": 1}}')
    assert given == {"volume": {"name": "new", "size_bytes": 1}}


@pytest.mark.parametrize(
    ("pairs", "as_json", "words"),
    [
        (["volume"], None, "KEY=VALUE"),
        (["=v"], None, "KEY=VALUE"),
        (["a..b=v"], None, "KEY=VALUE"),
        ([".a=v"], None, "KEY=VALUE"),
        (["a=1", "a=2"], None, "twice"),
        (["a=1", "a.b=2"], None, "as a value and as an object"),
        (["size_bytes=1 elephant"], None, "no size"),
        (["size_bytes=1.3B"], None, "whole"),
        ([], "{", "not JSON"),
        ([], '{"a": NaN}', "not JSON"),
        ([], "[1]", "object"),
        ([], "[" * 100_000, "nested"),
        (["a\x1b[31m"], None, r"\\x1b"),
    ],
)
def test_what_cannot_be_read_is_wrong_usage(
    pairs: list[str], as_json: str | None, words: str
) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        arguments.parse(pairs, as_json)
