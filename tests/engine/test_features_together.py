"""Features combine: whatever is switched on, every request gets the tokens that it gets alone without any of it.

Each case draws settings and requests at random: drafts, host tier, a small pool, odd block sizes, short steps, KV
formats, prefix sharing, sampling, grammars with forced tokens, log-probabilities, penalties, predictions, bad words,
allowed tokens, and vectors wanted at the same time. A mirror runs every step too and draws the same; or, as these
exclude each other, there is a disk, from which blocks return after a restart too, or the model is split over two ranks.
Preemption is crossed with drafts, KV
groups and copies in tests/plan. A new feature adds itself to `SETTINGS` or `requests_of`.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine_stats import stats_after

from millrace import LLM, SamplingParams
from millrace.params.grammar import Grammar
from millrace.plan.scheduler import Scheduler

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

NUM_REQUESTS, OUTPUT, NUM_EMBEDDED, SHARED = 8, 16, 3, 60
VOCAB = 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": 299,
    "bos_token_id": 298,
}
"""Its weights are random and large, so that a token depends on all before it; a step takes milliseconds."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"enum": ["red", "green"]},
        "n": {"type": "integer"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (None, None, Grammar("json_object"), Grammar("json_schema", json.dumps(SCHEMA)))
SETTINGS: dict[str, tuple[Any, ...]] = {
    "speculate": ("off", "ngram", "suffix", "auto"),
    "max_drafts": (3, 7),
    "draft_tokens": (0, 0, 1, 7),
    "kv_host_gib": (0.0, 0.25),
    "block_size": (5, 16),
    "token_budget": (24, 512),
    "step_ms": (0.0, 2.0),
    "prefix_cache": (True, True, False),
    "policy": ("fcfs", "shortest", "feedback"),
}

ALONE: dict[str, Any] = {"max_running": 1, "prefix_cache": False, "step_ms": 0.0}


def requests_of(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(300, VOCAB) for _ in range(SHARED)]
    phrase = [rng.randrange(300, VOCAB) for _ in range(6)]
    requests = []
    for index in range(NUM_REQUESTS):
        prompt = shared[: rng.randrange(SHARED)] + phrase * rng.randrange(1, 4)
        prompt += [rng.randrange(300, VOCAB) for _ in range(rng.randrange(1, 9))]
        grammar = rng.choice(GRAMMARS)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=index,
            max_tokens=rng.randrange(1, OUTPUT),
            ignore_eos=grammar is None or rng.random() < 0.3,
            min_tokens=rng.choice([0, 0, 1]),
            grammar=grammar,
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, None, 2]),
            prediction=tuple(rng.choices(phrase, k=30)) if rng.random() < 0.3 else (),
        )
        requests.append((prompt, params))
    # One more, whose grammar forces many tokens that any drafter may propose.
    requests.append((requests[0][0], SamplingParams(temperature=0.0, max_tokens=24, grammar=GRAMMARS[-1])))
    # Drafts from a prediction under a grammar; and a grammar with a bias, whose drafts are off.
    mixed = {"grammar": GRAMMARS[-1], "max_tokens": OUTPUT, "temperature": 0.9, "seed": 1}
    requests.append((requests[1][0], SamplingParams(prediction=tuple(phrase), **mixed)))
    requests.append((requests[2][0], SamplingParams(logit_bias=((300, 2.0),), speculate="off", **mixed)))
    # Draws that depend on the tokens before, with and without a grammar, and draws from a few tokens.
    requests.append((requests[3][0], SamplingParams(bad_words=("e", "red"), **mixed)))
    shaped = {"bad_words": ("the", "a"), "dry_multiplier": 0.8, "typical_p": 0.9, "seed": 2, "max_tokens": OUTPUT}
    requests.append((requests[4][0], SamplingParams(ignore_eos=True, **shaped)))
    few = tuple(sorted({*phrase, *shared}))
    requests.append((requests[5][0], SamplingParams(allowed_token_ids=few, seed=3, max_tokens=OUTPUT)))
    return requests


