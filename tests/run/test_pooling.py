"""Rows whose result is a pooled hidden state equal `transformers`: chunked, beside other rows, after prefix hits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_channel import FakeChannel
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.engine.fronts.outbox import Outbox
from millrace.engine.ledger import Ledger
from millrace.link.messages import NewRequest, pack_tokens, unpack_ids
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.run.device.device import CpuDevice
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

BLOCK, ROWS, BUDGET, CONTEXT = 4, 6, 10, 96
POOLINGS = ("last", "mean", "", "mean", "last", "", "last", "mean")


def reference_vector(model: Any, prompt: np.ndarray, pooling: str) -> np.ndarray:
    with torch.no_grad():
        states = model.model(torch.from_numpy(prompt.astype(np.int64))[None]).last_hidden_state[0]
    pooled = states[-1] if pooling == "last" else states.mean(dim=0)
    return torch.nn.functional.normalize(pooled.float(), dim=0).numpy()


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    shared = rng.integers(0, VOCAB, 30)
    tails = [rng.integers(0, VOCAB, length) for length in (1, 9, 3, 25, 2, 12, 40, 1)]
    own = [
        np.concatenate([shared[:begin], tail]) for begin, tail in zip((30, 30, 0, 0, 30, 30, 8, 0), tails, strict=True)
    ]
    return [prompt.astype(np.int32) for prompt in own]


@pytest.mark.parametrize(("case", "speculate"), [("llama_tied", "off"), ("qwen3", "suffix"), ("gemma3", "off")])
def test_vectors_are_those_of_transformers(case: str, speculate: Any) -> None:
    model = make_reference(case)
    decoder = build_decoder(
        spec_from_config(config_of(model)), StateDictSource.of(model), device=torch.device("cpu"), dtype=torch.float32
    )
    groups = KvGroups(decoder.spec.kv_groups.windows)
    num_blocks = 40 * groups.num_groups
    sizes: dict[str, int] = {"num_blocks": num_blocks, "block_size": BLOCK}
    runner = Runner(
        decoder, CpuDevice(1), RunnerSettings(**sizes, max_rows=ROWS, max_context=CONTEXT, speculate=speculate)
    )
    drafts = DraftSettings(3) if speculate != "off" else DraftSettings()
    scheduler = Scheduler(
        SchedulerSettings(**sizes, max_running=ROWS, token_budget=BUDGET, groups=groups, drafts=drafts)
    )
    channel, ledger = FakeChannel(), Ledger()
    outbox = Outbox(channel, ledger)
    for round_no in range(2):  # The second finds the prefixes of the first.
        for index, (prompt, pooling) in enumerate(zip(prompts(), POOLINGS, strict=True)):
            max_tokens = 0 if pooling else 8
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, pooling=pooling)  # type: ignore[arg-type]
            request = Request(
                id=10 * round_no + index,
                prompt=prompt,
                max_tokens=max_tokens,
                read_cache=pooling != "mean",
                row_params=RowParams(params),
            )
            message = NewRequest(id=request.id, prompt=pack_tokens(prompt), params=params)
            ledger.open(message, request, 0.0)
            scheduler.submit(request)
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            assert plan is not None
            assert plan.pooled is None or not (plan.pooled & plan.samples).any(), "it draws nothing"
            result = runner.launch(plan).wait()
            assert result.counts is not None or len(result.drawn()) == plan.samples.sum()
            outcome = scheduler.apply(plan.step_no, result.drawn(), result.counts)
            outbox.send_step(outcome, result, 0.0)
    finished = {finish.id: finish for _, message in channel.sent for finish in message.finished}
    token_ids = np.concatenate([unpack_ids(message.ids) for _, message in channel.sent])
    assert len(finished) == 2 * len(POOLINGS)
    assert any(finish.cached_tokens for finish in finished.values() if POOLINGS[finish.id % 10] == "last")
    for request_id, finish in finished.items():
        prompt, pooling = prompts()[request_id % 10], POOLINGS[request_id % 10]
        if not pooling:
            assert (finish.vector, finish.reason, int((token_ids == request_id).sum())) == (b"", "length", 8)
            continue
        assert (finish.reason, finish.output_tokens, int((token_ids == request_id).sum())) == ("stop", 0, 0)
        found = np.frombuffer(finish.vector, np.float32)
        assert np.allclose(found, reference_vector(model, prompt, pooling), atol=2e-5)
        assert pooling != "mean" or not finish.cached_tokens


def test_a_prompt_of_a_lone_token_and_an_unknown_pooling() -> None:
    with pytest.raises(Exception, match="pooling"):
        SamplingParams(max_tokens=0, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="max_tokens 0"):
        SamplingParams(max_tokens=1, pooling="last")
