"""Drafters that are models, of a model split over ranks: rank 0 has them whole, and the others take its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter_files import HIDDEN, draw, layer_config, layer_tensors, token_maps, write
from helpers.engine_stats import stats_after
from helpers.tiny_files import write_tiny
from helpers.tiny_models import VOCAB

from millrace import LLM, SamplingParams

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 5, "max_running": 4}
SMALL_POOL: dict[str, Any] = {"kv_tokens": 150, "kv_host_gib": 0.01, "draft_tokens": 3}


def drafter_of(kind: str, target: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    if kind == "draft":
        return target  # It is right every time.
    if kind == "medusa":  # The first head repeats the target's own choice.
        tensors = {f"{head}.0.linear.weight": draw(HIDDEN, HIDDEN) * head for head in range(3)}
        tensors |= {f"{head}.0.linear.bias": draw(HIDDEN) * head for head in range(3)}
        return write(folder, {"medusa_num_heads": 3}, tensors)
    if kind == "eagle3":  # It reads the states of three layers, and drafts from a part of the vocabulary.
        maps, _ = token_maps(60, VOCAB)
        own = {"fc.weight": draw(HIDDEN, 3 * HIDDEN), "norm.weight": draw(HIDDEN, centre=1.0)}
        own |= {"midlayer.hidden_norm.weight": draw(HIDDEN, centre=1.0), "lm_head.weight": draw(60, HIDDEN)}
        own |= maps | layer_tensors("midlayer.", 2 * HIDDEN)
        return write(folder, layer_config(VOCAB, draft_vocab_size=60), own)
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "fc.bias": draw(HIDDEN)}
    return write(folder, layer_config(VOCAB), tensors | layer_tensors("layers.0.", input_norm=False))


@pytest.mark.parametrize("kind", ["draft", "eagle", "eagle3", "medusa"])
def test_tokens_are_those_of_one_rank_and_the_drafter_is_as_often_right(kind: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "llama")
    drafter = drafter_of(kind, tmp_path / "m", tmp_path / "drafter")
    rng = np.random.default_rng(1)
    shared = rng.integers(1, VOCAB, 24).tolist()
    prompts = [shared[: 12 + 4 * (index % 3)] + rng.integers(1, VOCAB, 5).tolist() * 3 for index in range(6)]
    params = [
        SamplingParams(temperature=index % 2 * 0.8, seed=index, max_tokens=14, ignore_eos=True) for index in range(6)
    ]

    def answered(**settings: Any) -> tuple[list[list[int]], Any]:
        with LLM(str(tmp_path / "m"), **SETTINGS, **SMALL_POOL, **settings) as llm:
            tokens = [one.token_ids for _ in range(2) for one in llm.generate(prompts, params)]
            return tokens, stats_after(llm, 2 * len(prompts))

    drafting = {"speculate": "eagle" if kind == "eagle3" else kind, "drafter": str(drafter)}
    expected, one = answered(**drafting)
    found, two = answered(**drafting, tensor_parallel=2)
    assert found == expected
    assert two.drafted_tokens
    assert two.prefix_hit_tokens
    if kind == "draft":
        assert two.accepted_tokens > 0.8 * two.drafted_tokens
    elif kind != "eagle3":  # A random one is seldom right.
        assert two.accepted_tokens > 0.5 * one.accepted_tokens
