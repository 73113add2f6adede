"""Prompts that are scored and draw nothing: the same scores as where a token follows, beside rows with drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.run.device.device import CpuDevice
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

SIZES: dict[str, int] = {"num_blocks": 80, "block_size": 4}
LENGTHS = (1, 2, 11, 12, 23)
"""Chunks of ten tokens: the last chunk of two of these prompts has one token, which scores nothing."""


def requests(max_tokens: int) -> list[Request]:
    """Every other one only decodes."""
    rng, made = np.random.default_rng(3), []
    for index, length in enumerate(LENGTHS):
        prompt = rng.integers(0, VOCAB, length).astype(np.int32)
        scored = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
        made.append(Request(index, prompt, max_tokens, read_cache=False, row_params=RowParams(scored)))
        repeated = np.tile(prompt[:3], 4)
        plain = RowParams(SamplingParams(temperature=0, max_tokens=12))
        made.append(Request(100 + index, repeated, 12, row_params=plain))
    return made


def run(decoder: Any, speculate: Any, max_tokens: int) -> tuple[dict[int, list[Any]], dict[int, list[int]]]:
    """The scores and the tokens of each request."""
    runner = Runner(decoder, CpuDevice(1), RunnerSettings(**SIZES, max_rows=6, max_context=64, speculate=speculate))
    drafts = DraftSettings() if speculate == "off" else DraftSettings(3)
    scheduler = Scheduler(SchedulerSettings(**SIZES, max_running=6, token_budget=10, drafts=drafts))
    scores: dict[int, list[Any]] = {}
    tokens: dict[int, list[int]] = {}
    ended: dict[int, tuple[str, int]] = {}
    asked = requests(max_tokens)
    for request in asked:
        scheduler.submit(request)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        result = runner.launch(plan).wait()
        outcome = scheduler.apply(plan.step_no, result.drawn(), result.counts)
        for part in result.prompt_logprobs:
            found = zip(part.columns.token_ids.tolist(), part.columns.logprobs.tolist(), strict=True)
            scores.setdefault(part.request_id, []).extend(found)
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            tokens.setdefault(request_id, []).append(token)
        ended |= {event.request_id: (event.reason, event.num_output) for event in outcome.ended}
    reason = "length" if max_tokens else "stop"
    assert {one: ended[one] for one in range(len(LENGTHS))} == dict.fromkeys(range(len(LENGTHS)), (reason, max_tokens))
    assert len(ended) == len(asked)
    return scores, tokens


@pytest.mark.parametrize("speculate", ["off", "suffix"])
def test_scores_do_not_depend_on_a_token_that_follows(speculate: Any) -> None:
    model = make_reference("llama_tied")
    decoder = build_decoder(
        spec_from_config(config_of(model)), StateDictSource.of(model), device=torch.device("cpu"), dtype=torch.float32
    )
    alone, drawn = run(decoder, speculate, 0)
    before, others = run(decoder, speculate, 1)
    assert {one: len(found) for one, found in alone.items()} == {1: 1, 2: 10, 3: 11, 4: 22}
    for request_id, found in alone.items():
        assert [token for token, _ in found] == [token for token, _ in before[request_id]]
        assert np.allclose([one for _, one in found], [one for _, one in before[request_id]], atol=1e-5)
    assert set(drawn) == {100 + index for index in range(len(LENGTHS))}, "scored prompts draw nothing"
    assert drawn == {request_id: text for request_id, text in others.items() if request_id >= 100}
