"""Separate kernels for decode rows over quantised weights.

Which kernel multiplies a token depends only on the token, every way to run a step uses the same one, and deterministic
mode has only one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.grouped_plans import for_groups
from helpers.inside import program_of
from helpers.stored_blocks import StoredSource

from millrace.config import RunConfig
from millrace.models import kept_weights
from millrace.models.decode_spans import spans_of
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.cpp import native
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")

ROWS, BLOCK, WIDTH, VOCAB = 14, 4, 12, 100
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA = {
    **SIZES,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}
CAPPED = {
    **LLAMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 16,
}
MIXTURE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 512,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
FORMATS = {
    "embed_tokens.weight": "Q8_0",
    "lm_head.weight": "Q6_K",
    "q_proj.weight": "Q4_K",
    "k_proj.weight": "Q4_K",
    "v_proj.weight": "Q6_K",
    "o_proj.weight": "Q4_1",
    "gate_proj.weight": "Q5_0",
    "up_proj.weight": "Q5_0",
    "down_proj.weight": "Q3_K",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.native()
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")


def make_runner(tmp_path: Path, config: dict[str, Any] = LLAMA, deterministic: bool = False) -> Runner:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    spec = spec_from_config(config)
    device = open_device(RunConfig(device="cpu", threads=2))
    decoder = build_decoder(
        spec,
        StoredSource(spec, FORMATS, file),
        device=device.torch_device,
        dtype=torch.bfloat16,
        deterministic=deterministic,
    )
    num_blocks = spec.kv_groups.num_groups * ROWS * WIDTH + 1
    return Runner(
        decoder,
        device,
        RunnerSettings(num_blocks=num_blocks, block_size=BLOCK, max_rows=ROWS, max_context=WIDTH * BLOCK),
    )


def admission(row: int, tokens: list[int], num_prompt: int = 0, **params: Any) -> Admission:
    own = SamplingParams(temperature=1.0, seed=row, **params)
    return Admission(row, 100 + row, np.asarray(tokens, np.int32), num_prompt or len(tokens), RowParams(own))


def plan_of(step_no: int, rows: list[tuple[int, int, int, bool]], admitted: tuple[Admission, ...] = ()) -> StepPlan:
    """Rows are (table row, start, count, draws); admitted rows get all their blocks."""
    columns = np.asarray([row[:3] for row in rows], np.int32).T.copy()
    blocks = [(own.row, column, 1 + own.row * WIDTH + column) for own in admitted for column in range(WIDTH)]
    block_rows, block_cols, block_ids = np.asarray(blocks, np.int32).reshape(-1, 3).T.copy()
    return StepPlan(
        step_no=step_no,
        rows=columns[0],
        starts=columns[1],
        counts=columns[2],
        samples=np.asarray([row[3] for row in rows]),
        block_rows=block_rows,
        block_cols=block_cols,
        block_ids=block_ids,
        shape=exact_shape(columns[2]),
        admitted=admitted,
    )


def prompt_of(row: int) -> list[int]:
    draw = random.Random(row)
    return draw.choices(range(VOCAB), k=draw.randint(1, 19))


def busy_plans(seed: int, **params: Any) -> list[StepPlan]:
    """Prompts in chunks of any size, down to one token, next to few and then many decode rows."""
    draw = random.Random(seed)
    prompts = [prompt_of(row) for row in range(ROWS)]
    admitted = tuple(admission(row, tokens, **params) for row, tokens in enumerate(prompts))
    computed, made = [0] * ROWS, []
    for step_no in range(16):
        rows = []
        for row in draw.sample(range(ROWS), draw.choice((1, 4, 7, ROWS))):
            left = len(prompts[row]) - computed[row]
            count = min(left, draw.choice((1, 3, 7, 20))) if left > 0 else 1
            computed[row] += count
            rows.append((row, computed[row] - count, count, computed[row] >= len(prompts[row])))
        made.append(plan_of(step_no, rows, admitted if step_no == 0 else ()))
    return made


def drawn_by(runner: Runner, steps: list[StepPlan]) -> list[list[int]]:
    grouped = (for_groups(plan, num_groups(runner), ROWS * WIDTH) for plan in steps)
    return [runner.launch(plan).wait().tokens.tolist() for plan in grouped]


def num_groups(runner: Runner) -> int:
    return runner.decoder.spec.kv_groups.num_groups


def kv_of(runner: Runner, row: int, tokens: int) -> list[torch.Tensor]:
    """A row's keys and values, layer by layer of every group."""
    firsts = [1 + group * ROWS * WIDTH + row * WIDTH for group in range(num_groups(runner))]
    tables = [[first + column for column in range(WIDTH)] for first in firsts]
    return [
        layer[:, blocks].transpose(2, 3).flatten(1, 2)[:, :tokens].clone() for blocks in tables for layer in runner.kv
    ]


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [LLAMA, CAPPED], ids=["llama", "capped"])
def test_every_way_to_run_a_step_agrees(config: dict[str, Any], deterministic: bool, tmp_path: Path) -> None:
    """One native call for the step, one for its layers, and op by op."""
    whole, layers, op_by_op = (make_runner(tmp_path, config, deterministic) for _ in range(3))
    assert (whole.native_step is None) == (config is CAPPED)
    assert layers.decoder.native_stack is not None
    # Without the native step, and without native layers: neither can be switched off.
    layers.native_step = op_by_op.native_step = None
    op_by_op.decoder.native_stack = None
    steps = busy_plans(3)
    tokens = drawn_by(whole, steps)
    assert drawn_by(layers, steps) == tokens
    assert drawn_by(op_by_op, steps) == tokens
    for row in range(ROWS):
        lengths = [int(plan.starts[i] + plan.counts[i]) for plan in steps for i in np.flatnonzero(plan.rows == row)]
        expected = kv_of(whole, row, max(lengths, default=0))
        assert same_bits(kv_of(layers, row, max(lengths, default=0)), expected)
        assert same_bits(kv_of(op_by_op, row, max(lengths, default=0)), expected)


