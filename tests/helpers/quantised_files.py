"""Quantised checkpoints of tiny models, packed here from the formats' specifications: independent of the readers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import StateDictSource, config_of, make_reference
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""The stored tensors of a module, by the end of their names, and the weight that they mean."""

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], scales float16 [N, groups], zeros [N, groups]), all codes not negative."""
    rows, columns = weight.shape
    groups, top = weight.view(rows, columns // group, group), (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (top // 2)).half()
        zeros = torch.full_like(scales, (top + 1) // 2).int()
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top).int()
    codes = (groups / scales.float()[..., None]).round().int() + zeros[..., None]
    return codes.clamp(0, top).view(rows, columns), scales, zeros


def values_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`groups`: the group of each input."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def packed_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] to int32 [..., n bits / 32], the first code in the lowest bits."""
    fields = codes.long().view(*codes.shape[:-1], -1, 32 // bits)
    words = sum(fields[..., i] << (bits * i) for i in range(32 // bits))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int32) if int(words.max()) < 2**31 else (words - ((words >> 31) << 32)).to(torch.int32)


def awq(group: int = 64) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros = integers(weight, 4, group, symmetric=False)

        def words(by_input: torch.Tensor) -> torch.Tensor:
            return packed_words(by_input.view(len(by_input), -1, 8)[..., AWQ_ORDER].flatten(1), 4)

        natural = torch.arange(weight.shape[1]) // group
        stored = {
            "qweight": words(codes.t().contiguous()),
            "qzeros": words(zeros.t().contiguous()),
            "scales": scales.t(),
        }
        return stored, values_of(codes, scales, zeros, natural)

    return pack


def gptq(
    bits: int = 4, group: int = 64, symmetric: bool = True, v2: bool = False, act_order: bool = False
) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        columns = weight.shape[1]
        order = torch.arange(columns)
        if act_order:  # the same for the parts of a fused matrix if their inputs are
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(weight.shape[0]))
        codes, scales, zeros = integers(weight[:, order], bits, group, symmetric)
        groups = torch.empty(columns, dtype=torch.int64)
        groups[order] = torch.arange(columns) // group
        natural = torch.empty_like(codes)
        natural[:, order] = codes
        ones = 0 if v2 else {4: 0x11111111, 8: 0x01010101}[bits]
        stored = {
            "qweight": packed_words(natural, bits).t(),
            "qzeros": packed_words(zeros.t().contiguous(), bits) - ones,
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        return stored, values_of(natural, scales, zeros, groups)

    return pack


def fp8(block: int | None = None, static: bool = False) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = weight.shape
        high, wide = (rows, columns) if block is None else (block, block)
        scales = torch.tensor(
            [
                [weight[r : r + high, c : c + wide].abs().max() / 448 for c in range(0, columns, wide)]
                for r in range(0, rows, high)
            ]
        )
        by_item = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        codes = (weight / by_item).to(torch.float8_e4m3fn)
        name, kept = ("weight_scale", scales.view(())) if block is None else ("weight_scale_inv", scales)
        extra = {"input_scale": torch.tensor(0.02)} if static else {}
        return {"weight": codes, name: kept, **extra}, codes.float() * by_item

    return pack


NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nearest(values: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    return (values[..., None] - torch.tensor(levels)).abs().argmin(-1)


def nf4(weight: torch.Tensor, block: int = 64) -> Packed:
    groups = weight.reshape(-1, block)
    largest = groups.abs().amax(1)
    codes = nearest(groups / largest[:, None], NF4)
    pairs = codes.view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    stored = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": largest,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (torch.tensor(NF4)[codes] * largest[:, None]).view(weight.shape)


def llm_int8(weight: torch.Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes.float() * largest[:, None] / 127


def pack_quantized(weight: torch.Tensor, group: int = 32) -> Packed:
    """W4A16 of compressed-tensors."""
    codes, scales, zeros = integers(weight, 4, group, symmetric=True)
    natural = torch.arange(weight.shape[1]) // group
    stored = {"weight_packed": packed_words(codes, 4), "weight_scale": scales}
    return stored | {"weight_shape": torch.tensor(weight.shape)}, values_of(codes, scales, zeros, natural)


def mxfp4(weight: torch.Tensor) -> Packed:
    """compressed-tensors' mxfp4-pack-quantized: scales are powers of two, stored as exponents plus 127."""
    groups = weight.reshape(len(weight), -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(2) / 4)).clamp(-127, 127)
    codes = nearest(groups / 2.0 ** exponents[..., None], E2M1)
    flat = codes.flatten(1)
    stored = {
        "weight_packed": (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }
    return stored, (torch.tensor(E2M1)[codes] * 2.0 ** exponents[..., None]).view(weight.shape)


def torchao_int4(weight: torch.Tensor, group: int = 32) -> Packed:
    """torchao's Int4Tensor: value = signed code * scale + zero point, the middle of the group's range."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    value = codes * scales.float()[..., None] + zeros.float()[..., None]
    flat = codes.flatten(1).to(torch.int8)
    stored = {
        "_weight_qdata": (flat[:, 1::2] << 4) | (flat[:, 0::2] & 15),
        "_weight_scale": scales.t(),
        "_weight_zero_point": zeros.t(),
    }
    return stored, value.view(weight.shape)


def write_checkpoint(
    folder: Path,
    settings: Mapping[str, Any],
    pack: Callable[[torch.Tensor], Packed],
    *,
    case: str = "llama",
    skip: Callable[[str], bool] = lambda module: False,
    packs: Mapping[str, Callable[[torch.Tensor], Packed]] | None = None,
    header: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> StateDictSource:
    """Writes a tiny model with its layers' matrices packed. Returns the same model with the weights that it means.

    `skip`: modules left as they are; `packs`: other packers by part of the module's name; `header`: what the file's
    header says of each packed weight."""
    model = make_reference(case, **(SIZES | sizes))
    source = StateDictSource.of(model)
    stored: Tensors = {}
    metadata: dict[str, str] = {}
    for name, tensor in source.tensors.items():
        module = name.removesuffix(".weight")
        if re.search(r"(_proj|\.w[123])\.weight$", name) is None or skip(module):
            stored[name] = tensor
            continue
        own = next((other for part, other in (packs or {}).items() if part in module), pack)
        parts, value = own(tensor)
        stored |= {f"{module}.{end}": part for end, part in parts.items()}
        source.tensors[name] = value
        metadata[name] = json.dumps(header)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {**metadata, "tensor_names": json.dumps(list(metadata))} if header else {}
    kept = {name: tensor.contiguous().clone() for name, tensor in stored.items()}
    save_file(kept, folder / "model.safetensors", metadata)
    config = {**config_of(model), "quantization_config": dict(settings)}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return source
