"""CudaRunner against Runner: the same plans give the same tokens, padded, chunked, sampled and scored.

On a GPU this replays graphs; elsewhere the same code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.decode_table import change_decode_table, want_few_programs
from helpers.inside import set_head, weights_of
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import with_paged_attention
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.attention.qkv import NativePrepareQkv
from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.linear.dense import Head as LmHead
from millrace.ops.triton.attention.qkv import PrepareQkvKernel
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.step import HeadShape, StepInputs, StepPlan, StepShape
from millrace.run import cuda_runner
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.graphs import shape_facts
from millrace.run.packet import decode_rows, layout
from millrace.run.runner import Runner
from millrace.run.sampling.masks import Masks, words_per_mask
from millrace.run.settings import KvFormat, RunnerSettings
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.sizes import measured_sizes

BLOCK, BLOCKS, ROWS, BUDGET = 4, 200, 6, 40
SIZES = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_rows": ROWS, "max_context": 128}


def change_sizes(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    sizes = dataclasses.replace(measured_sizes(), **changed)
    monkeypatch.setattr(shape_facts, "measured_sizes", lambda device: sizes)


def decoder_for(case: str, device: torch.device, paged: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    model = make_reference(case, num_hidden_layers=2)
    spec = spec_from_config(config_of(model))
    decoder = build_decoder(spec, StateDictSource.of(model), device=device, dtype=dtype)
    return with_paged_attention(decoder) if paged else decoder


def requests(count: int, seed: int, params: list[SamplingParams]) -> list[Request]:
    draw = random.Random(seed)
    made = []
    for index in range(count):
        chosen = params[index % len(params)]
        prompt = np.array(draw.choices(range(VOCAB), k=draw.choice([1, 2, 7, 30, 50])), np.int32)
        made.append(
            Request(
                id=index,
                prompt=prompt,
                max_tokens=chosen.max_tokens or 6,
                end_token_ids=(5,),
                min_tokens=chosen.min_tokens,
                read_cache=chosen.prompt_logprobs is None,
                row_params=RowParams(chosen, (5,)),
            )
        )
    return made


def drive(
    runner: Runner | CudaRunner,
    asked: list[Request],
    mixed_budget: int = 24,
    later: Sequence[Request] = (),
    shapes: ShapeChoice | None = None,
) -> tuple[dict[int, list[int]], list[float]]:
    """Run all requests to their end with two steps in flight; returns tokens by request and all log-probabilities.
    Requests in `later` are submitted when the others have ended."""
    limits = {"token_budget": BUDGET, "mixed_budget": mixed_budget}
    shapes = shapes or ShapeChoice(runner.shapes)
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=BLOCKS, block_size=BLOCK, max_running=ROWS, **limits), shapes=shapes
    )
    for request in asked:
        scheduler.submit(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in (*asked, *later)}
    scores: list[float] = []
    flying = []
    while scheduler.has_work or flying or later:
        if not scheduler.has_work and not flying:
            for request in later:
                scheduler.submit(request)
            later = ()
        plan = scheduler.plan(0.0)
        if plan is not None:
            flying.append((plan, runner.launch(plan)))
        if len(flying) > 1 or plan is None:
            plan, pending = flying.pop(0)
            result = pending.wait()
            outcome = scheduler.apply(plan.step_no, result.drawn())
            for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
            for columns in (result.logprobs, *(part.columns for part in result.prompt_logprobs)):
                if columns is not None:
                    scores += columns.logprobs.tolist() + columns.top_logprobs.flatten().tolist()
    return tokens, scores


def warm_up(runner: CudaRunner, shapes: ShapeChoice) -> None:
    """Capture all that is left to capture, as an idle engine does."""
    while (plan := shapes.captures.next()) is not None:
        assert runner.capture(plan)


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
KINDS = {
    "greedy": [GREEDY],
    "stops": [SamplingParams(temperature=0, max_tokens=9, min_tokens=3)],
    "sampled": [
        SamplingParams(temperature=0.9, seed=3, max_tokens=4),
        GREEDY,
        SamplingParams(temperature=1.3, top_k=7, top_p=0.8, min_p=0.02, seed=4, max_tokens=4),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, seed=5, max_tokens=4),
        SamplingParams(temperature=0, presence_penalty=0.5, logit_bias=((3, 4.0), (9, -50.0)), max_tokens=4),
    ],
    "scored": [
        msgspec.structs.replace(GREEDY, logprobs=3),
        GREEDY,
        msgspec.structs.replace(GREEDY, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=5, min_tokens=4, logprobs=0),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_as_the_plain_runner(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:  # the interpreter runs programs one by one, also those without work
        want_few_programs(monkeypatch)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for("qwen3", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    expected, expected_scores = drive(plain, requests(7, 1, KINDS[kind]))
    with quick_interpreter() if interpreted else nullcontext():
        found, scores = drive(fast, requests(7, 1, KINDS[kind]))
    assert found == expected
    assert sorted(scores) == pytest.approx(sorted(expected_scores), abs=2e-3)


class GreedyHead:
    """Wraps an LM head so that it draws greedy tokens itself for more than two rows, as a fused greedy head does."""

    def __init__(self, head: LmHead) -> None:
        self._head = head
        self.drawn: list[int] = []
        """Rows of each draw."""
        self.asked: list[int] = []
        """Rows whose logits were computed."""

    def wide(self, x: torch.Tensor, out: torch.Tensor | None = None, decode: bool = False) -> torch.Tensor:
        self.asked.append(x.shape[0])
        return self._head.wide(x, out)

    def draws(self, rows: int) -> bool:
        return rows > 2

    def draw(self, x: torch.Tensor, vocab_size: int, to: DrawnTokens) -> None:
        self.drawn.append(x.shape[0])
        tokens = self._head.wide(x)[:, :vocab_size].argmax(1)
        real = (to.rows >= 0).nonzero()[:, 0]
        to.out[to.out_start + to.out_index[real]] = tokens[real].to(to.out.dtype)
        to.last_tokens[to.rows[real].long()] = tokens[real].to(to.last_tokens.dtype)


@pytest.mark.parametrize("kind", ["greedy", "scored", "stops"])
def test_a_greedy_head_computes_logits_only_where_they_are_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    decoder = decoder_for("qwen3", place, True)
    head = GreedyHead(weights_of(decoder).head)
    set_head(decoder, head)
    fast = CudaRunner(decoder, device, RunnerSettings(token_budget=BUDGET, graphs=False, **SIZES))
    expected, expected_scores = drive(plain, requests(7, 1, KINDS[kind]))
    with quick_interpreter() if interpreted else nullcontext():
        found, scores = drive(fast, requests(7, 1, KINDS[kind]))
    assert found == expected
    assert sorted(scores) == pytest.approx(sorted(expected_scores), abs=2e-3)
    assert bool(head.drawn) == (kind != "scored")
    assert all(rows > 2 for rows in head.drawn)
    assert (max(head.asked) > 2) == (kind != "greedy")


def test_same_tokens_with_a_list_of_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large batches: decode rows come from a list, longest first and split, with or without prefill tiles, and in
    addition to a full token budget."""
    formats = ("plain", "packed", "fp8")
    change_decode_table(monkeypatch, few=dict.fromkeys(formats, ()), list_from=dict.fromkeys(formats, 0))
    monkeypatch.setattr(layout, "MIN_LISTED_ROWS", 1)
    monkeypatch.setattr(decode_rows, "LONG_TOKENS", 8)
    monkeypatch.setattr(decode_rows, "LONG_SHARE", 1.0)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for("qwen3", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    sizes = []
    # Counts what the runner does itself: tokens do not show it.
    write = fast.writer.write
    monkeypatch.setattr(fast.writer, "write", lambda plan, *rest: sizes.append(plan.num_tokens) or write(plan, *rest))
    expected, _ = drive(plain, requests(7, 6, [GREEDY]), mixed_budget=0)
    with quick_interpreter() if interpreted else nullcontext():
        assert drive(fast, requests(7, 6, [GREEDY]), mixed_budget=0)[0] == expected
    assert max(sizes) > BUDGET


def test_block_updates_that_a_packet_cannot_hold_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    monkeypatch.setattr(cuda_runner, "UPDATES_IN_PACKET", 1)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for("qwen3", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    expected, _ = drive(plain, requests(3, 5, [GREEDY]))
    with quick_interpreter() if interpreted else nullcontext():
        assert drive(fast, requests(3, 5, [GREEDY]))[0] == expected


def test_a_packed_cache_gives_the_results_of_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and chunked prompts next to decode rows. Keys and values are rounded to bfloat16 here, as a bfloat16 model
    produces them."""
    if interpreted:
        want_few_programs(monkeypatch)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)

    def run(kv_dtype: KvFormat) -> tuple[dict[int, list[int]], list[float]]:
        decoder = with_kernels(decoder_for("qwen3_heads_of_64", place, True))
        runner = CudaRunner(decoder, device, RunnerSettings(token_budget=BUDGET, kv_dtype=kv_dtype, **SIZES))
        few = msgspec.structs.replace(GREEDY, max_tokens=2)
        asked = [msgspec.structs.replace(few, logprobs=0), msgspec.structs.replace(few, prompt_logprobs=0)]
        with quick_interpreter() if interpreted else nullcontext():
            return drive(runner, with_prompts(requests(3, 2, asked), (3, BUDGET + 4, 9)))

    (full, full_scores), (packed, packed_scores) = run("full"), run("packed")
    assert packed == full
    assert packed_scores == pytest.approx(full_scores, abs=0.1)
    assert packed_scores != full_scores


def with_prompts(asked: list[Request], lengths: Sequence[int]) -> list[Request]:
    for request, length in zip(asked, lengths, strict=True):
        request.prompt = np.array(random.Random(length).choices(range(VOCAB), k=length), np.int32)
    return asked


def turn(index: int, num_tokens: int, read_cache: bool) -> Request:
    """A prompt that continues shorter ones."""
    prompt = np.array(random.Random(9).choices(range(VOCAB), k=num_tokens), np.int32)
    row_params = RowParams(msgspec.structs.replace(GREEDY, max_tokens=2))
    return Request(
        id=index, prompt=prompt, max_tokens=2, end_token_ids=(5,), read_cache=read_cache, row_params=row_params
    )  # fmt: skip


def test_a_cached_prefix_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens after a cached prefix use split KV; with graphs, once its graph is captured."""
    if interpreted:
        want_few_programs(monkeypatch)
    change_sizes(monkeypatch, split_context=8)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    decoder = with_kernels(decoder_for("qwen3_heads_of_64", place, True))
    runner = CudaRunner(decoder, device, RunnerSettings(token_budget=BUDGET, kv_dtype="packed", graphs=False, **SIZES))
    steps: list[StepPlan] = []
    # Counts what the runner does itself: tokens do not show it.
    forward = runner.run_forward
    monkeypatch.setattr(runner, "run_forward", lambda plan: steps.append(plan) or forward(plan))
    with quick_interpreter() if interpreted else nullcontext():
        found, _ = drive(runner, [turn(0, 20, True)], later=[turn(1, 25, True)])
        expected, _ = drive(runner, [turn(1, 25, False)])
    assert found[1] == expected[1]
    in_parts = [plan for plan in steps if runner.shapes.table.key_of(plan.shape).parts > 1]
    assert [(plan.num_tokens, plan.starts.tolist()) for plan in in_parts] == [(5, [20])]


def with_kernels(decoder: Decoder) -> Decoder:
    """The decoder with the Triton kernel that packs keys and values, on any device."""
    spec = decoder.spec
    for layer in weights_of(decoder).layers:
        mixer: Any = layer.mixer
        own = mixer.prepare_qkv
        if not isinstance(own, PrepareQkvKernel):
            assert isinstance(own, NativePrepareQkv)
            kernel = PrepareQkvKernel(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm_eps, *own.vectors)
            object.__setattr__(mixer, "prepare_qkv", kernel)
    return decoder


@pytest.mark.skipif(not interpreted, reason="where there is no GPU, capturing is what fails")
def test_work_that_cannot_be_captured_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    want_few_programs(monkeypatch)
    asked = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)]
    plain = Runner(decoder_for("llama", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    fast = CudaRunner(decoder_for("llama", place, True), CpuDevice(1), RunnerSettings(token_budget=BUDGET, **SIZES))
    fast.graphs.is_capturing = True
    shapes = ShapeChoice(PaddedShapes(dataclasses.replace(fast.shapes.facts, can_capture=True)))
    expected, _ = drive(plain, requests(2, 3, asked))
    with quick_interpreter():
        assert drive(fast, requests(2, 3, asked), shapes=shapes)[0] == expected
    assert not fast.graphs.is_capturing


def test_a_step_is_a_body_and_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs, or one if no row draws."""
    want_few_programs(monkeypatch)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for("llama", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    steps: list[tuple[bool, list[object]]] = []
    # Counts what the runner does itself: tokens do not show it.
    forward, run = fast.run_forward, fast.graphs.run

    def forwarded(plan):
        steps.append((bool(plan.samples.any()), []))
        return forward(plan)

    def ran(key, work, *, captures):
        steps[-1][1].append(key)
        return run(key, work, captures=captures)

    monkeypatch.setattr(fast, "run_forward", forwarded)
    monkeypatch.setattr(fast.graphs, "run", ran)
    with quick_interpreter() if interpreted else nullcontext():
        drive(fast, [turn(0, BUDGET + 10, True)])
    assert {draws for draws, _ in steps} == {True, False}
    for draws, keys in steps:
        assert [type(key) for key in keys] == [StepShape, *([HeadShape] if draws else [])]


def test_two_head_groups_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows keep their fused head beside rows that need logits; tokens and log-probabilities are unchanged."""
    if interpreted:
        want_few_programs(monkeypatch)
    change_sizes(monkeypatch, hidden_per_split_row=1 << 20)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    decoder = decoder_for("qwen3", place, True)
    head = GreedyHead(weights_of(decoder).head)
    set_head(decoder, head)
    fast = CudaRunner(decoder, device, RunnerSettings(token_budget=BUDGET, graphs=False, **SIZES))
    scored = msgspec.structs.replace(GREEDY, logprobs=2)
    kinds = [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=4, logprobs=1), GREEDY, GREEDY, scored, GREEDY]
    groups = []
    # Counts what the runner does itself: tokens do not show it.
    draw = fast.work.head
    monkeypatch.setattr(fast.work, "head", lambda head: groups.append((head.variant, head.states)) or draw(head))
    expected, expected_scores = drive(plain, requests(6, 1, kinds))
    with quick_interpreter() if interpreted else nullcontext():
        found, scores = drive(fast, requests(6, 1, kinds))
    assert found == expected
    assert sorted(scores) == pytest.approx(sorted(expected_scores), abs=2e-3)
    assert ("greedy", 4) in groups
    assert ("full", 2) in groups
    assert max(head.asked) <= 2


class Grammar:
    """Allows each row some tokens, which depend on its request and on its length."""

    def __init__(self, rng_seed: int) -> None:
        self._seed = rng_seed

    def masks(self, plan: StepPlan) -> Masks:
        assert plan.masked is not None
        due = np.flatnonzero(plan.samples)
        index = np.flatnonzero(plan.masked[due])
        bits = [self._bits(int(plan.rows[row]), int((plan.starts + plan.counts)[row])) for row in due[index]]
        return Masks(index, np.stack(bits) if bits else np.zeros((0, words_per_mask(VOCAB)), np.uint32))

    def _bits(self, row: int, position: int) -> np.ndarray:
        allowed = np.random.default_rng([self._seed, row, position]).random(32 * words_per_mask(VOCAB)) < 0.1
        allowed[11] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)


