"""The real default model on a GPU: greedy generation agrees with the CPU in float32, and in bfloat16 nearly always."""

from __future__ import annotations

from typing import Any

import pytest

from millrace import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "def quicksort(items):\n    ",
    "Der schnelle braune Fuchs springt",
    "Q: What is 12 + 30?\nA:",
    "Once upon a time, at the mill by the river,",
    "日本語のテキスト: ",
    "In the beginning the river was wide and slow, and the mill stood where the banks came close together. " * 20,
    "1, 2, 3, 4, 5, 6, 7,",
)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def answers(**settings: Any) -> list[list[int]]:
    with LLM(kv_tokens=20_000, **settings) as llm:
        together = [answer.token_ids for answer in llm.generate(list(PROMPTS), GREEDY)]
        again = [answer.token_ids for answer in llm.generate(list(PROMPTS), GREEDY)]  # from the prefix cache
    if settings["dtype"] == "float32":
        assert again == together
    return together


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(device="cpu", dtype="float32")


def test_float32_gives_the_same_tokens(expected: list[list[int]]) -> None:
    assert answers(device="cuda", dtype="float32") == expected


def test_bfloat16_gives_mostly_the_same_tokens(expected: list[list[int]]) -> None:
    """Rounding eventually decides a near tie; the first tokens of most answers are the same."""
    found = answers(device="cuda", dtype="bfloat16")
    same = sum(one[:8] == other[:8] for one, other in zip(found, expected, strict=True))
    assert same >= len(PROMPTS) - 2
