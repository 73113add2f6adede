"""Deterministic mode on a GPU: a request's tokens do not depend on the rest of the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from millrace import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def test_a_hundred_different_batches(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPE))
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(3, 4096), k=length)

    watched = [prompt(length) for length in (5, 40, 333)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"device": "cuda", "deterministic": True, "kv_tokens": 100_000, "token_budget": 700, "max_running": 96}
    with LLM(f"random:{config}", **settings) as llm:
        alone = [llm.generate([one], greedy)[0].token_ids for one in watched]
        for round_no in range(100):
            others = [prompt(draw.choice([1, 3, 17, 64, 200, 500])) for _ in range(draw.choice([0, 1, 5, 20, 80]))]
            batch = [*others, *watched]
            draw.shuffle(batch)
            answers = llm.generate(batch, greedy)
            for one, expected in zip(watched, alone, strict=True):
                assert answers[batch.index(one)].token_ids == expected, f"round {round_no}"
