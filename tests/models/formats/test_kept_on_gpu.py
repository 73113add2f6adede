"""Quantised checkpoints and GGUF files on a GPU: right answers, and no more memory than they take on disk."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.quantised_files import awq, fp8, gptq, mxfp4, pack_quantized, write_checkpoint
from helpers.stored_blocks import StoredSource
from helpers.tiny_models import VOCAB, StateDictSource

from millrace.models.decoder import Decoder
from millrace.models.formats.gguf import KINDS
from millrace.models.load import build_decoder, load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.sources.resolve import resolve_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOKENS = random.Random(0).choices(range(VOCAB), k=24)
# Ternary numbers are rewritten as Q2_K: blocks of 84 bytes for 54 and 66.
AS_Q2_K = {"TQ1_0": 84 / 54, "TQ2_0": 84 / 66}
ROUNDED = {"fp8_tensor": 0.2, "fp8_block": 0.1}
"""Largest errors where inputs are rounded too."""
GROUPS_OF_32 = {"strategy": "group", "group_size": 32, "symmetric": True}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": kind, "weights": {**weights, **GROUPS_OF_32}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq()),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(group=32)),
    "fp8_tensor": ({"quant_method": "fp8"}, fp8()),
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128)),
    "w4a16": (compressed("pack-quantized", num_bits=4, type="int"), pack_quantized),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float"), mxfp4),
}


def logits(decoder: Decoder, chunk: int = 24) -> torch.Tensor:
    return PagedDriver(decoder, block_size=16).run(0, TOKENS, chunk).float().cpu()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def held_by(build: Any) -> tuple[Decoder, int]:
    """What `build` makes, and the bytes of GPU memory that it holds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = build()
    torch.cuda.synchronize()
    return made, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("case", CASES)
def test_a_quantised_checkpoint(case: str, family: str, tmp_path: Path) -> None:
    settings, pack = CASES[case]
    sizes = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    source = write_checkpoint(tmp_path, settings, pack, case=family, **sizes)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    wanted = logits(build_decoder(spec, source, device=CUDA, dtype=torch.bfloat16))
    files = resolve_model(str(tmp_path))
    decoder, held = held_by(lambda: load_decoder(files, device=CUDA, dtype=torch.bfloat16))
    for chunk in (24, 1):
        assert error(logits(decoder, chunk), wanted) < ROUNDED.get(case, 0.06)
    assert held < decoder.num_bytes + (1 << 20), "no copy is kept beside the weights"
    plain = sum(tensor.numel() for name, tensor in source.tensors.items() if "norm" not in name) * 2
    assert decoder.num_bytes < 0.85 * plain
    if family != "qwen3":
        assert decoder.choices["experts"].version.name == "stored"
    fixed = load_decoder(files, device=CUDA, dtype=torch.bfloat16, deterministic=True)
    assert torch.equal(logits(fixed), logits(fixed, 5)), "batch-invariant"


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "vocab_size": VOCAB,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
MIXTURE = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config"),
    [*((kind, LLAMA) for kind in KINDS), *((kind, MIXTURE) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ2_XS"))],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_gguf_blocks(kind: str, config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    spec = spec_from_config({**config, "tie_word_embeddings": tied})
    source = StoredSource(
        spec, {"_proj.weight": kind, "lm_head.weight": "Q6_K", "embed_tokens.weight": "Q5_0"}, tmp_path / "none.gguf"
    )
    plain = StateDictSource({name: source.get(name) for name in source.names()})
    wanted = logits(build_decoder(spec, plain, device=CUDA, dtype=torch.bfloat16))
    decoder, held = held_by(lambda: build_decoder(spec, source, device=CUDA, dtype=torch.bfloat16))
    assert decoder.choices["qkv_linear"].version.op == "grouped_linear"
    for chunk in (24, 1):
        # Planes round scales to bfloat16 as well: 0.24% per weight instead of 0.17%, which random weights amplify.
        assert error(logits(decoder, chunk), wanted) < 0.2
    assert held < decoder.num_bytes + (1 << 20)
    kinds = {name: kind for name in source.names() if (kind := source.stored_format(name))}
    kept = sum(source.stored_rows(name).nbytes * AS_Q2_K.get(kind, 1.0) for name, kind in kinds.items())
    rest = sum(tensor.numel() * 4 for name, tensor in plain.tensors.items() if not source.stored_format(name))
    assert decoder.num_bytes < 1.01 * kept + rest + 4096
