"""A model split over ranks gives the logits of the whole one, and each rank holds only its part."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.rank_threads import meshes_of, on_all
from helpers.stored_blocks import StoredSource, dequantised
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.errors import ConfigError
from millrace.models import kept_weights
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.shard import Shard, shard_of
from millrace.models.weight_sizes import layout_bytes, spec_weight_bytes
from millrace.models.weights.shard_weights import ShardWeights
from millrace.ops.base.mesh import Mesh
from millrace.ops.cpp import native as native_module
from millrace.run.ranks.shared_mesh import SharedMesh

CPU = torch.device("cpu")
FAMILIES = (
    *(
        "llama_tied",
        "glm4_moe",
        "llama_bias",
        "qwen3",
        "gemma2",
        "mixtral_window",
        "qwen3_moe_sparse",
        "gpt_oss",
        "glm4",
        "olmo2",
        "phi3",
        "cohere2",
        "starcoder2",
        "gpt_neox",
        "phi",
        "stablelm",
        "arcee",
        "olmo",
        "hunyuan",
    ),
    *("deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves", "glm4_moe_lite"),
    *("qwen3_next", "qwen3_next_dense", "granite_hybrid", "granite_hybrid_rope", "granite_hybrid_moe"),
    *("granite_moe_shared", "bamba", "lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "nemotron_h"),
)
TOKENS = random.Random(3).choices(range(VOCAB), k=19)
SMOL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
CODER = SMOL | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def shards_of(config: dict[str, Any], size: int) -> list[Shard]:
    return [shard_of(spec_from_config(config), rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_those_of_the_whole_model(case: str, size: int) -> None:
    model = make_reference(case)
    spec, source = spec_from_config(config_of(model)), StateDictSource.of(model)
    whole = PagedDriver(build_decoder(spec, source, device=CPU, dtype=torch.float32), block_size=4)
    expected = whole.run(0, TOKENS, 8)

    def run(mesh: SharedMesh) -> torch.Tensor:
        decoder = build_decoder(spec, source, device=CPU, dtype=torch.float32, mesh=mesh)
        assert decoder.native_stack is None
        return PagedDriver(decoder, block_size=4).run(0, TOKENS, 8)

    with meshes_of(size) as meshes:
        found = on_all(meshes, run)
    assert all(torch.equal(found[0], other) for other in found), "every rank has the same bits"
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(found[0].argmax(-1), expected.argmax(-1))


def test_heads_and_inner_sizes_may_be_uneven() -> None:
    halves = shards_of(SMOL, 2)
    assert [(len(part.heads), len(part.kv_heads)) for part in halves] == [(6, 2), (3, 1)]
    assert [len(part.heads) for part in shards_of(SMOL, 3)] == [3, 3, 3]
    halves = shards_of(CODER, 2)
    assert [len(part.inner) // 256 for part in halves] == [18, 17]
    assert all(part.inner.start % 256 == 0 for part in halves)
    # Two ranks have the same KV head, and cut its queries between blocks of 256 inputs.
    thirds = shards_of(CODER, 3)
    assert sorted((len(part.heads), part.kv_heads.start) for part in thirds) == [(2, 0), (4, 0), (6, 1)]


@pytest.mark.parametrize("config", [SMOL, CODER])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_part_of_a_tensor_is_on_one_rank(config: dict[str, Any], size: int) -> None:
    """But keys and values of shared KV heads, norms and routers."""
    shards = shards_of(config, size)
    for name in ("heads", "inner"):
        covered = sorted(index for shard in shards for index in getattr(shard, name))
        assert covered == list(range(len(covered)))
        assert all(len(getattr(shard, name)) for shard in shards)
    assert shards[0].spec.num_kv_heads == max(shard.spec.num_kv_heads for shard in shards)
    spec = spec_from_config(config)
    sizes = [layout_bytes(shard.spec, shard.layout, torch.float32) for shard in shards]
    assert sizes[0] == max(sizes), "the memory plan is that of rank 0"
    if size > 1:
        assert sum(sizes) < 1.2 * spec_weight_bytes(spec, torch.float32) < size * 1.2 * sizes[0]
    for part in all_tensors(shards[0].layout):
        cut = shards[0].cuts().get(part.name)
        whole = next(one.shape for one in all_tensors(layout_of(spec)) if one.name == part.name)
        assert part.shape == (whole if cut is None else cut.shape(whole))


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.tensor_parallel is 10, but the model has 9 .* --tensor-parallel 9"):
        shards_of(SMOL, 10)
    with pytest.raises(ConfigError, match=r"inner size of 2\. Set --tensor-parallel 2 or less"):
        shards_of(SMOL | {"intermediate_size": 2}, 3)


class OneOf(Mesh):
    """A rank that is asked for its weights only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


