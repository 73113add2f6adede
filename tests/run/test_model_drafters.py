"""Drafters that are models, on the plain runner: tokens are those without drafts, and drafts follow from the tokens
alone, whatever happened to the row: chunked prompts, prefix hits, preemption, forced ends of drafts.

A model that is its own draft model shows it: it must be right every time.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter_files import HIDDEN, draw, layer_config, layer_tensors, token_maps, write
from helpers.paged import make_batch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.models.batch import Taps
from millrace.models.decoder import Decoder
from millrace.models.drafters.load import load_drafter, open_drafter
from millrace.models.drafters.program import EagleDrafter
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Int32s
from millrace.run.device.device import CpuDevice
from millrace.run.drafting.chain import ChainDrafter
from millrace.run.drafting.drafter import DraftAsk
from millrace.run.drafting.models import DrafterModel
from millrace.run.runner import Runner
from millrace.run.settings import KvFormat, RunnerSettings

CPU = torch.device("cpu")
BLOCK, ROWS, BUDGET, CONTEXT, OUTPUT = 4, 5, 24, 96, 18
DRAFT_VOCAB = 31


def load(case: str, *, grouped: bool = True, spoilt: bool = False) -> Decoder:
    model = make_reference(case)
    if spoilt:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    spec = dataclasses.replace(spec_from_config(config_of(model)), has_kv_groups=grouped)
    return build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=torch.float32)


def eagle(folder: Path, target: Decoder) -> DrafterModel:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "fc.bias": draw(HIDDEN)}
    tensors |= layer_tensors("layers.0.", input_norm=False)
    return load_drafter(open_drafter(write(folder, layer_config(VOCAB), tensors), target.spec), target)


def eagle3(folder: Path, target: Decoder) -> DrafterModel:
    tensors = {"fc.weight": draw(HIDDEN, 3 * HIDDEN), "norm.weight": draw(HIDDEN, centre=1.0)}
    tensors |= {"midlayer.hidden_norm.weight": draw(HIDDEN, centre=1.0), "lm_head.weight": draw(DRAFT_VOCAB, HIDDEN)}
    tensors |= token_maps(DRAFT_VOCAB, VOCAB)[0] | layer_tensors("midlayer.", 2 * HIDDEN)
    config = layer_config(VOCAB, draft_vocab_size=DRAFT_VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return load_drafter(open_drafter(write(folder, config, tensors), target.spec), target)


def medusa(folder: Path, target: Decoder) -> DrafterModel:
    """The first head repeats the target's own choice: right wherever a token follows itself."""
    tensors = {f"{head}.0.linear.weight": draw(HIDDEN, HIDDEN) * head for head in range(3)}
    tensors |= {f"{head}.0.linear.bias": draw(HIDDEN) * head for head in range(3)}
    return load_drafter(open_drafter(write(folder, {"medusa_num_heads": 3}, tensors), target.spec), target)


def requests() -> list[Request]:
    rng, made = random.Random(3), []
    shared = rng.choices(range(VOCAB), k=40)
    for index in range(9):
        prompt = shared[: rng.randrange(0, 40)] + rng.choices(range(VOCAB), k=rng.randrange(1, 30))
        temperature = 0.0 if index % 3 else 0.8
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=index, max_tokens=OUTPUT, ignore_eos=True)
        tokens = np.array(prompt, np.int32)
        made.append(Request(id=index, prompt=tokens, max_tokens=OUTPUT, row_params=RowParams(params, ())))
    return made


def drive(runner: Runner, decoder: Decoder, num_blocks: int, *, prefix_cache: bool = True) -> dict[int, list[int]]:
    """Two rounds of the same requests: the second one finds its prompts in the prefix cache."""
    drafts = DraftSettings(max_drafts=3, max_places=4 * ROWS)
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_running=ROWS,
            token_budget=BUDGET,
            mixed_budget=16,
            drafts=drafts if runner.drafted is not None else DraftSettings(),
            prefix_cache=prefix_cache,
            groups=KvGroups(decoder.spec.kv_groups.windows),
        )
    )
    tokens: dict[int, list[int]] = {}
    for round_no in range(2):
        for request in requests():
            scheduler.submit(dataclasses.replace(request, id=request.id + 100 * round_no))
        flying: list[Any] = []
        while scheduler.has_work or flying:
            plan = scheduler.plan(0.0)
            if plan is not None:
                flying.append((plan, runner.launch(plan)))
            if len(flying) > 1 or plan is None:
                plan, pending = flying.pop(0)
                result = pending.wait()
                outcome = scheduler.apply(plan.step_no, result.drawn(), result.counts)
                for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                    tokens.setdefault(request_id, []).append(token)
    assert all(len(own) == OUTPUT for own in tokens.values())
    return tokens


def runner_of(
    decoder: Decoder, drafter: DrafterModel | None, num_blocks: int, kind: Any = "draft", kv_dtype: KvFormat = "full"
) -> Runner:
    return Runner(
        decoder,
        CpuDevice(1),
        RunnerSettings(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_rows=ROWS,
            max_context=CONTEXT,
            speculate="off" if drafter is None else kind,
            kv_dtype=kv_dtype,
        ),
        drafter=drafter,
    )


