"""Grammars, predictions and drafts on a GPU: the device proposes, from the request's prediction first; the host masks
every place, and forced tokens come as drafts.

The answers are those of the plain runner without drafts, and valid. On a GPU this replays graphs; elsewhere the same
code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.served import wait_until
from helpers.small_decoder import decoder_for
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

pytest.importorskip("llguidance")

from millrace.config import RunConfig
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.cycle import Confirmed, Cycle
from millrace.engine.figures.draft_figures import DraftFigures
from millrace.engine.fronts.requests import to_request
from millrace.engine.grammars import Grammars
from millrace.link.messages import NewRequest, pack_tokens
from millrace.params.grammar import Grammar
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import StepPlan
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.drafting.models import DrafterModel
from millrace.run.facts import RunnerFacts
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.stand_in import build_stand_in

END, VOCAB, ROWS, BLOCK, BLOCKS = 299, 300, 16, 4, 100
SIZES = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_rows": ROWS, "max_context": 96}
FACTS = RunnerFacts(min_jump=1000, verifies_adjusted=False)
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
OBJECT, NUMBERS = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", r"\[1(,[12]){1,3}\]")


class Answers:
    """Runs requests to their end, and keeps what was drawn."""

    def __init__(self, runner: Runner | CudaRunner, drafts: DraftSettings) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        """By request: the most that one step gave."""
        self.plans: list[StepPlan] = []
        self.figures = DraftFigures("ngram")
        self.num_ended = 0
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=BLOCKS,
                block_size=BLOCK,
                max_running=ROWS,
                token_budget=32,
                drafts=drafts,
            ),
            shapes=ShapeChoice(runner.shapes),
        )
        tokenizer = build_stand_in({"vocab_size": VOCAB, "eos_token_id": END})
        self.grammars = Grammars(lambda: GrammarEnvironment(tokenizer, VOCAB, 1))
        self.constrained = ConstrainedRequests(self.grammars)
        self.cycle = Cycle(
            *(self.scheduler, runner, self),
            # All that is forced must come as drafts.
            facts=dataclasses.replace(FACTS, takes_forced=drafts.max_drafts > 0),
            clock=lambda: 0.0,
            probe=lambda: None,
            masks=self.constrained,
        )

    def run(self, asked: list[SamplingParams]) -> dict[int, list[int]]:
        ready: list[Request] = []
        for index, params in enumerate(asked):
            prompt = pack_tokens(np.array(PROMPTS[index % len(PROMPTS)], np.int32))
            message = NewRequest(id=index, prompt=prompt, params=params, end_token_ids=(END,), arrival=0.0)
            # What the engine's loop makes of a message.
            request = to_request(message, FACTS)
            if not self.constrained.hold(request, params, 0.0):
                ready.append(request)

        def are_ready() -> bool:
            ready.extend(self.constrained.take_ready(0.0))
            return not self.constrained.is_compiling

        wait_until(are_ready, "compiled grammars")
        for request in sorted(ready, key=lambda request: request.id):
            self.scheduler.submit(request)
        while self.cycle.advance():
            assert self.constrained.take_failed() == []
        assert self.num_ended == len(asked)
        self.constrained.shut_down()
        return self.tokens

    def on_launched(self, plan: StepPlan, now: float) -> None:
        self.plans.append(plan)

    def on_tokens(self, done: Confirmed) -> None:
        ids, tokens = done.outcome.request_ids.tolist(), done.outcome.tokens.tolist()
        for request_id, token in zip(ids, tokens, strict=True):
            self.tokens.setdefault(request_id, []).append(token)
            self.num_tokens[request_id] = max(self.num_tokens.get(request_id, 0), ids.count(request_id))
        self.num_ended += len(done.outcome.ended)

    def on_step_done(self, done: Confirmed) -> None:
        self.figures.on_step(done.plan, done.result)

    def on_ended(self, ended: Any, now: float) -> None:
        self.num_ended += len(ended)


PROMPTS = (list(b"ab"), list(b"1,2,1,2,"), list(b"xyxyxy"))
OBJECT_ROW = SamplingParams(temperature=0.0, max_tokens=40, grammar=OBJECT)
NUMBERS_ROW = SamplingParams(temperature=0.6, seed=1, max_tokens=40, grammar=NUMBERS)
FREE = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def both(
    asked: list[SamplingParams],
    speculate: str,
    drafts: DraftSettings,
    *,
    runs_fast: bool = True,
    drafter: DrafterModel | None = None,
) -> tuple[Answers, Answers]:
    """Without drafts on the plain runner, and with drafts."""
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    plain = Answers(
        Runner(decoder_for(torch.device("cpu"), paged=False, **MODEL), CpuDevice(1), RunnerSettings(**SIZES)),
        DraftSettings(),
    )
    runner = CudaRunner(
        decoder_for(place, paged=True, **MODEL),
        device,
        RunnerSettings(token_budget=32, speculate=speculate, **SIZES),
        drafter=drafter,
    )
    fast = Answers(runner, drafts)
    plain.run(asked)
    with quick_interpreter() if interpreted else nullcontext():
        fast.run(asked if runs_fast else [])
    return plain, fast


def test_rows_under_a_grammar_have_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the grammar forces, and what the device finds in the text, beside a free row."""
    if interpreted:
        want_few_programs(monkeypatch, most=4)
    plain, fast = both([OBJECT_ROW, NUMBERS_ROW, FREE], "ngram", DraftSettings(3, max_places=ROWS))
    assert fast.tokens == plain.tokens
    for index in range(2):
        json.loads(text(fast.tokens[index]))
    forced = [len(given.tokens) for plan in fast.plans for given in plan.forced]
    assert max(forced) >= 3
    assert min(fast.num_tokens[0], fast.num_tokens[1]) > 1
    assert len(fast.plans) < 0.7 * len(plain.plans)
    stats = fast.figures.stats()["grammar"]
    assert stats.accepted == stats.proposed, "what is forced is drawn"