STORED = {
    "q_proj.weight": "Q4_K",
    "k_proj.weight": "Q6_K",
    "v_proj.weight": "Q8_0",
    "o_proj.weight": "Q4_K",
    "gate_proj.weight": "Q5_0",
    "up_proj.weight": "Q4_K",
    "down_proj.weight": "Q4_K",
    "embed_tokens.weight": "Q8_0",
    "lm_head.weight": "Q6_K",
}


def test_quantised_weights_stay_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has whole blocks of every matrix, and a packed file of its own on the next start."""
    native_module.native()
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    sizes = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 101}
    spec = spec_from_config(CODER | sizes | {"tie_word_embeddings": False})
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    source = StoredSource(spec, STORED, file)
    expected = build_decoder(spec, source, device=CPU, dtype=torch.float32, quantization="int8")
    tokens = [token % 101 for token in TOKENS]
    logits = PagedDriver(expected, block_size=4).run(0, tokens, 8)

    def run(mesh: SharedMesh) -> tuple[torch.Tensor, int]:
        decoder = build_decoder(spec, source, device=CPU, dtype=torch.float32, quantization="int8", mesh=mesh)
        return PagedDriver(decoder, block_size=4).run(0, tokens, 8), decoder.num_bytes

    for _ in range(2):  # The second time from the packed files.
        with meshes_of(2) as meshes:
            found = on_all(meshes, run)
        # Activations that are rounded to INT8 may round to the next integer after sums in another order.
        assert float((found[0][0] - logits).abs().mean()) < 0.02 * float(logits.abs().mean())
        assert sum(num_bytes for _, num_bytes in found) < 1.05 * expected.num_bytes
        assert len(list((tmp_path / "cache" / "packed").glob("*.packed"))) == 3


def test_blocks_are_those_of_the_whole_matrix() -> None:
    spec = spec_from_config(
        CODER | {"hidden_size": 1536, "intermediate_size": 768, "num_hidden_layers": 1, "vocab_size": 96}
    )
    source, shard = StoredSource(spec, STORED, Path("model.gguf")), shard_of(spec, 1, 2)
    own = ShardWeights(source, shard)
    for part in (one for one in all_tensors(shard.layout) if len(one.shape) == 2):
        kind = own.stored_format(part.name)
        assert kind is not None
        found = dequantised(kind, own.stored_rows(part.name), part.shape[1], torch.float32)
        cut = shard.cuts()[part.name].slices(2)
        assert torch.equal(found, source.get(part.name, dtype=torch.float32)[cut])
        assert torch.equal(found, own.get(part.name, dtype=torch.float32))


def test_blocks_that_would_be_cut_are_dequantised() -> None:
    """Seven heads of 64 are one and three quarters of a block: the output projection is read as plain numbers."""
    spec = dataclasses.replace(
        spec_from_config(CODER), hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=32, inner_size=512
    )
    shard = shard_of(spec, 0, 3)
    formats = {"o_proj.weight": "Q4_K", "down_proj.weight": "Q8_0"}
    source = ShardWeights(StoredSource(spec, formats, Path("model.gguf")), shard)
    layer = shard.layout.layers[0]
    assert source.stored_format(layer.mixer.out.parts[0].name) is None
    assert source.get(layer.mixer.out.parts[0].name).shape == layer.mixer.out.parts[0].shape
    assert not isinstance(layer.mlp, tuple) or source.stored_format(layer.mlp[1].parts[0].name) == "Q8_0"


def test_a_spec_says_which_part_it_is() -> None:
    spec: ModelSpec = shard_of(spec_from_config(CODER), 1, 2).spec
    assert (spec.num_heads, spec.num_kv_heads, spec.inner_size, spec.vocab_size) == (6, 1, 17 * 256, 151936)


def test_more_ranks_than_recurrent_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"recurrent layers of the model have 4 heads\. Set --tensor-parallel 4"):
        shard_of(spec_from_config(config_of(make_reference("qwen3_next_dense"))), 0, 5)
