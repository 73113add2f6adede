"""A load in which most features meet: drafts, grammars, prefix hits, host memory, preemption, every kind of draw."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from millrace import SamplingParams
from millrace.params.grammar import Grammar

MIXED_SETTINGS: dict[str, Any] = {
    "speculate": "ngram",
    "block_size": 8,
    "kv_tokens": 200,
    "kv_host_gib": 0.1,
    "max_running": 4,
    "token_budget": 50,
    "draft_tokens": 3,
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}


def mixed_requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Half of the prompts begin alike, all repeat themselves, and their answers are drawn in every way."""
    rng = np.random.default_rng(0)
    shared = rng.integers(300, vocab_size, 32).tolist()
    prompts = [shared * (index % 2) + rng.integers(300, vocab_size, 20).tolist() * 3 for index in range(8)]
    grammar, repeating = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", "(yes|no)(, (yes|no)){6}")
    others: list[dict[str, Any]] = [
        {"grammar": grammar, "temperature": 0.0},
        {"grammar": repeating, "temperature": 0.0},
        {"temperature": 0.0},
        {"logprobs": 2, "top_p": 0.9},
        {"frequency_penalty": 0.5, "prompt_logprobs": 1},
        {"typical_p": 0.9, "dry_multiplier": 0.8, "bad_words": ("the",)},
        {"logit_bias": ((300, 2.0),), "min_tokens": 3, "top_k": 40},
        {"temperature": 0.0, "prediction": tuple(prompts[7])},
    ]
    params = [SamplingParams(max_tokens=20, seed=index, **other) for index, other in enumerate(others)]
    return prompts, params
