"""What stands where a prompt diverged from a cached one is named from the prompt's own text."""

from __future__ import annotations

import pytest

from millrace.serve.describe.cache_defeats import ADVICE, defeat_of

CASES = (
    ("time", "You are helpful. Today is 2026-11-", "18. Answer."),
    ("time", "The time is 14:", "07:33 now."),
    ("time", "Today is ", "Wednesday, and it rains."),
    ("time", "Created: Nov ", "18"),
    ("time", "now=17634", "90123 ok"),
    ("identifier", "session 3f2b8c1d-9a", "4e-4d1c-8f00-aabbccddeeff end"),
    ("identifier", "trace ab12cd34", "ef56ab78 end"),
    ("number", "You have ", "42 messages"),
    ("tools", '[{"type": "function", "name": "get_', 'weather", "parameters": {}}]'),
    (None, "Tell me about ", "water."),
)


@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_what_defeats_the_cache(kind: str | None, before: str, after: str) -> None:
    assert defeat_of(before + after, len(before)) == kind


def test_only_what_stands_at_the_place_counts() -> None:
    text = "On 2026-11-18 you said something about boats and rivers."
    assert defeat_of(text, text.index("boats")) is None
    assert defeat_of(text, text.index("11")) == "time"


def test_text_that_comes_later_was_reordered() -> None:
    assert defeat_of('"parameters": 12:30', 3, is_reordered=True) == "reordered"
    assert all(ADVICE.values())
