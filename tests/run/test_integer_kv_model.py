"""Whole models on a CPU over an int8 or int4 KV cache: accuracy, independence of steps, refusals, and memory saved.

Small random models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.paged import PagedDriver
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.config import KvDtype, load_config
from millrace.engine.memory_plan import GIB, MemoryPlan, make_memory_plan
from millrace.errors import ConfigError
from millrace.models import load
from millrace.models.decoder import Decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_INT32
from millrace.run.device import kv_pool
from millrace.run.device.defaults import CPU_DEFAULTS
from millrace.run.device.kv_pool import allocate_kv, bytes_per_token, resolve_kv_dtype
from millrace.run.settings import KvFormat

CPU = torch.device("cpu")
TOKENS = 80
HEAD = 64
MEAN_ERROR, WORST_ERROR = {"int8": 0.02, "int4": 0.3}, {"int8": 0.3, "int4": 1.2}
"""Tolerance of a token's logits, relative. An int8 item is off by 1/508 of its head's largest on average, an int4 one
by 1/60 of its head's range; of two experts with similar weights the other may be chosen."""
STORED: dict[str, tuple[torch.dtype, Callable[[int], int]]] = {
    "int8": (torch.int8, lambda head_dim: head_dim + SCALE_BYTES),
    "int4": (torch.int32, lambda head_dim: head_dim // 8 + SCALE_INT32),
}
kinds = pytest.mark.parametrize("kind", STORED)


class IntegerDriver(PagedDriver):
    """Unwritten bytes are 255: -1 or 15 as an item, NaN as a scale."""

    def __init__(self, decoder: Decoder, kind: str, block_size: int = 4) -> None:
        super().__init__(decoder, block_size)
        dtype, width = STORED[kind]
        self.kv = [torch.full((*kv.shape[:4], width(kv.shape[4])), -1, dtype=dtype) for kv in self.kv]


def decoder_of(case: str, dtype: torch.dtype = torch.float32) -> Decoder:
    model = make_reference(case)
    return load.build_decoder(spec_from_config(config_of(model)), StateDictSource.of(model), device=CPU, dtype=dtype)


@kinds
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_logits_are_close_to_those_of_the_full_cache(case: str, kind: str) -> None:
    decoder = decoder_of(case)
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS).tolist()
    wide = PagedDriver(decoder).run(0, tokens, TOKENS)
    narrow = IntegerDriver(decoder, kind).run(0, tokens, TOKENS)
    error = (narrow - wide).norm(dim=1) / wide.norm(dim=1)
    assert 0 < float(error.mean()) < MEAN_ERROR[kind]
    assert float(error.max()) < WORST_ERROR[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
@kinds
def test_results_do_not_depend_on_chunking(kind: str, case: str, dtype: torch.dtype) -> None:
    decoder = decoder_of(case, dtype)
    tokens = np.random.default_rng(5).integers(0, VOCAB, TOKENS).tolist()
    whole = IntegerDriver(decoder, kind).run(0, tokens, TOKENS)
    for block_size, chunk in ((16, 1), (4, 7), (3, 33)):
        assert torch.equal(IntegerDriver(decoder, kind, block_size).run(0, tokens, chunk), whole)


@pytest.mark.parametrize("native", [True, False])
def test_biases_of_keys_do_not_take_the_range_of_four_bits(native: bool) -> None:
    """Biases as of Qwen2: large where the rotation is slow."""
    model = make_reference("qwen2")
    spec = spec_from_config(config_of(model))
    source = StateDictSource.of(model)
    for index in range(spec.num_layers):
        bias = source.tensors[f"model.layers.{index}.self_attn.k_proj.bias"]
        bias.view(spec.num_kv_heads, 2, -1)[:, :, -1] = torch.tensor([150.0, -90.0])
    decoder = load.build_decoder(spec, source, device=CPU, dtype=torch.float32)
    if not native:
        decoder.native_stack = None
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS).tolist()
    wide = PagedDriver(decoder).run(0, tokens, TOKENS)
    error = (IntegerDriver(decoder, "int4").run(0, tokens, TOKENS) - wide).norm(dim=1) / wide.norm(dim=1)
    assert 0 < float(error.mean()) < MEAN_ERROR["int4"]