def drive_masked(runner: Runner | CudaRunner, asked: list[Request], grammar: Grammar) -> dict[int, list[int]]:
    """Like `drive`, one step at a time; every second table row is masked."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=BLOCKS,
            block_size=BLOCK,
            max_running=ROWS,
            token_budget=BUDGET,
            mixed_budget=BUDGET,
        ),
        shapes=ShapeChoice(runner.shapes),
    )
    for request in asked:
        scheduler.submit(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in asked}
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        is_masked = plan.samples & (plan.rows % 2 == 1)
        masked = dataclasses.replace(plan, masked=is_masked if is_masked.any() else None)
        runner.forward(masked)
        inputs = None if masked.masked is None else StepInputs(masked.step_no, grammar.masks(masked))
        pending = runner.draw(masked, inputs)
        outcome = scheduler.apply(plan.step_no, pending.wait().drawn())
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            tokens[request_id].append(token)
    return tokens


def test_masked_rows_draw_the_tokens_of_the_plain_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    plain = Runner(decoder_for("qwen3", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for("qwen3", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    kinds = [GREEDY, GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=4), KINDS["sampled"][3]]
    free, _ = drive(plain, requests(4, 1, kinds))
    expected = drive_masked(plain, requests(4, 1, kinds), Grammar(5))
    assert expected != free
    with quick_interpreter() if interpreted else nullcontext():
        assert drive_masked(fast, requests(4, 1, kinds), Grammar(5)) == expected


def test_masks_must_be_those_that_the_plan_announced() -> None:
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    runner = CudaRunner(decoder_for("llama", place, True), device, RunnerSettings(token_budget=BUDGET, **SIZES))
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=BLOCKS,
            block_size=BLOCK,
            max_running=ROWS,
            token_budget=BUDGET,
            mixed_budget=BUDGET,
        ),
        shapes=ShapeChoice(runner.shapes),
    )
    for request in requests(1, 3, [GREEDY]):
        scheduler.submit(request)
    plan = scheduler.plan(0.0)
    assert plan is not None
    plan = dataclasses.replace(plan, masked=np.array([True]), samples=np.array([True]))
    with quick_interpreter() if interpreted else nullcontext():
        runner.forward(plan)
        with pytest.raises(ValueError, match=r"announced .* \[0\]"):
            runner.draw(plan).wait()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["full", "packed"])
def test_full_chunks_use_cudnn_attention(kv_dtype: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured during warm-up, with the same results as tiles; the rest of a prompt uses tiles."""
    device = open_device(RunConfig(device="cuda"))
    rng = np.random.default_rng(9)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (BUDGET, 3 * BUDGET, 2 * BUDGET + 17)]

    def run(worth_it: int) -> tuple[list[float], set[int]]:
        monkeypatch.setattr(shape_facts, "CUDNN_MIN_QUERIES", worth_it)
        decoder = decoder_for("qwen3_heads_of_64", place, True, torch.bfloat16)
        runner = CudaRunner(decoder, device, RunnerSettings(token_budget=BUDGET, kv_dtype=kv_dtype, **SIZES))
        shapes = ShapeChoice(runner.shapes)
        warm_up(runner, shapes)
        scores: list[float] = []
        for index, prompt in enumerate(prompts):  # one after the other: whole chunks
            asked = Request(id=index, prompt=prompt, max_tokens=2, row_params=RowParams(params, ()))
            scores += drive(runner, [asked], shapes=shapes)[1][:6]  # of the first token; later tokens may differ
        captured = [key for key in runner.graphs.captured if isinstance(key, StepShape)]
        found = map(runner.shapes.table.key_of, captured)
        return scores, {key.context for key in found if key.long_from}

    (scores, contexts), (tiled_scores, none) = run(BUDGET), run(10 * BUDGET)
    assert contexts == {0, BUDGET, 2 * BUDGET}
    assert not none
    assert scores == pytest.approx(tiled_scores, abs=0.1)


