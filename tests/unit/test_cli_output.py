"""Nothing that comes from outside can play with the terminal."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from worker.cli import output, progress

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b1m\r\nb\x7f\u202ec\u2028d"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@hypothesis.given(st.text())
def test_plain_text_is_one_printable_line(text: str) -> None:
    shown = output.plain(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


@hypothesis.given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_json_says_the_same_without_unprintable_characters(data: object) -> None:
    text = output.to_json(data)
    assert is_harmless(text)
    assert json.loads(text) == data


def test_escapes_can_be_told_apart() -> None:
    assert output.plain(HOSTILE) == (r"a\x1b]0;title\x07\x1b[2J\x9b1m\r\nb\x7f\u202ec\u2028d")
    assert json.loads(output.to_json(HOSTILE)) == HOSTILE


def test_markup_and_emoji_names_stay_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name",), [[output.cell("[red]x[/red] :smile: [link=file:///]")]])
    assert "[red]x[/red] :smile: [link=file:///]" in capsys.readouterr().out


def test_records_show_everything_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_record([("name", HOSTILE), ("inner", {HOSTILE: [HOSTILE]}), ("none", None)])
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert r"\x1b]0;title" in shown


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**63, "8192.0 PiB")],
)
def test_sizes_are_for_people(count: int | None, expected: str) -> None:
    assert output.size(count) == expected


def test_progress_tells_rate_and_time_left() -> None:
    shown = progress.amounts(
        {"done_bytes": 2**30, "total_bytes": 3 * 2**30, "bytes_per_second": 2**24}
    )
    assert shown == "1.0 GiB of 3.0 GiB  16.0 MiB/s  2:08 left"


@pytest.mark.parametrize("odd", [{}, {"done_bytes": "x"}, {"total_bytes": None}])
def test_progress_of_another_version_breaks_nothing(odd: dict[str, object]) -> None:
    assert progress.amounts(odd) == "0 B of 0 B"


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+23:00", "x"])
def test_a_time_that_no_calendar_has_is_shown_as_it_came(text: str) -> None:
    assert output.moment(text) == text
    assert output.moment("2026-03-01T12:30:00+01:00") == "2026-03-01 11:30:00Z"