@kinds
def test_run_layers_and_the_native_stack_agree(kind: str) -> None:
    decoder = decoder_of("llama", torch.bfloat16)
    if decoder.native_stack is None:
        pytest.skip("no native kernels here")
    tokens = np.random.default_rng(6).integers(0, VOCAB, TOKENS).tolist()
    native = IntegerDriver(decoder, kind).run(0, tokens, 7)
    decoder.native_stack = None
    assert torch.equal(IntegerDriver(decoder, kind).run(0, tokens, 7), native)


@pytest.mark.parametrize(("kind", "width"), [("int8", HEAD + 4), ("int4", HEAD // 2 + 4)])
def test_the_pool_has_few_bits_per_item_and_a_word_per_head(kind: KvFormat, width: int) -> None:
    spec = dataclasses.replace(spec_from_config(config_of(make_reference("llama"))), head_dim=HEAD)
    heads = 2 * spec.num_layers * spec.num_kv_heads
    assert bytes_per_token(spec, torch.bfloat16, kind) == heads * width
    kv = allocate_kv(spec, num_blocks=3, block_size=8, dtype=torch.bfloat16, device=CPU, kv_dtype=kind)
    assert sum(layer.nbytes for layer in kv) == 4 * 8 * bytes_per_token(spec, torch.bfloat16, kind)
    assert {layer.dtype for layer in kv} == {STORED[kind][0]}


def test_the_memory_plan_fits_nearly_two_and_four_times_the_tokens() -> None:
    spec = spec_from_config(config_of(make_reference("llama")))
    spec = dataclasses.replace(spec, head_dim=64, max_context=1 << 20)

    def plan(kv_dtype: KvFormat) -> MemoryPlan:
        config = load_config(None, {"memory.kv_gib": 1.0}).config
        sizes = {"weights_bytes": GIB, "free_bytes": 20 * GIB}
        return make_memory_plan(config, spec, CPU_DEFAULTS, dtype=torch.bfloat16, kv_dtype=kv_dtype, **sizes)

    assert plan("int8").kv_tokens / plan("full").kv_tokens == pytest.approx(128 / 68, rel=1e-3)
    assert plan("int4").kv_tokens / plan("full").kv_tokens == pytest.approx(128 / 36, rel=1e-3)


def test_unsupported_combinations_are_refused_with_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = spec_from_config(config_of(make_reference("llama")))

    def resolve(asked: KvDtype, device: torch.device, head_dim: int, **traits: object) -> KvFormat:
        spec = dataclasses.replace(whole, head_dim=head_dim, **traits)  # type: ignore[arg-type]
        return resolve_kv_dtype(asked, spec, dtype=torch.bfloat16, device=device)

    assert (resolve("int8", CPU, 64), resolve("int4", CPU, 64)) == ("int8", "int4")
    assert resolve("int4", CPU, 64, qkv_bias=True) == "int4"
    for trait in ({"qk_norm": True}, {"attention_sinks": True}, {"attention_softcap": 50.0}):
        assert resolve("int4", CPU, 64, **trait) == "int4"
        assert resolve("int8", CPU, 64, qkv_bias=True, **trait) == "int8"
        with pytest.raises(ConfigError, match=r"int4, which would round away the keys .* Set --kv-dtype int8"):
            resolve("int4", CPU, 64, qkv_bias=True, **trait)
    with pytest.raises(ConfigError, match=r"int8, which needs heads in multiples of 16 items, .* have 72\. Set"):
        resolve("int8", CPU, 72)
    with pytest.raises(ConfigError, match=r"fp8, which needs a GPU .* Set --kv-dtype int8, which needs as little"):
        resolve("fp8", CPU, 64)
    monkeypatch.setattr(kv_pool.torch.cuda, "get_device_name", lambda device: "a GPU of ours")
    with pytest.raises(ConfigError, match=r"int8, which is for a CPU, .* run on a GPU of ours\. Set --kv-dtype fp8"):
        resolve("int8", torch.device("cuda"), 64)
