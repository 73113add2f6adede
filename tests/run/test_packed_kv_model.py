"""The packed KV cache: when `auto` chooses it, refusals, memory saved, and accuracy of whole models.

Small random models, with the reference ops.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged import PagedDriver
from helpers.reference_ops import use_reference_ops
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.bench.gpu.models import known_shapes, make_model
from millrace.config import KvDtype, load_config
from millrace.engine.memory_plan import GIB, MemoryPlan, make_memory_plan
from millrace.errors import ConfigError
from millrace.models import load
from millrace.models.decoder import Decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import LayerSpec, ModelSpec
from millrace.ops.kv.cache import SCALE_WORDS, head_dim_of
from millrace.ops.kv.packed import packed_items
from millrace.run.device.defaults import CUDA_DEFAULTS
from millrace.run.device.kv_pool import allocate_kv, bytes_per_token, resolve_kv_dtype
from millrace.run.settings import KvFormat

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENS = 48


def shape_of(name: str = "llama-3.1-8b", **changes: Any) -> ModelSpec:
    tree = json.loads(known_shapes()[name].read_text(encoding="utf-8"))
    return dataclasses.replace(spec_from_config(tree), **changes)


def resolve(
    asked: KvDtype,
    spec: ModelSpec | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = GPU,
    *,
    deterministic: bool = False,
) -> KvFormat:
    return resolve_kv_dtype(asked, spec or shape_of(), dtype=dtype, device=device, deterministic=deterministic)


def half_rotated() -> ModelSpec:
    spec = shape_of()
    return dataclasses.replace(spec, ropes=(dataclasses.replace(spec.ropes[0], rotary_dim=64),))


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.run.device.kv_pool.triton_missing", lambda device: "")
    monkeypatch.setattr("millrace.run.device.kv_pool.hopper_missing", lambda device: "")


@pytest.mark.usefixtures("with_triton")
def test_on_unmeasured_gpus_auto_is_full_and_packed_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.run.device.kv_pool.hopper_missing", lambda device: "was measured elsewhere")
    assert (resolve("auto"), resolve("packed")) == ("full", "packed")


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("name", list(known_shapes()))
def test_auto_packs_on_a_gpu(name: str) -> None:
    spec = shape_of(name)
    assert spec.head_dim in (64, 128, 256)
    assert resolve("auto", spec) == resolve("packed", spec) == "packed"
    assert resolve("full", spec) == "full"


def test_auto_is_full_on_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert resolve("auto", dtype=dtype, device=CPU) == resolve("full", dtype=dtype, device=CPU) == "full"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": CPU}, r"is for a GPU, but the model would run on the CPU\. Set --kv-dtype auto, or int8"),
    ({"deterministic": True}, r"run\.deterministic is on\. Set --kv-dtype auto, .* or remove --deterministic\."),
    ({"dtype": torch.float16}, r"holds bfloat16, .* run in float16\. Set --kv-dtype auto, or --dtype bfloat16\."),
    ({"dtype": torch.float32}, r"run in float32\. Set --kv-dtype auto, or --dtype bfloat16\."),
    ({"spec": shape_of(head_dim=80)}, r"heads of 64, 128 or 256 items, but the model's have 80\. Set --kv-dtype auto"),
    ({"spec": half_rotated()}, r"rotated fully or not at all, but the model rotates a part\. Set --kv-dtype auto\."),
]


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(("case", "says"), REFUSED)
def test_where_unsupported_auto_is_full_and_packed_is_refused(case: dict[str, Any], says: str) -> None:
    assert resolve("auto", **case) == resolve("full", **case) == "full"
    with pytest.raises(ConfigError, match=rf"^memory\.kv_dtype is packed, which .*{says}") as refusal:
        resolve("packed", **case)
    assert refusal.value.param == "memory.kv_dtype"


def test_without_triton_auto_is_full_and_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.run.device.kv_pool.triton_missing", lambda device: "needs the package triton")
    assert resolve("auto") == "full"
    with pytest.raises(ConfigError, match="packed, which needs the package triton. Install it, or set --kv-dtype auto"):
        resolve("packed")


@pytest.mark.usefixtures("with_triton")
def test_layers_without_rope_are_packed() -> None:
    spec = half_rotated()
    still = dataclasses.replace(spec, layers=tuple(LayerSpec(rope=None) for _ in spec.layers))
    assert not spec.rotates_whole_heads
    assert still.rotates_whole_heads
    assert resolve("auto", still) == "packed"
    one_turns = dataclasses.replace(spec, layers=(*still.layers[1:], LayerSpec(rope=0)))
    assert resolve("auto", one_turns) == "full"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_pool_has_twelve_bits_per_item_and_a_scale_per_head(head_dim: int) -> None:
    spec = dataclasses.replace(spec_from_config(config_of(make_reference("llama"))), head_dim=head_dim)
    per_token = bytes_per_token(spec, torch.bfloat16, "packed")
    assert per_token == 2 * spec.num_layers * spec.num_kv_heads * (head_dim * 12 // 8 + 4)
    kv = allocate_kv(spec, num_blocks=3, block_size=8, dtype=torch.bfloat16, device=CPU, kv_dtype="packed")
    assert len(kv) == spec.num_layers
    assert {(layer.dtype, tuple(layer.shape)) for layer in kv} == {
        (torch.int16, (2, 4, spec.num_kv_heads, 8, packed_items(head_dim) + SCALE_WORDS))
    }
    assert head_dim_of(kv[0]) == head_dim
    assert sum(layer.nbytes for layer in kv) == 4 * 8 * per_token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_full_pool_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    spec = spec_from_config(config_of(make_reference("llama")))
    kv = allocate_kv(spec, num_blocks=3, block_size=8, dtype=dtype, device=CPU, kv_dtype="full")
    assert {(layer.dtype, layer.shape) for layer in kv} == {(dtype, spec.kv_shape(4, 8))}
    assert sum(layer.nbytes for layer in kv) == 4 * 8 * bytes_per_token(spec, dtype)


def test_the_memory_plan_fits_a_third_more_tokens_and_says_why() -> None:
    spec = shape_of()

    def plan(kv_dtype: KvFormat) -> MemoryPlan:
        config = load_config(None, {"memory.kv_gib": 20.0}).config
        sizes = {"weights_bytes": 16 * GIB, "free_bytes": 130 * GIB}
        return make_memory_plan(config, spec, CUDA_DEFAULTS, dtype=torch.bfloat16, kv_dtype=kv_dtype, **sizes)

    full, packed = plan("full"), plan("packed")
    assert packed.kv_tokens / full.kv_tokens == pytest.approx(256 / 196, rel=1e-3)
    assert f"KV pool, {full.kv_tokens:,} tokens" in full.parts()
    assert f"KV pool, {packed.kv_tokens:,} tokens, packed" in packed.parts()


def test_the_benchmark_has_a_suffix_for_the_full_cache() -> None:
    model = make_model("llama-3.1-8b+fullkv", load_config(), known_shapes())
    assert (model.label, model.config.memory.kv_dtype) == ("llama-3.1-8b+fullkv", "full")
    assert make_model("llama-3.1-8b", load_config(), known_shapes()).config.memory.kv_dtype == "auto"


class PackedDriver(PagedDriver):
    """Unwritten bits are set: NaN as a scale."""

    def __init__(self, decoder: Decoder, block_size: int = 4) -> None:
        super().__init__(decoder, block_size)
        width = packed_items(decoder.spec.head_dim) + SCALE_WORDS
        self.kv = [torch.full((*kv.shape[:4], width), -1, dtype=torch.int16) for kv in self.kv]


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_ops(monkeypatch)


def decoder_of(case: str) -> Decoder:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    return load.build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=torch.bfloat16)


@pytest.mark.usefixtures("reference_ops")
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "smollm3"])
def test_logits_equal_those_of_the_full_cache(case: str) -> None:
    """In heads of sixteen items hardly any item is below 1/32,768 of the largest, so nearly all are exact."""
    decoder = decoder_of(case)
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS).tolist()
    full = PagedDriver(decoder).run(0, tokens, TOKENS)
    packed = PackedDriver(decoder).run(0, tokens, TOKENS)
    error = (packed - full).norm(dim=1) / full.norm(dim=1)
    assert float(error.mean()) < 1e-3
    assert torch.equal(packed.argmax(1), full.argmax(1))


@pytest.mark.usefixtures("reference_ops")
def test_results_do_not_depend_on_chunking() -> None:
    decoder = decoder_of("llama")
    tokens = np.random.default_rng(5).integers(0, VOCAB, 30).tolist()
    whole = PackedDriver(decoder).run(0, tokens, 30)
    for block_size, chunk in ((16, 1), (3, 7)):
        torch.testing.assert_close(PackedDriver(decoder, block_size).run(0, tokens, chunk), whole, atol=2e-2, rtol=2e-2)