@pytest.mark.parametrize("num_blocks", [60, 300], ids=["preempting", "roomy"])
@pytest.mark.parametrize(
    ("case", "kv_dtype"),
    [("llama_tied", "full"), ("qwen3", "int8"), ("gemma3", "int4"), ("qwen2_window", "full")],
)
def test_a_model_is_a_perfect_draft_model_of_itself(case: str, kv_dtype: KvFormat, num_blocks: int) -> None:
    """In C++ and op by op, with windows and several KV groups."""
    decoder = load(case)
    num_blocks *= decoder.spec.kv_groups.num_groups
    expected = drive(runner_of(decoder, None, num_blocks, kv_dtype=kv_dtype), decoder, num_blocks)
    runner = runner_of(decoder, load(case, grouped=False), num_blocks, kv_dtype=kv_dtype)
    assert drive(runner, decoder, num_blocks) == expected
    rows = runner.drafted
    assert rows is not None
    assert rows.num_drafted > 150
    assert rows.num_accepted == rows.num_drafted


def test_a_spoilt_draft_model_is_right_less_often_and_changes_nothing() -> None:
    decoder = load("llama_tied")
    expected = drive(runner_of(decoder, None, 300), decoder, 300)
    runner = runner_of(decoder, load("llama_tied", spoilt=True), 300)
    assert drive(runner, decoder, 300) == expected
    rows = runner.drafted
    assert rows is not None
    assert 0 < rows.num_accepted < rows.num_drafted


def test_a_prompt_given_up_halfway_is_not_computed_further(monkeypatch: Any) -> None:
    """The blocks of its other half are not its own: block tables still name those of the row's last request."""
    left: list[int] = []
    monkeypatch.setattr(ChainDrafter, "leave", lambda _, rows: left.extend(len(own.tokens) for own in rows))
    decoder = load("llama_tied")
    runner = runner_of(decoder, load("llama_tied", grouped=False), 60)
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=60, block_size=BLOCK, max_running=ROWS, token_budget=BUDGET, mixed_budget=16)
    )
    prompt = np.arange(3 * BUDGET, dtype=np.int32) % VOCAB
    params = RowParams(SamplingParams(max_tokens=OUTPUT), ())
    scheduler.submit(Request(id=1, prompt=prompt, max_tokens=OUTPUT, row_params=params))
    run_step(scheduler, runner)
    scheduler.abort(1)
    scheduler.submit(Request(id=2, prompt=prompt[:5], max_tokens=OUTPUT, row_params=params))
    run_step(scheduler, runner)
    assert left == [BUDGET]


def run_step(scheduler: Scheduler, runner: Runner) -> None:
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = runner.launch(plan).wait()
    scheduler.apply(plan.step_no, result.drawn(), result.counts)


@pytest.mark.parametrize(("kind", "make"), [("eagle", eagle), ("eagle", eagle3), ("medusa", medusa)])
@pytest.mark.parametrize("case", ["llama", "qwen2_window"])
def test_heads_change_no_token(kind: str, make: Any, case: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    decoder = load(case)
    num_blocks = 70 * decoder.spec.kv_groups.num_groups
    expected = drive(runner_of(decoder, None, num_blocks), decoder, num_blocks)
    runner = runner_of(decoder, make(tmp_path, decoder), num_blocks, kind)
    assert drive(runner, decoder, num_blocks) == expected
    rows = runner.drafted
    assert rows is not None
    assert rows.num_drafted > 150


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_feature_drafts_follow_from_the_tokens_alone(make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """What the drafter proposes for a row, caught up over many steps, is what it proposes for the same tokens at once.
    Without prefix hits: there the state before the first computed token is unknown."""
    torch.manual_seed(5)
    decoder = load("llama")
    drafter = make(tmp_path, decoder)
    runner = runner_of(decoder, drafter, 300, "eagle")
    propose, asked = ChainDrafter.propose, []

    def recorded(self: ChainDrafter, asks: list[DraftAsk]) -> list[Int32s]:
        found = propose(self, asks)
        for ask, drafts in zip(asks, found, strict=True):
            if runner.sampler.row_params.temperature[ask.row] == 0:
                asked.append((ask.tokens.tolist(), drafts.tolist()))
        return found

    monkeypatch.setattr(ChainDrafter, "propose", recorded)
    drive(runner, decoder, 300, prefix_cache=False)
    chosen = asked[::11]
    assert len(chosen) > 8
    for tokens, drafts in chosen:
        assert drafts_at_once(decoder, drafter, tokens, len(drafts)) == drafts


def drafts_at_once(decoder: Decoder, drafter: EagleDrafter, tokens: list[int], num_drafts: int) -> list[int]:
    """Greedy, from empty caches."""
    blocks, taps = list(range(1, CONTEXT // BLOCK)), None
    batch = make_batch([(tokens, 0, blocks)], BLOCK)
    layers = np.array(drafter.spec.target_layers, np.int64)
    if len(layers):
        batch.taps = taps = Taps(layers, torch.empty(len(tokens), len(layers), HIDDEN))
    kv = [torch.zeros(decoder.spec.kv_shape(CONTEXT // BLOCK, BLOCK)) for _ in range(decoder.spec.num_layers)]
    hidden = decoder.forward(batch, kv)
    fused = drafter.fuse(hidden if taps is None else taps.out.flatten(1))
    before = torch.cat([torch.zeros(1, HIDDEN), fused[:-1]])
    assert drafter.spec.decoder is not None
    kv = [torch.zeros(drafter.spec.decoder.kv_shape(CONTEXT // BLOCK, BLOCK))]
    drafts: list[int] = []
    for place in range(num_drafts):
        given = tokens if not place else drafts[-1:]
        start = 0 if not place else len(tokens) + place - 1
        states = drafter.step(before, make_batch([(given, start, blocks)], BLOCK), kv)
        before = states.hidden[-1:]
        drafts.append(int(drafter.token_ids(drafter.logits(states.for_head[-1:]).argmax(-1))))
    return drafts