def test_rows_with_logprobs_draw_the_same_tokens(tmp_path: Path) -> None:
    """With log-probabilities a step is not one native call; its tokens are the same."""
    whole, parts = make_runner(tmp_path), make_runner(tmp_path)
    assert drawn_by(parts, busy_plans(5, logprobs=1)) == drawn_by(whole, busy_plans(5))


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "mixture"])
def test_decode_rows_do_not_affect_each_other_or_prompts(config: dict[str, Any], tmp_path: Path) -> None:
    row, prompt = 3, prompt_of(3)
    alone, batched = make_runner(tmp_path, config), make_runner(tmp_path, config)
    first = plan_of(0, [(row, 0, len(prompt), True)], (admission(row, prompt),))
    steps = [plan_of(1 + i, [(row, len(prompt) + i, 1, True)]) for i in range(12)]
    expected = [tokens[0] for tokens in drawn_by(alone, [first, *steps])]

    others = [other for other in range(ROWS) if other != row]
    got = [drawn_by(batched, [first])[0][0]]
    computed = dict.fromkeys(others, 0)
    for i, step in enumerate(steps):
        joining = others[: 1 + i]
        rows, admitted = [(row, int(step.starts[0]), 1, True)], []
        for other in joining:
            tokens = prompt_of(other)
            if computed[other] == 0:
                admitted.append(admission(other, tokens))
            count = len(tokens) - computed[other] if computed[other] < len(tokens) else 1
            rows.append((other, computed[other], count, True))
            computed[other] += count
        got.append(drawn_by(batched, [plan_of(1 + i, rows, tuple(admitted))])[0][0])
    assert got == expected
    length = len(prompt) + len(steps)
    assert same_bits(kv_of(alone, row, length), kv_of(batched, row, length))


def decoded_and_given(runner: Runner) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same tokens in the cache twice: drawn one by one, and given as a prompt."""
    prompt = prompt_of(1)
    steps = [plan_of(0, [(1, 0, len(prompt), True)], (admission(1, prompt),))]
    steps += [plan_of(1 + i, [(1, len(prompt) + i, 1, True)]) for i in range(8)]
    text = prompt + [tokens[0] for tokens in drawn_by(runner, steps)][:-1]
    drawn_by(runner, [plan_of(9, [(2, 0, len(text), True)], (admission(2, text),))])
    return kv_of(runner, 1, len(text)), kv_of(runner, 2, len(text))


def test_recomputation_after_preemption_is_bit_equal(tmp_path: Path) -> None:
    runner, prompt = make_runner(tmp_path), prompt_of(1)
    steps = [plan_of(0, [(1, 0, len(prompt), True)], (admission(1, prompt),))]
    steps += [plan_of(1 + i, [(1, len(prompt) + i, 1, True)]) for i in range(8)]
    text = prompt + [tokens[0] for tokens in drawn_by(runner, steps)][:-1]
    cut = len(prompt) + 3
    again = admission(2, text, num_prompt=len(prompt))
    drawn_by(runner, [plan_of(9, [(2, 0, cut, False)], (again,)), plan_of(10, [(2, cut, len(text) - cut, True)])])
    assert same_bits(kv_of(runner, 1, len(text)), kv_of(runner, 2, len(text)))


def test_deterministic_mode_has_one_kernel_for_all_rows(tmp_path: Path) -> None:
    decoded, given = decoded_and_given(make_runner(tmp_path, deterministic=True))
    assert same_bits(decoded, given)


def test_decode_kernels_round_less(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    decoded, given = decoded_and_given(runner)
    # Whether this machine has such kernels shows in no public choice.
    assert same_bits(decoded, given) == (not program_of(runner.decoder)._splits_decode)
    for one, other in zip(decoded, given, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.1 * float(other.float().std()), rtol=0.1)


def test_spans_are_tokens_of_one_kind() -> None:
    def of(flags: str) -> list[tuple[int, int, bool]]:
        spans = spans_of(np.array([flag == "d" for flag in flags]))
        return [(span.tokens.start, span.tokens.stop, span.decodes) for span in spans]

    assert spans_of(None) == ()
    assert of("d") == [(0, 1, True)]
    assert of("ddp") == [(0, 2, True), (2, 3, False)]
    assert of("pdpp") == [(0, 1, False), (1, 2, True), (2, 4, False)]
