"""Quantised checkpoints under the features of the engine: every request gets the tokens that it gets alone.

As test_features_together.py, over tiny checkpoints: an integer format of the CPU kernels, and one without kernels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_stats import stats_after
from helpers.quantised_files import awq, fp8, write_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import BPE

from millrace import LLM, SamplingParams

VOCAB = 97
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq()),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128)),
}
TOGETHER: dict[str, Any] = {"max_running": 5, "kv_tokens": 160, "token_budget": 24, "block_size": 5, "max_drafts": 3}


def checkpoint(folder: Path, name: str) -> Path:
    settings, pack = FORMATS[name]
    write_checkpoint(folder, settings, pack)
    Tokenizer(BPE({chr(0x100 + index): index for index in range(VOCAB)}, [])).save(str(folder / "tokenizer.json"))
    return folder


def requests_of(seed: str) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    phrase = [rng.randrange(VOCAB) for _ in range(5)]
    return [
        (
            shared[: rng.randrange(30)] + phrase * rng.randrange(1, 4),
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]), seed=index, max_tokens=rng.randrange(4, 16), ignore_eos=True
            ),
        )
        for index in range(10)
    ]


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    made = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [generation.token_ids for generation in made]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_those_of_lone_runs(name: str, dtype: str, tmp_path: Path) -> None:
    model, requests = str(checkpoint(tmp_path / "m", name)), requests_of(name)
    same: dict[str, Any] = {"dtype": dtype, "deterministic": True, "kv_dtype": "full"}
    with LLM(model, max_running=1, prefix_cache=False, speculate="off", kv_tokens=600, **same) as llm:
        expected = [answers(llm, [request])[0] for request in requests]
    for speculate in ("off", "ngram"):
        with LLM(model, speculate=speculate, **TOGETHER, **same) as llm:
            assert answers(llm, requests) == expected
            assert answers(llm, requests) == expected
            assert stats_after(llm, 2 * len(requests)).prefix_hit_tokens > 0
