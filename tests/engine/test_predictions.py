"""A request's prediction saves steps, changes no token, and is counted when the request ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.engine_stats import stats_after
from helpers.tiny_server import tiny_source

from millrace import LLM, SamplingParams

PROMPT = [5, 17, 40, 2, 71, 5, 17, 60, 33]
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.1, "logprobs": 2},
)


def params(prediction: tuple[int, ...] = (), **kind: float) -> SamplingParams:
    return SamplingParams(max_tokens=32, ignore_eos=True, prediction=prediction, **kind)


def scores(generation) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in generation.choices[0].logprobs or ()]


def test_a_right_prediction_saves_steps_and_changes_nothing(tmp_path: Path) -> None:
    with LLM(tiny_source(tmp_path), kv_tokens=2048, dtype="float32", speculate="ngram", draft_tokens=7) as llm:
        plain = llm.generate([PROMPT] * len(KINDS), [params(**kind) for kind in KINDS])
        before = stats_after(llm, len(KINDS))
        predictions = [tuple(generation.token_ids) for generation in plain]
        # One word of the first was predicted wrongly.
        predictions[0] = (*predictions[0][:12], 5, 6, 7, *predictions[0][13:])
        predicted = [params(text, **kind) for text, kind in zip(predictions, KINDS, strict=True)]
        found = llm.generate([PROMPT] * len(KINDS), predicted)
        after = stats_after(llm, 2 * len(KINDS))
    assert [generation.token_ids for generation in found] == [generation.token_ids for generation in plain]
    # Which rows share a step varies with the machine's load, and with it the last bits.
    for one, other in zip(found, plain, strict=True):
        assert [score for _, score in scores(one)] == pytest.approx([score for _, score in scores(other)], abs=1e-4)
    assert after.step_no - before.step_no < 24
    assert after.accepted_tokens - before.accepted_tokens > 40
