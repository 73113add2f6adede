"""CudaRunner with n-gram drafts draws the tokens of the plain runner without, several steps in flight.

On a GPU this replays graphs; elsewhere the same code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import decoder_for, with_paged_attention
from helpers.tiny_models import StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafts import DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.graphs.step_work import Accept
from millrace.run.packet import layout
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings
from millrace.run.shapes.order import placed_shapes
from millrace.run.shapes.table import ShapeFacts, ShapeTable

BLOCK, BLOCKS, ROWS, BUDGET = 4, 200, 16, 40
SIZES = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_rows": ROWS, "max_context": 64}


def requests(kinds: list[SamplingParams]) -> list[Request]:
    """Repetitive prompts: their continuations are found in them."""
    made = []
    for index, params in enumerate(kinds):
        prompt = np.array(([3, 9, 4, 7 + index] * 5)[: 9 + 2 * index], np.int32)
        limit = params.max_tokens or 12
        made.append(
            Request(
                id=index, prompt=prompt, max_tokens=limit, end_token_ids=(5,), row_params=RowParams(params, (5,)),
                can_draft=params.logprobs is None,
            )
        )  # fmt: skip
    return made


class Drive:
    """Runs requests to their end with two steps in flight; those in `later` are submitted after some steps."""

    def __init__(self, runner: Runner | CudaRunner, drafts: DraftSettings) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=BLOCKS,
                block_size=BLOCK,
                max_running=ROWS,
                token_budget=BUDGET,
                mixed_budget=24,
                drafts=drafts,
            ),
            shapes=ShapeChoice(runner.shapes),
        )
        self.counts: list[int] = []
        self.num_mixed = 0

    def run(self, asked: list[Request], later: list[Request]) -> dict[int, list[int]]:
        for request in asked:
            self.scheduler.submit(request)
        tokens: dict[int, list[int]] = {request.id: [] for request in (*asked, *later)}
        flying, step = [], 0
        while self.scheduler.has_work or flying:
            step += 1
            if step == 5:
                for request in later:
                    self.scheduler.submit(request)
            plan = self.scheduler.plan(0.0)
            if plan is not None:
                self.num_mixed += plan.draft_places is not None and int(plan.counts.max()) > 1
                flying.append((plan, self.runner.launch(plan)))
            if len(flying) > 1 or plan is None:
                plan, pending = flying.pop(0)
                result = pending.wait()
                self.counts += [] if result.counts is None else result.counts.tolist()
                outcome = self.scheduler.apply(plan.step_no, result.drawn(), result.counts)
                for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                    tokens[request_id].append(token)
        return tokens


GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.4, seed=3, max_tokens=10, ignore_eos=True)


@pytest.mark.skipif(interpreted, reason="takes minutes interpreted; each kernel is held to its reference elsewhere")
@pytest.mark.parametrize("listed_from", [8, 1])
def test_drafts_change_no_token(listed_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    monkeypatch.setattr(layout, "MIN_LISTED_ROWS", listed_from)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    plain = Runner(decoder_for(torch.device("cpu"), paged=False), CpuDevice(1), RunnerSettings(**SIZES))
    fast = CudaRunner(
        decoder_for(place, paged=True), device, RunnerSettings(token_budget=BUDGET, speculate="ngram", **SIZES)
    )
    kinds = [GREEDY, SAMPLED, msgspec.structs.replace(GREEDY, max_tokens=9)]
    asked, later = requests(kinds)[:2], requests(kinds)[2:]
    expected = Drive(plain, DraftSettings()).run(asked, later)
    drive = Drive(fast, DraftSettings(max_drafts=3, max_places=ROWS))
    asked, later = requests(kinds)[:2], requests(kinds)[2:]
    with quick_interpreter() if interpreted else nullcontext():
        assert drive.run(asked, later) == expected
    assert max(drive.counts) > 1, "some drafts were right"
    assert drive.num_mixed > 0


@pytest.mark.skipif(not interpreted, reason="a GPU captures real graphs")
def test_bodies_with_places_are_warmed_up_with_what_accepts_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    want_few_programs(monkeypatch)
    fast = CudaRunner(
        decoder_for(place, paged=True), CpuDevice(1), RunnerSettings(token_budget=BUDGET, speculate="ngram", **SIZES)
    )
    ran: list[object] = []
    # Records the graphs that a GPU would replay: tokens do not show them.
    monkeypatch.setattr(fast.graphs, "run", lambda key, work, captures: ran.append(key) or work())
    table = fast.writer.shapes
    one, two = (table.decode(1, places=places) for places in (1, 2))
    assert {one, two} <= set(placed_shapes(table))
    assert all(part.rows * part.places <= ROWS for part in placed_shapes(table))
    tiled = ShapeTable(dataclasses.replace(table.facts, tile_decode_rows=True))
    assert {part.places for part in placed_shapes(tiled)} == {1}
    with quick_interpreter():
        for part in (one, two):
            fast.warm_up.capture_part(part)
    assert set(ran) == {one, two, Accept(None), Accept(two)}


def test_places_are_enough_or_as_many_as_fit() -> None:
    table = ShapeTable(ShapeFacts(max_rows=256, token_budget=256, queries_per_tile=8, block_size=BLOCK))
    assert [table.places(wanted, 4) for wanted in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert [table.places(4, rows) for rows in (1, 64, 65, 128, 129, 256)] == [4, 4, 2, 2, 1, 1]


def other_model() -> Decoder:
    """Of another shape than the target: other heads, so that its attention has other tiles."""
    model = make_reference("llama_tied")
    spec = spec_from_config(config_of(model))
    source = StateDictSource.of(model)
    return with_paged_attention(build_decoder(spec, source, device=place, dtype=torch.float32))


@pytest.mark.parametrize("is_own", [True, False], ids=["itself", "another"])
def test_a_draft_model_changes_no_token(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted and not is_own:
        pytest.skip("takes minutes interpreted")
    if interpreted:
        want_few_programs(monkeypatch)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    plain = Runner(decoder_for(torch.device("cpu"), paged=False), CpuDevice(1), RunnerSettings(**SIZES))
    drafter = decoder_for(place, paged=True) if is_own else other_model()
    fast = CudaRunner(
        decoder_for(place, paged=True),
        device,
        RunnerSettings(
            token_budget=BUDGET,
            speculate="draft",
            **SIZES,
        ),
        drafter=drafter,
    )
    # Interpreted, two rows that start together must do.
    num_rows, length = (2, 6) if interpreted else (3, 14)
    kinds = [msgspec.structs.replace(kind, max_tokens=length) for kind in (GREEDY, SAMPLED, GREEDY)[:num_rows]]
    expected = Drive(plain, DraftSettings()).run(requests(kinds)[:2], requests(kinds)[2:])
    drive = Drive(fast, DraftSettings(max_drafts=3, max_places=ROWS))
    with quick_interpreter() if interpreted else nullcontext():
        assert drive.run(requests(kinds)[:2], requests(kinds)[2:]) == expected
    if is_own:  # three drafts were right whenever there was room for them
        assert max(drive.counts) == 4
