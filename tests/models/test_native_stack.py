"""All layers in one native call against `Decoder.run_layers`, which calls the same kernels: bit-equal."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.inside import without_compiler
from helpers.paged import PagedDriver, make_batch
from helpers.tiny_models import CASES, HYBRIDS, VOCAB, StateDictSource, config_of, make_reference

from millrace.config import DEFAULT_MODEL
from millrace.models.batch import ForwardBatch
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder, load_decoder
from millrace.models.native_stack import KINDS, native_stack_missing
from millrace.models.spec.families import spec_from_config
from millrace.ops.attention.rows import plain_rows
from millrace.ops.cpp import native
from millrace.run.device.device import CpuDevice
from millrace.run.table.inputs import last_tokens
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
OTHERS = (
    *("moe", "mixtral", "gpt_oss", "olmo", "exaone4", "ernie4_5", "dots1", "glm", "deepseek"),
    *("cohere", "starcoder2", "gpt_neox", "stablelm", "nemotron", "arcee", "hunyuan"),
)
DENSE = [case for case in CASES if case not in HYBRIDS and not any(word in case for word in OTHERS) and case != "phi"]


def load(case: str, dtype: torch.dtype) -> Decoder:
    """In one KV group; for several see test_kv_groups.py."""
    model = make_reference(case)
    spec = replace(spec_from_config(config_of(model)), has_kv_groups=False)
    return build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=dtype)


def mixed_batches(seed: str, vocab: int, block_size: int) -> list[ForwardBatch]:
    """Steps of growing sequences: long chunks, short chunks and single tokens in one batch."""
    draw = random.Random(seed)
    free = list(range(1, 256))
    draw.shuffle(free)
    computed, blocks, batches = [0] * 5, [[] for _ in range(5)], []
    for _ in range(8):
        rows = []
        for index in draw.sample(range(5), draw.randint(1, 5)):
            tokens = draw.choices(range(vocab), k=draw.choice((1, 1, 1, 3, 8, 17)))
            while len(blocks[index]) * block_size < computed[index] + len(tokens):
                blocks[index].append(free.pop())
            rows.append((tokens, computed[index], list(blocks[index])))
            computed[index] += len(tokens)
        batches.append(make_batch(rows, block_size))
    return batches


def check_same(decoder: Decoder, batches: list[ForwardBatch], block_size: int) -> None:
    native_kv, expected_kv = (PagedDriver(decoder, block_size).kv for _ in range(2))
    for batch in batches:
        ours, expected = decoder.forward(batch, native_kv), decoder.run_layers(batch, expected_kv)
        assert ours.isfinite().all()
        assert torch.equal(ours, expected)
    for ours, expected in zip(native_kv, expected_kv, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", DENSE)
def test_the_native_stack_equals_run_layers(case: str, dtype: torch.dtype) -> None:
    if native.native_missing(CPU):
        pytest.skip("there are no native kernels here")
    decoder = load(case, dtype)
    assert decoder.native_stack is not None
    for block_size in (5, 16):
        check_same(decoder, mixed_batches(case, VOCAB, block_size), block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama_tied", "gemma3", "qwen3_moe"])
def test_last_tokens_alone_have_the_same_results_as_among_all(case: str, dtype: torch.dtype) -> None:
    decoder = load(case, dtype)
    whole_kv, kept_kv, expected_kv = (PagedDriver(decoder, 16).kv for _ in range(3))
    draw, device = random.Random(case), CpuDevice(1)
    for batch in mixed_batches(case, VOCAB, 16):
        whole = decoder.forward(batch, whole_kv)
        rows = plain_rows(batch.rows)
        num_rows = len(rows.seq_lens_host)
        due = np.array(sorted(draw.sample(range(num_rows), draw.randint(0, num_rows))), np.int64)
        batch.last = last_tokens(batch, due, device)
        wanted = whole[[rows.query_starts_host[row + 1] - 1 for row in due.tolist()]]
        assert torch.equal(decoder.run_layers(batch, expected_kv), wanted)
        assert torch.equal(decoder.forward(batch, kept_kv), wanted)
    for whole, kept in zip(whole_kv, kept_kv, strict=True):
        assert torch.equal(whole.nan_to_num(7.0), kept.nan_to_num(7.0))


@pytest.mark.parametrize("case", [case for case in CASES if case not in DENSE])
def test_models_with_other_layers_have_no_native_stack(case: str) -> None:
    assert load(case, torch.float32).native_stack is None


def test_without_a_compiler_there_is_no_native_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    assert load("llama", torch.float32).native_stack is None


def test_time_is_reported_by_kind_of_work() -> None:
    if native.native_missing(CPU):
        pytest.skip("there are no native kernels here")
    decoder = load("gemma3", torch.bfloat16)
    batch = mixed_batches("time", VOCAB, 16)[0]
    spent = torch.zeros(len(KINDS), dtype=torch.int64)
    decoder.forward(batch, PagedDriver(decoder, 16).kv, spent)
    once = spent.clone()
    layers = torch.tensor([kind not in ("head", "draw", "other") for kind in KINDS])
    assert torch.equal(once > 0, layers)
    decoder.forward(batch, PagedDriver(decoder, 16).kv, spent)
    assert torch.equal(spent > once, layers)


def test_the_default_model_equals_run_layers() -> None:
    if native.native_missing(CPU):
        pytest.skip("there are no native kernels here")
    decoder = load_decoder(resolve_model(DEFAULT_MODEL), device=CPU, dtype=torch.bfloat16)
    assert decoder.native_stack is not None
    assert decoder.native_stack.can_run_whole_steps
    check_same(decoder, mixed_batches("default", decoder.spec.vocab_size, 16), 16)


def test_prompts_of_the_default_model_equal_run_layers() -> None:
    """Hundreds of tokens use other kernels than a few: in one row, in several rows, and next to decode rows."""
    if native.native_missing(CPU):
        pytest.skip("there are no native kernels here")
    decoder = load_decoder(resolve_model(DEFAULT_MODEL), device=CPU, dtype=torch.bfloat16)
    draw = random.Random(5)
    tokens = [draw.choices(range(decoder.spec.vocab_size), k=count) for count in (3, 150, 61)]
    blocks = [list(range(1, 20)), list(range(20, 40)), list(range(40, 60))]
    steps = [
        [(tokens[0], 0, blocks[0]), (tokens[1], 0, blocks[1])],
        [(tokens[2], 0, blocks[2]), (tokens[0][:1], 3, blocks[0]), (tokens[1][:80], 150, blocks[1])],
    ]
    check_same(decoder, [make_batch(rows, 16) for rows in steps], 16)


def test_a_field_that_the_kernels_do_not_know_is_never_ignored() -> None:
    """A new field of a spec is a reason to run op by op until the C++ layers honour it."""
    decoder = load("llama", torch.float32)
    assert not native_stack_missing(decoder.spec, decoder.choices)
    unknown = replace(decoder.spec, layers=(replace(decoder.spec.layers[0], mixer="unknown"),))  # type: ignore[arg-type]
    assert native_stack_missing(unknown, decoder.choices) == "its mixer is 'unknown'"
    with_sinks = replace(decoder.spec, attention_sinks=True)
    assert native_stack_missing(with_sinks, decoder.choices) == "its attention_sinks is True"
