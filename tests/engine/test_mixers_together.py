"""Models with other mixers under the features of the engine: every request gets the tokens of `transformers`.

As test_features_together.py, over tiny models with recurrent layers, attention sinks or latent attention: prefix hits
(of hybrids at checkpoints), chunks, preemption, the host tier, drafts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_stats import stats_after
from helpers.tiny_files import greedy, write_tiny
from helpers.tiny_models import HYBRIDS

from millrace import LLM, SamplingParams
from millrace.errors import MillraceError

VOCAB, NUM_REQUESTS = 97, 10
SAME: dict[str, Any] = {"dtype": "float32", "kv_dtype": "full"}
CASES = ("qwen3_next", "granite_hybrid", "lfm2", "gpt_oss", "deepseek_v2_groups", "deepseek_v3", "cohere2")


def requests_of(seed: str) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared, phrase = rng.choices(range(VOCAB), k=30), rng.choices(range(VOCAB), k=5)
    made = []
    for index in range(NUM_REQUESTS):
        prompt = shared[: rng.randrange(10, 30)] + phrase * rng.randrange(1, 4) + rng.choices(range(VOCAB), k=2)
        temperature = 0.0 if index < NUM_REQUESTS // 2 else 0.8
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=rng.randrange(4, 16), ignore_eos=True)
        made.append((prompt, params))
    return made


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    made = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [generation.token_ids for generation in made]


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers_and_of_lone_runs(case: str, tmp_path: Path) -> None:
    model, is_hybrid = write_tiny(tmp_path / "m", case), case in HYBRIDS
    path, requests = str(tmp_path / "m"), requests_of(case)
    with LLM(path, max_running=1, prefix_cache=False, kv_tokens=600, **SAME) as llm:
        expected = [answers(llm, [request])[0] for request in requests]
    for (prompt, params), own in zip(requests[: NUM_REQUESTS // 2], expected, strict=False):
        assert own == greedy(model, prompt, params.max_tokens)
    together: dict[str, Any] = {"max_running": 5, "kv_tokens": 160, "token_budget": 24, "block_size": 5}
    for more in (
        {"speculate": "off"},
        {"speculate": "ngram", "draft_tokens": 3, "kv_host_gib": 0.01},
        {"speculate": "suffix", "max_drafts": 3, "kv_tokens": 4000} | ({"kv_state_gib": 0.0005} if is_hybrid else {}),
        *([{"speculate": "draft", "drafter": path, "max_drafts": 3}] if case == "deepseek_v3" else []),
    ):
        with LLM(path, **together | more, **SAME) as llm:
            assert answers(llm, requests) == expected, more
            assert answers(llm, requests) == expected, more
            stats = stats_after(llm, 2 * len(requests))
            assert stats.prefix_hit_tokens > 0, more
            if is_hybrid:
                assert stats.state_hits > 0, more
                assert 0 < stats.state_slots_used <= stats.state_slots_total, more
                assert stats.state_slot_bytes > 0


def test_other_features_of_latent_attention_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "deepseek_v3")
    path = str(tmp_path / "m")
    with pytest.raises(MillraceError, match="holds latents, which that format does not store"):
        LLM(path, **SAME | {"kv_dtype": "int8"})
    with pytest.raises(MillraceError, match="has latent attention, whose adapters are not supported"):
        LLM(path, allow_adapters=True, device="cpu", **SAME)


def test_other_features_of_recurrent_layers_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "granite_hybrid")
    path = str(tmp_path / "m")
    with pytest.raises(MillraceError, match="whose drafts come from text so far"):
        LLM(path, speculate="draft", drafter=path, **SAME)
    with pytest.raises(MillraceError, match="one state of the model takes"):
        LLM(path, kv_state_gib=1e-7, **SAME)
