"""Tiny models with other mixers than plain attention: crossed features with a mirror, and behind `millrace serve`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_stats import stats_after
from helpers.served import serving
from helpers.tiny_files import greedy, write_tiny
from helpers.tiny_models import HYBRIDS, VOCAB

from millrace import LLM, SamplingParams
from millrace.params.grammar import Grammar
from millrace.plan.queue.admission_forecast import AdmissionForecast

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CASES = ("qwen3_next", "gpt_oss", "deepseek_v3")
SAME: dict[str, Any] = {"dtype": "float32", "kv_dtype": "full"}
GRAMMARS = (None, None, Grammar("regex", "(abab|cba)+[a-m]{2,9}"), Grammar("choice", '["true", "truth", "false"]'))
SETTINGS: dict[str, tuple[Any, ...]] = {
    "speculate": ("off", "ngram", "suffix"),
    "max_drafts": (3, 7),
    "kv_host_gib": (0.0, 0.01),
    "block_size": (5, 16),
    "token_budget": (24, 512),
    "step_ms": (0.0, 40.0),
}


def requests_of(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    shared, phrase = rng.choices(range(VOCAB - 1), k=60), rng.choices(range(VOCAB - 1), k=5)
    made = []
    for index in range(12):
        prompt = shared[: rng.randrange(60)] + phrase * rng.randrange(1, 4) + rng.choices(range(VOCAB - 1), k=2)
        grammar = rng.choice(GRAMMARS)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            seed=index,
            max_tokens=rng.randrange(4, 24),
            ignore_eos=grammar is None,
            grammar=grammar,
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            prediction=tuple(rng.choices(phrase, k=20)) if rng.random() < 0.3 else (),
        )
        made.append((prompt, params))
    return made


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    made = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [generation.token_ids for generation in made]


@pytest.mark.parametrize("case", CASES)
def test_any_combination_gives_the_answers_of_lone_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars, drafts, predictions, the host tier, preemption and prefix hits; a mirror draws the same."""
    write_tiny(tmp_path / "m", case)
    rng, path = random.Random(case), str(tmp_path / "m")
    requests = requests_of(rng)
    with LLM(path, max_running=1, prefix_cache=False, kv_tokens=600, **SAME) as llm:
        expected = [answers(llm, [request])[0] for request in requests]
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)  # so that rows are preempted
    found = {"hits": 0, "preemptions": 0, "forced": 0}
    for kv_tokens in (200, 4000):
        settings = {name: rng.choice(values) for name, values in SETTINGS.items()} | {"kv_tokens": kv_tokens}
        with LLM(path, max_running=8, mirror=True, **settings, **SAME) as llm:
            for _ in range(2):
                assert answers(llm, requests) == expected, settings
            stats = stats_after(llm, 2 * len(requests))
        assert stats.mirror is not None
        assert (stats.mirror.is_up, stats.mirror.differences) == (True, 0), settings
        found["hits"] += stats.prefix_hit_tokens
        found["preemptions"] += stats.preemptions
        found["forced"] += stats.forced_tokens + sum(sum(one.accepted) for one in stats.drafts.values())
    assert all(found.values()), found


@pytest.mark.parametrize("case", CASES)
def test_the_server_gives_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    """Several requests at once, some with the prompt of one before."""
    model, rng = write_tiny(tmp_path / "m", case), random.Random(case)
    shared = rng.choices(range(VOCAB), k=70)
    prompts = [shared[: rng.randrange(40, 70)] + rng.choices(range(VOCAB), k=3) for _ in range(6)]
    with serving(str(tmp_path / "m"), "--kv-dtype", "full", "--speculate", "suffix", "--max-drafts", "3") as served:

        def complete(prompt: list[int]) -> tuple[list[int], int]:
            body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            status, answer = served.request("POST", "/v1/completions", body | {"return_token_ids": True})
            assert status == 200, answer
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["token_ids"], cached

        with ThreadPoolExecutor(3) as pool:
            first = list(pool.map(complete, prompts))
        again = [complete(prompt + tokens) for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        for prompt, (tokens, _), (more, cached) in zip(prompts, first, again, strict=True):
            assert tokens == greedy(model, prompt, 12)
            assert more == greedy(model, prompt + tokens, 12)
            assert cached > 0
        assert case not in HYBRIDS or served.metric("millrace_engine_state_hits_total") > 0
