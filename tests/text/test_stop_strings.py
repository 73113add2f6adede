"""Stop strings: the result depends only on the text, and text is held back only as long as needed."""

from __future__ import annotations

import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.text.stop_strings import StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=5)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reference: the earliest match, then the order of the list."""
    found = [(text.index(stop), place, stop) for place, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at] + (stop if include else ""), stop


def pushed(stops: StopStrings, pieces: list[str]) -> str:
    return "".join([stops.push(piece) for piece in pieces] + [stops.flush()])


@settings(max_examples=examples(150))
@given(pieces=st.lists(st.text("abc\n", max_size=5), max_size=12), stops=STOPS, include=st.booleans())
def test_result_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    watch = StopStrings(stops, include=include)
    text = pushed(watch, pieces)
    assert (text, watch.matched) == expected("".join(pieces), stops, include)


@settings(max_examples=examples(120))
@given(text=st.text("abc\n", max_size=30), stops=STOPS)
def test_text_is_released_as_early_as_possible(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = ""
    for place, char in enumerate(text, 1):
        shown += watch.push(char)
        if watch.matched is not None:
            return
        held = text[len(shown) : place]
        assert text[:place] == shown + held
        assert not held or any(stop.startswith(held) or held.startswith(stop) for stop in stops)


def test_stop_string_across_pieces() -> None:
    watch = StopStrings(["</end>"])
    assert [watch.push(piece) for piece in ("Hi <", "b> <", "/e", "nd", "> more")] == ["Hi ", "<b> ", "", "", ""]
    assert watch.matched == "</end>"
    assert watch.push("anything") == ""
    assert watch.flush() == ""


def test_partial_match_that_fails_is_released() -> None:
    watch = StopStrings(["\n\nUser:"])
    assert watch.push("a\n") == "a"
    assert watch.push("\nUs") == ""
    assert watch.push("a") == "\n\nUsa"
    assert watch.matched is None


def test_held_text_is_flushed_at_the_end() -> None:
    watch = StopStrings(["abc"])
    assert watch.push("xab") == "x"
    assert watch.flush() == "ab"
    assert watch.matched is None
    assert watch.flush() == ""


def test_including_the_stop_string() -> None:
    watch = StopStrings(["STOP"], include=True)
    assert watch.push("go ST") == "go "
    assert watch.push("OP now") == "STOP"
    assert watch.matched == "STOP"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["world", "lo w"], "hello world", "hel", "lo w"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abc", "ab"], "xabc", "x", "abc"),
        (["abc", "ab"], "xabd", "x", "ab"),
        (["abc", "ab"], "xab", "x", "ab"),
        (["abcdef", "cd"], "abcdx", "ab", "cd"),
        (["a"], "", "", None),
        (["", "b"], "abc", "a", "b"),
        (["[", "]", "^", "-", "\\"], "x-y", "x", "-"),
        (["é👍"], "xé👍y", "x", "é👍"),
    ],
)
def test_precedence_of_stop_strings(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    watch = StopStrings(stops)
    assert pushed(watch, list(text)) == shown
    assert watch.matched == matched


def test_many_and_long_stop_strings() -> None:
    stops = ["a" * 1023 + chr(200 + place) for place in range(64)]
    watch = StopStrings(stops)
    text = ("a" * 900 + "b") * 20 + stops[5] + "tail"
    shown = "".join(watch.push(text[place : place + 7]) for place in range(0, len(text), 7))
    assert watch.matched == stops[5]
    assert shown == ("a" * 900 + "b") * 20
