"""A CPU step in which some rows need more than a draw: each row gets the tokens that it gets alone."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.tiny_models import config_of, make_reference

from millrace.llm import LLM
from millrace.params.sampling import SamplingParams

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1, top_p=0.8),
    SamplingParams(seed=2, dry_multiplier=3.0, dry_allowed_length=1, dry_breaker_ids=()),
    SamplingParams(seed=3, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, logprobs=2),
    SamplingParams(seed=4, repetition_penalty=1.3),
    SamplingParams(seed=5, repetition_penalty=1.3, repeat_last_n=3, xtc_probability=0.5),
]


def test_rows_of_all_kinds_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(make_reference("llama"))))
    kinds = [_with(params, max_tokens=12, ignore_eos=True) for params in KINDS]
    prompts = [[1 + number, 5, 9, 5] for number in range(len(kinds))]
    with LLM(f"random:{path}", device="cpu", dtype="float32", kv_tokens=1024) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, kinds, strict=True)]
        together = llm.generate(prompts, kinds)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        logprobs = together[3].choices[0].logprobs
        assert logprobs is not None
        assert [entry.token_id for entry in logprobs] == together[3].token_ids
    with LLM(f"random:{path}", device="cpu", dtype="float32", kv_tokens=64, max_running=6) as tight:
        assert [one.token_ids for one in tight.generate(prompts, kinds)] == [one.token_ids for one in alone]


def _with(params: SamplingParams, **fields: object) -> SamplingParams:
    from msgspec.structs import replace

    return replace(params, **fields)  # type: ignore[arg-type]