def test_a_prediction_is_used_first_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of it is wrong, and it ends with a token that the model does not have."""
    if interpreted:
        want_few_programs(monkeypatch, most=4)
    free, sizes = msgspec.structs.replace(FREE, max_tokens=10), DraftSettings(3, max_places=ROWS)
    plain, _ = both([free], "ngram", sizes, runs_fast=False)
    right = plain.tokens[0]
    wrong = [*right[:5], (right[5] + 1) % 256, *right[6:], VOCAB]
    asked = [msgspec.structs.replace(free, prediction=tuple(wrong)), OBJECT_ROW]
    plain, fast = both(asked, "ngram", sizes)
    assert plain.tokens[0] == right
    assert fast.tokens == plain.tokens
    stats = fast.figures.stats()["prediction"]
    assert sum(stats.accepted) >= 4
    assert sum(stats.accepted) < sum(stats.proposed) <= sum(stats.accepted) + 3
    assert "ngram" not in fast.figures.stats() or sum(fast.figures.stats()["ngram"].proposed) < 3


@pytest.mark.gpu
@pytest.mark.skipif(interpreted, reason="takes minutes interpreted")
@pytest.mark.parametrize("max_drafts", [1, 3, 7])
@pytest.mark.parametrize("speculate", ["ngram", "suffix", "draft"])
def test_grammars_and_drafters_cross(speculate: str, max_drafts: int) -> None:
    """Rows with and without grammars, greedy and sampled, come and go."""
    drafter = decoder_for(place, paged=True, **MODEL) if speculate == "draft" else None
    kinds = [OBJECT_ROW, FREE, NUMBERS_ROW, msgspec.structs.replace(FREE, temperature=0.7, seed=5, max_tokens=20)]
    asked = [msgspec.structs.replace(kind, seed=index) for index, kind in enumerate(kinds * 4)]
    plain, fast = both(asked, speculate, DraftSettings(max_drafts, max_places=ROWS), drafter=drafter)
    assert fast.tokens == plain.tokens
    for index, params in enumerate(asked):
        if params.grammar is not None:
            json.loads(text(fast.tokens[index]))
    assert any(plan.forced for plan in fast.plans)
    assert sum(len(plan.rows) for plan in fast.plans) < sum(len(plan.rows) for plan in plain.plans)