class FakeGraph:
    """Stands in for a CUDA graph on a CPU: replay runs the work, capture does nothing."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.graph, self._work = self, work

    def replay(self) -> None:
        self.output = self._work()


def short_requests(params: list[SamplingParams]) -> list[Request]:
    """Two of them end before the others. The interpreter is slow with long prompts."""
    lengths = (2, 2, 4, 4)
    params = [msgspec.structs.replace(params[i % len(params)], max_tokens=n) for i, n in enumerate(lengths)]
    return with_prompts(requests(len(lengths), 4, params), (1, 2, 3, 3))


@pytest.mark.skipif(not interpreted, reason="a GPU captures real graphs")
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_larger_graph_is_the_fallback_for_a_missing_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want_few_programs(monkeypatch)
    plain = Runner(decoder_for("llama", torch.device("cpu"), False), CpuDevice(1), RunnerSettings(**SIZES))
    fast = CudaRunner(decoder_for("llama", place, True), CpuDevice(1), RunnerSettings(token_budget=BUDGET, **SIZES))

    def fake_capture(key: object, work: Callable[[], torch.Tensor]) -> FakeGraph:
        fast.graphs.captured[key] = graph = FakeGraph(work)
        return graph

    monkeypatch.setattr(fast.graphs, "capture", fake_capture)
    fast.graphs.is_capturing = True
    expected, _ = drive(plain, short_requests(KINDS[kind]))
    shapes = ShapeChoice(PaddedShapes(dataclasses.replace(fast.shapes.facts, can_capture=True)))
    shapes.captures.waiting.clear()
    with quick_interpreter():
        given = {fast.shapes.table.decode(4), HeadShape(4, "greedy"), HeadShape(4, "full")}
        for part in given:
            shapes.captures.want(part)
        warm_up(fast, shapes)
        assert set(fast.graphs.captured) == given
        assert drive(fast, short_requests(KINDS[kind]), shapes=shapes)[0] == expected
        missed = set(shapes.captures.waiting)
        assert HeadShape(2, "greedy" if kind == "greedy" else "full") in missed
        assert not missed & set(fast.graphs.captured)
        warm_up(fast, shapes)
        assert missed <= set(fast.graphs.captured)
        assert drive(fast, short_requests(KINDS[kind]), shapes=shapes)[0] == expected
