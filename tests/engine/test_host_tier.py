"""KV blocks in host memory, through the engine on a CPU: same tokens, and repeats are not computed again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.tiny_models import VOCAB, config_of, make_reference

from millrace import LLM, SamplingParams
from millrace.link.engine_stats import EngineStats
from millrace.run.device.block_copier import OrderedCopier

KV_TOKENS, PROMPT, BLOCK, OUTPUT = 512, 96, 16, 8
NUM_PROMPTS = 3 * KV_TOKENS // PROMPT
ROUNDS = 3
FOUND = (ROUNDS - 1) * NUM_PROMPTS * (PROMPT - BLOCK)
"""Tokens that repeats find."""
LOADED = {"llama": FOUND - (ROUNDS - 1) * KV_TOKENS, "qwen3_heads_of_64": FOUND - (ROUNDS - 1) * KV_TOKENS}
"""Those that the pool cannot have kept. With windows a hit needs few of a prompt's blocks, so the pool may keep most:
other models load something."""


@pytest.fixture(params=["llama", "gemma3", "mistral_window"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Models with one KV group, with several, and with a window only."""
    path = tmp_path / f"{request.param}.json"
    path.write_text(json.dumps(config_of(make_reference(request.param))))
    return f"random:{path}"


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, PROMPT).tolist() for _ in range(NUM_PROMPTS)]


def answers(source: str, *, at_once: bool, **settings: object) -> tuple[list[list[int]], list[int], EngineStats]:
    """Output tokens and cached prompt tokens of every answer, and the engine's statistics at the end."""
    chosen = SamplingParams(temperature=1.0, seed=5, max_tokens=OUTPUT, ignore_eos=True)
    found = []
    settings = {"device": "cpu", "dtype": "float32", **settings}
    with LLM(source, kv_tokens=KV_TOKENS, max_running=4, token_budget=64, **settings) as llm:
        for _ in range(ROUNDS):
            if at_once:
                found += llm.generate(prompts(), chosen)
            else:
                found += [llm.generate([prompt], chosen)[0] for prompt in prompts()]
        stats = stats_after(llm, len(found))
    return [one.token_ids for one in found], [one.cached_tokens for one in found], stats


@pytest.mark.parametrize("at_once", [False, True])
def test_repeats_of_a_large_working_set_return_from_host_memory(source: str, at_once: bool) -> None:
    tokens, cached, stats = answers(source, at_once=at_once, kv_host_gib=0.05)
    expected, without, off = answers(source, at_once=at_once)
    assert tokens == expected
    assert sum(without) == 0, "the working set must not fit in the pool"
    assert cached == [0] * NUM_PROMPTS + [PROMPT - BLOCK] * (ROUNDS - 1) * NUM_PROMPTS
    assert stats.host_tokens_loaded >= LOADED.get(Path(source).stem, 1)
    assert stats.host_blocks_lost == stats.host_copies_failed == 0
    assert 0 < stats.host_blocks_used <= stats.host_blocks_total
    assert off.host_blocks_total == off.host_tokens_loaded == 0


def test_failing_copies_change_no_token(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = answers(source, at_once=True)
    # No real copy fails.
    copy, count = OrderedCopier.copy_blocks, 0

    def fail_sometimes(self: OrderedCopier, copies: object) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise RuntimeError("a copy failed")
        copy(self, copies)  # type: ignore[arg-type]

    monkeypatch.setattr(OrderedCopier, "copy_blocks", fail_sometimes)
    tokens, _, stats = answers(source, at_once=True, kv_host_gib=0.05)
    assert tokens == expected
    assert stats.host_copies_failed > 0
    assert stats.host_tokens_loaded > 0


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["qwen3_heads_of_64", "gemma3"], indirect=True)
def test_repeats_return_from_host_memory_on_the_gpu(source: str) -> None:
    on_gpu = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    tokens, cached, stats = answers(source, at_once=True, kv_host_gib=0.05, **on_gpu)
    expected, without, _ = answers(source, at_once=True, **on_gpu)
    assert tokens == expected
    assert sum(cached) > sum(without)
    assert stats.host_tokens_loaded >= LOADED.get(Path(source).stem, 1)
    assert stats.host_copies_failed == 0