def answers_of(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each answer, and those that have log-probabilities."""
    generations = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    scored = [generation.choices[0].logprobs or [] for generation in generations]
    for (_, params), generation, logprobs in zip(requests, generations, scored, strict=True):
        assert len(logprobs) == (len(generation.token_ids) if params.logprobs is not None else 0)
    return [
        (generation.token_ids, [entry.token_id for entry in logprobs])
        for generation, logprobs in zip(generations, scored, strict=True)
    ]


def vectors_of(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> np.ndarray:
    prompts = [prompt for prompt, _ in requests[:NUM_EMBEDDED]]
    return np.stack([*llm.embed(prompts), *llm.embed(prompts, pooling="mean")])


TIGHT: dict[str, Any] = {"kv_tokens": 200, "max_running": 12}
# Three drafts, however long a step takes, so that the tokens that a grammar forces are always among them.
DRAFTING: dict[str, Any] = {"kv_tokens": 4000, "max_running": 3, "draft_tokens": 3, "step_ms": 0.0}
# Host memory for about 50 blocks, which is less than a round has.
ON_DISK: dict[str, Any] = TIGHT | {"kv_host_gib": 0.0007, "kv_disk_gib": 0.25, "block_size": 16, "prefix_cache": True}
# Host memory for about 30 blocks. Neither a disk nor a mirror goes with ranks.
SPLIT: dict[str, Any] = TIGHT | {"tensor_parallel": 2, "speculate": "ngram"}
SPLIT |= {"kv_host_gib": 0.0014, "prefix_cache": True}


@pytest.mark.parametrize(
    ("kv_dtype", "all_limits"),
    [
        ("float16", (TIGHT, DRAFTING | {"speculate": "draft"})),
        ("full", (SPLIT | {"draft_tokens": 3},)),
        ("int8", (TIGHT, ON_DISK)),
        ("int4", (TIGHT, DRAFTING | {"speculate": "auto"})),
    ],
)
def test_any_combination_gives_the_answers_of_lone_runs(
    kv_dtype: str, all_limits: tuple[dict[str, Any], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What biases add to all keys is taken off before these are rounded to four bits.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"attention_bias": kv_dtype == "int4"}))
    source = f"random:{tmp_path / 'config.json'}"
    rng = random.Random(kv_dtype)
    rounds = [requests_of(rng) for _ in range(2)]
    with monkeypatch.context() as patch, LLM(source, dtype="float32", kv_dtype=kv_dtype, **ALONE) as llm:
        patch.setattr(Scheduler, "append_forced", lambda *_: 0)
        expected = [[answers_of(llm, [request])[0] for request in requests] for requests in rounds]
        vectors = vectors_of(llm, rounds[0])
    num_hits = num_forced = num_guided = 0
    for limits in all_limits:
        settings = {name: rng.choice(values) for name, values in SETTINGS.items()} | limits
        if not settings["prefix_cache"]:
            settings["kv_host_gib"] = 0.0  # the host tier holds blocks of the prefix cache
        if "kv_disk_gib" in limits:
            settings["kv_disk"] = str(tmp_path / "disk")
        settings["mirror"] = not limits.keys() & {"kv_disk_gib", "tensor_parallel"}
        settings |= {"dtype": "float32", "kv_dtype": kv_dtype}
        if limits.get("speculate") in ("draft", "auto"):
            settings["drafter"] = source
        with LLM(source, **settings) as llm, ThreadPoolExecutor(1) as beside:
            for index in (0, 1, 0):
                if index == 1:
                    embedded = beside.submit(vectors_of, llm, rounds[0])
                assert answers_of(llm, rounds[index]) == expected[index], settings
            assert embedded.result(300) == pytest.approx(vectors, abs=1e-3), settings
            stats = stats_after(llm, 3 * len(rounds[0]) + 2 * NUM_EMBEDDED)
            if stats.mirror is not None:
                assert (stats.mirror.is_up, stats.mirror.differences) == (True, 0), settings
                assert stats.mirror.steps > 20
            if "tensor_parallel" in limits:
                assert min(stats.accepted_tokens, stats.prefix_hit_tokens, stats.host_tokens_loaded) > 0, settings
            num_hits += stats.prefix_hit_tokens
            num_forced += stats.forced_tokens
            num_guided += sum(stats.drafts["grammar"].accepted) if "grammar" in stats.drafts else 0
        if "kv_disk" in settings:
            with LLM(source, **settings) as llm:
                assert answers_of(llm, rounds[1]) == expected[1], settings
                stats = stats_after(llm, len(rounds[1]))
                assert stats.disk_tokens_read > 0, settings
                assert stats.disk_copies_failed == 0
    assert num_hits > 0
    # Appended or drafted, whichever comes first: that depends on how long steps take.
    assert num_forced + num_guided > 5
