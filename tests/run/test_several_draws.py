"""A row that draws at several places gives the states and tokens of the same tokens computed one at a time, bit by bit.

So a step may verify drafts without changing an answer, whatever else it computes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.stored_blocks import StoredSource
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from torch import Tensor

from millrace.config import RunConfig
from millrace.models import kept_weights
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.cpp import native
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.cpu.native_step import NativeStep
from millrace.run.device.device import open_device
from millrace.run.runner import Runner
from millrace.run.sampling.masks import Masks
from millrace.run.settings import KvFormat, RunnerSettings
from millrace.run.table.request_table import ON_DEVICE

ROWS, BLOCK, WIDTH = 5, 4, 12
PROMPTS = (9, 1, 14, 5, 30)
"""Prompt lengths. The last row only computes its prompt, beside the others."""
LENGTH = 40
OUTPUT = 24
"""Output tokens that each of the other rows computes."""
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2**63 + 5),
    SamplingParams(temperature=1.2, top_k=5, min_p=0.01, seed=0),
    SamplingParams(temperature=0.0),
)
STORED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
FORMATS = {
    "embed_tokens.weight": "Q8_0",
    "q_proj.weight": "Q4_K",
    "k_proj.weight": "Q4_K",
    "v_proj.weight": "Q6_K",
    "o_proj.weight": "Q4_1",
    "gate_proj.weight": "Q5_0",
    "up_proj.weight": "Q5_0",
    "down_proj.weight": "Q3_K",
}

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")

MakeRunner = Callable[[], Runner]


def runner_of(case: str, dtype: torch.dtype, kv_dtype: KvFormat, folder: Path, has_kv_groups: bool = False) -> Runner:
    """Of a tiny model, or of `stored` quantised weights."""
    model = None if case == "stored" else make_reference(case)
    spec = spec_from_config(STORED if model is None else config_of(model))
    spec = dataclasses.replace(spec, has_kv_groups=has_kv_groups)
    file = folder / "model.gguf"
    file.write_bytes(b"weights")
    source = StoredSource(spec, FORMATS, file) if model is None else StateDictSource.of(model)
    device = open_device(RunConfig(device="cpu", threads=2))
    decoder = build_decoder(spec, source, device=device.torch_device, dtype=dtype)
    num_blocks = 1 + spec.kv_groups.num_groups * ROWS * WIDTH
    return Runner(
        decoder,
        device,
        RunnerSettings(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_rows=ROWS,
            max_context=WIDTH * BLOCK,
            kv_dtype=kv_dtype,
        ),
    )


@pytest.fixture(
    params=[
        ("llama_tied", torch.float32, "full"),
        ("llama_tied", torch.float32, "int8"),
        ("llama_tied", torch.bfloat16, "full"),
        ("llama_tied", torch.bfloat16, "int8"),
        ("gemma3", torch.float32, "full"),
        ("stored", torch.float32, "full"),
        ("stored", torch.bfloat16, "int8"),
    ],
    ids=lambda part: "-".join(map(str, part)),
)
def make_runner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    native.native()
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    return lambda: runner_of(*request.param, tmp_path)


def known_tokens() -> list[list[int]]:
    draw = random.Random(11)
    return [draw.choices(range(VOCAB), k=LENGTH) for _ in range(ROWS)]


def admit(runner: Runner) -> NativeStep:
    """Gives every row its tokens, parameters and blocks."""
    assert runner.native_step is not None
    admitted = tuple(
        Admission(row, row, np.asarray(tokens[: PROMPTS[row]], np.int32), PROMPTS[row], RowParams(PARAMS[row]))
        for row, tokens in enumerate(known_tokens())
    )
    groups = runner.table.block_tables.shape[0]
    places = [(group, row, column) for group in range(groups) for row in range(ROWS) for column in range(WIDTH)]
    block_groups, rows, columns = np.asarray(places, np.int32).T.copy()
    ids = 1 + np.random.default_rng(7).permutation(len(places)).astype(np.int32)
    none, no_rows = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    shape = exact_shape(none)
    plan = StepPlan(
        0, none, none, none, no_rows, rows, columns, ids, shape, admitted=admitted, block_groups=block_groups
    )
    runner.table.update(plan)
    runner.sampler.update(plan)
    return runner.native_step


Chunk = tuple[int, int, int, int]
"""(row, start, count, draws)"""


def run_chunks(step: NativeStep, chunks: list[Chunk], first_on_device: bool = False) -> tuple[Tensor, list[int]]:
    """Compute the rows' known tokens, and draw. With `first_on_device` a row's first token is its last drawn one."""
    known = known_tokens()
    rows, starts, counts, draws = np.asarray(chunks, np.int32).T.copy()
    parts = [known[row][start : start + count] for row, start, count, _ in chunks]
    if first_on_device:
        parts = [[ON_DEVICE, *part[1:]] for part in parts]
    tokens = np.asarray([token for part in parts for token in part], np.int32)
    hidden = step.forward_rows(rows, starts, counts, draws, tokens)
    ends = starts + counts
    positions = [np.arange(end - own + 1, end + 1, dtype=np.int32) for end, own in zip(ends, draws, strict=True)]
    drawn = step.draw(hidden, np.repeat(rows, draws), np.concatenate(positions))
    assert len(hidden) == len(drawn) == draws.sum()
    return hidden.clone(), drawn.tolist()


def run_all(step: NativeStep, chunk: int, mixed: bool) -> dict[tuple[int, int], tuple[Tensor, int]]:
    """Hidden state and drawn token by (row, position), with output in chunks that draw at every place. If `mixed`, rows
    use different chunks and the last row's prompt is computed beside them."""
    for row in range(ROWS - 1):
        run_chunks(step, [(row, 0, PROMPTS[row], 1)])
    found, computed, prompt = {}, [0] * (ROWS - 1), 0
    while min(computed) < OUTPUT:
        chunks = []
        for row in range(ROWS - 1):
            size = (1, chunk, chunk // 2 + 1, chunk)[row] if mixed else chunk
            count = min(size, OUTPUT - computed[row])
            if count and (mixed or row == computed.index(min(computed))):
                chunks.append((row, PROMPTS[row] + computed[row], count, count))
        if mixed and prompt < PROMPTS[-1]:
            chunks.insert(1, (ROWS - 1, prompt, 5, int(prompt + 5 == PROMPTS[-1])))
            prompt += 5
        hidden, drawn = run_chunks(step, chunks)
        states = iter(zip(hidden, drawn, strict=True))
        for row, start, count, draws in chunks:
            for place in range(count - draws, count):
                found[row, start + place] = next(states)
            if row < ROWS - 1:
                computed[row] += count
    return found


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
def test_states_and_tokens_are_those_of_one_token_at_a_time(make_runner: MakeRunner, mixed: bool) -> None:
    single = make_runner()
    expected = run_all(admit(single), 1, False)
    assert len(expected) == (ROWS - 1) * OUTPUT
    for chunk in (2, 4, 8):
        runner = make_runner()
        found = run_all(admit(runner), chunk, mixed)
        for key, (hidden, token) in expected.items():
            assert torch.equal(found[key][0], hidden), key
            assert found[key][1] == token, key
        for row in range(ROWS - 1):
            assert kv_bytes(runner, row) == kv_bytes(single, row)


def kv_bytes(runner: Runner, row: int) -> list[bytes]:
    """The row's whole blocks, of every tensor of the pool."""
    blocks = runner.table.block_tables[0, row, : (PROMPTS[row] + OUTPUT) // BLOCK].long()
    return [layer[:, blocks].contiguous().view(torch.uint8).numpy().tobytes() for layer in runner.kv]


def test_the_first_token_may_be_the_last_drawn_one_and_drafts_follow_it(tmp_path: Path) -> None:
    """Right drafts: greedy rows continue as they do alone."""
    alone = admit(runner_of("llama_tied", torch.float32, "full", tmp_path))
    prompt = PROMPTS[0]
    answer = run_chunks(alone, [(0, 0, prompt, 1)])[1]
    for place in range(7):
        answer += run_chunks(alone, [(0, prompt + place, 1, 1)], first_on_device=True)[1]
    step = admit(runner_of("llama_tied", torch.float32, "full", tmp_path))
    assert run_chunks(step, [(0, 0, prompt, 1)])[1] == answer[:1]
    rows, starts, counts = (np.asarray([value], np.int32) for value in (0, prompt, 4))
    hidden = step.forward_rows(rows, starts, counts, counts, np.asarray([ON_DEVICE, *answer[1:4]], np.int32))
    positions = prompt + 1 + np.arange(4, dtype=np.int32)
    is_last = np.asarray([False, False, True, False])
    assert step.draw(hidden, np.zeros(4, np.int32), positions, is_last=is_last).tolist() == answer[1:5]
    # The third drawn token is the row's last one.
    assert run_chunks(step, [(0, prompt + 3, 1, 1)], first_on_device=True)[1] == answer[4:5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_block_tables_of_their_own_give_the_same_states(dtype: torch.dtype, tmp_path: Path) -> None:
    one, several = (runner_of("gemma3", dtype, "full", tmp_path, has_groups) for has_groups in (False, True))
    assert several.table.block_tables.shape[0] > 1
    expected, found = (run_all(admit(runner), 4, True) for runner in (one, several))
    assert expected.keys() == found.keys()
    for key, (hidden, token) in expected.items():
        assert torch.equal(found[key][0], hidden), key
        assert found[key][1] == token, key


def test_draws_only_tokens_that_their_masks_allow(tmp_path: Path) -> None:
    """The same tokens as from the logits, by the sampler; states without a mask are not affected."""
    runner = runner_of("llama_tied", torch.float32, "full", tmp_path)
    step = admit(runner)
    chunks = [(row, 0, PROMPTS[row], min(3, PROMPTS[row])) for row in range(ROWS)]
    hidden, free = run_chunks(step, chunks)
    rows = np.concatenate([np.full(draws, row, np.int32) for row, _, _, draws in chunks])
    positions = np.concatenate([np.arange(count - draws + 1, count + 1) for _, _, count, draws in chunks])
    index = np.asarray([0, 2, 3, 8, 9, 11])
    bits = np.random.default_rng(5).integers(0, 2**32, (len(index), -(-VOCAB // 32)), dtype=np.uint32)
    for line, state in enumerate(index.tolist()):  # never what would have been drawn
        bits[line, free[state] // 32] &= np.uint32(~(1 << free[state] % 32) & 0xFFFFFFFF)
    masks = Masks(index, bits)
    drawn = step.draw(hidden, rows, positions.astype(np.int32), masks)
    logits = runner.decoder.logits(hidden, draws=True)
    assert drawn.tolist() == runner.sampler.draw(logits, rows, positions, masks).tokens.tolist()
    assert [state for state in range(len(free)) if drawn[state] != free[state]] == index.tolist()
    assert step.draw(hidden, rows, positions.astype(np.int32)).tolist() == free


def test_more_draws_than_tokens_are_refused(tmp_path: Path) -> None:
    step = admit(runner_of("llama_tied", torch.float32, "full", tmp_path))
    with pytest.raises(ValueError, match="3 draws"):
        run_chunks(step, [(0, 0, 2, 3)])
