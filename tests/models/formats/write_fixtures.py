"""Run as a program: writes `written/`, one quantised matrix per file, with the tools that people use.

Each file has the tensors of a module `m` as the tool stores them and `expected`, the tool's own dequantised weight;
the header has the `quantization_config`. Needs compressed-tensors 0.20, bitsandbytes 0.50, torchao 0.18, GPTQModel 7.7
and AutoAWQ 0.2.9, which the tests do not. The last two ask for other versions of PyTorch and Transformers: the modules
that pack are enough.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "written"
ROWS, COLUMNS = 16, 64


def matrix(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    torch.manual_seed(seed)
    spread = torch.rand(rows, 1) + 0.2
    return torch.randn(rows, columns) * spread * 0.1


def save(
    name: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    expected: torch.Tensor,
    header: dict[str, str] | None = None,
) -> None:
    stored = {f"m.{key}": value.detach().contiguous() for key, value in tensors.items()}
    metadata = {**(header or {}), "quantization_config": json.dumps(config)}
    save_file({**stored, "expected": expected.detach().float().contiguous()}, FOLDER / f"{name}.safetensors", metadata)
    print(name, {key: (tuple(value.shape), str(value.dtype)) for key, value in stored.items()})


# --- compressed-tensors ---


def compressed(name: str, kind: str, rows: int = ROWS, g_idx: bool = False, **weights: Any) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = matrix(1, rows, 160 if args.strategy == "block" else COLUMNS)
    strategy = str(args.strategy).split(".")[-1].lower()
    group = args.group_size or weight.shape[1]
    if strategy == "tensor":
        low, high = weight.amin().view(1), weight.amax().view(1)
    elif strategy == "block":
        b0, b1 = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % b1, 0, -rows % b0))
        padded = padded.view(padded.shape[0] // b0, b0, -1, b1)
        low, high = padded.amin((1, 3)), padded.amax((1, 3))
    else:
        groups = weight.view(rows, -1, group)
        low, high = groups.amin(2), groups.amax(2)
    state: dict[str, torch.Tensor] = {"weight": weight}
    whole = None
    if strategy == "tensor_group":
        whole = generate_gparam(weight.amin().view(1), weight.amax().view(1))
        state["weight_global_scale"] = whole
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if g_idx:
        torch.manual_seed(3)
        state["weight_g_idx"] = (torch.randperm(weight.shape[1]) // group).int()
    compressor = BaseCompressor.get_value_from_registry(kind)
    if g_idx:
        stored = by_group_index(compressor, state, scheme)
        order = torch.argsort(state["weight_g_idx"], stable=True)
        plain = {key: value for key, value in stored.items() if key != "weight_g_idx"}
        unordered = compressor.decompress(plain | {"weight_packed": repacked(stored, order)}, scheme)["weight"]
        expected = torch.empty_like(unordered).index_copy_(1, order, unordered)
    else:
        stored = compressor.compress(state, scheme)
        expected = in_float32(stored, scheme) if whole is not None else compressor.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}},
        "ignore": ["lm_head"],
    }
    save(name, config, stored, expected)


def in_float32(stored: dict[str, torch.Tensor], scheme: Any) -> torch.Tensor:
    """What `decompress` does for NVFP4, without rounding each step to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = stored["weight_packed"].shape
    codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, dtype=torch.float32)
    scale, whole = stored["weight_scale"].float(), stored["weight_global_scale"]
    found: torch.Tensor = dequantize(
        x_q=codes, scale=scale, args=scheme.weights, global_scale=whole, dtype=torch.float32
    )
    return found


def by_group_index(compressor: Any, state: dict[str, torch.Tensor], scheme: Any) -> dict[str, torch.Tensor]:
    """Codes in the order of the inputs, quantised in the order of the groups."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    order = torch.argsort(state["weight_g_idx"], stable=True)
    plain = {key: value for key, value in state.items() if key != "weight_g_idx"}
    sorted_state = plain | {"weight": state["weight"][:, order]}
    stored = compressor.compress(sorted_state, scheme)
    codes = unpack_from_int32(stored["weight_packed"], 4, state["weight"].shape)
    natural = torch.empty_like(codes).index_copy_(1, order, codes)
    return stored | {"weight_packed": pack_to_int32(natural, 4), "weight_g_idx": state["weight_g_idx"]}


def repacked(stored: dict[str, torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    return pack_to_int32(unpack_from_int32(stored["weight_packed"], 4, stored["weight_shape"])[:, order], 4)


def write_compressed_tensors() -> None:
    integer, floating = {"type": "int"}, {"type": "float"}
    by_group = {"strategy": "group", "group_size": 32}
    pack = "pack-quantized"
    compressed("ct_w4a16", pack, num_bits=4, symmetric=True, **integer, **by_group)
    compressed("ct_w4a16_asymmetric", pack, num_bits=4, symmetric=False, **integer, **by_group)
    compressed("ct_w4a16_channel", pack, num_bits=4, symmetric=True, strategy="channel", **integer)
    compressed("ct_w4a16_act_order", pack, num_bits=4, symmetric=True, g_idx=True, **integer, **by_group)
    compressed("ct_w8a16", pack, num_bits=8, symmetric=True, **integer, **by_group)
    compressed("ct_int8", "int-quantized", num_bits=8, symmetric=True, strategy="channel", **integer)
    compressed("ct_int8_tensor", "int-quantized", num_bits=8, symmetric=True, strategy="tensor", **integer)
    compressed("ct_int8_asymmetric", "int-quantized", num_bits=8, symmetric=False, strategy="channel", **integer)
    compressed("ct_w4a8", "int-quantized", num_bits=4, symmetric=True, strategy="channel", **integer)
    compressed("ct_fp8_tensor", "float-quantized", num_bits=8, symmetric=True, strategy="tensor", **floating)
    compressed("ct_fp8_channel", "float-quantized", num_bits=8, symmetric=True, strategy="channel", **floating)
    block = {"strategy": "block", "block_structure": [128, 128]}
    compressed("ct_fp8_block", "float-quantized", rows=136, num_bits=8, symmetric=True, **block, **floating)
    tensor_group = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    compressed("ct_nvfp4", "nvfp4-pack-quantized", num_bits=4, symmetric=True, **tensor_group, **floating)
    mx = {**by_group, "scale_dtype": "torch.uint8"}
    compressed("ct_mxfp4", "mxfp4-pack-quantized", num_bits=4, symmetric=True, **mx, **floating)


# --- bitsandbytes ---


def write_bitsandbytes() -> None:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit

    weight = matrix(2, columns=128)
    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        packed, state = quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
        tensors = {"weight": packed} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        save(f"bnb_{kind}{'_nested' if nested else ''}", config, tensors, dequantize_4bit(packed, state))
    codes, stats, _ = int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": stats, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bnb_int8", config, tensors, int8_vectorwise_dequant(codes, stats))


# --- torchao ---


def write_torchao() -> None:
    import torchao.quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    by_group = ao.PerGroup(32)
    configs = {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8": ao.Float8WeightOnlyConfig(),
        "intx4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=by_group),
        "intx4_asymmetric": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=by_group, mapping_type=ao.quant_primitives.MappingType.ASYMMETRIC
        ),
    }
    for name, settings in configs.items():
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = matrix(3)
        model = torch.nn.Sequential(linear)
        ao.quantize_(model, settings)
        tensors, header = flatten_tensor_state_dict({"m.weight": model[0].weight})
        own = {key.removeprefix("m."): part for key, part in tensors.items()}
        save(f"ao_{name}", {"quant_method": "torchao"}, own, model[0].weight.dequantize(), header)


# --- GPTQModel and AutoAWQ ---


def spans(weight: torch.Tensor, group: torch.Tensor, symmetric: bool, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, groups]. `group`: that of each input."""
    parts = [weight[:, group == index] for index in range(int(group.max()) + 1)]
    low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0)
    high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0)
    if symmetric:
        scales = 2 * torch.maximum(-low, high) / top
        return scales.half().float(), torch.full_like(scales, (top + 1) // 2)
    scales = ((high - low) / top).half().float()
    return scales, (-low / scales).round()


def gptq(name: str, *, bits: int = 4, symmetric: bool = True, act_order: bool = False, is_v2: bool = False) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, size = 32, 32
    linear = torch.nn.Linear(COLUMNS, rows, bias=False)
    linear.weight.data = matrix(4, rows)
    linear.weight.data[3, :size].abs_()  # a zero point of 0
    linear.weight.data[4, :size].abs_().neg_()  # and the largest
    groups = torch.arange(COLUMNS) // size
    if act_order:
        groups = groups[torch.randperm(COLUMNS)]
    scales, zeros = spans(linear.weight.data, groups, symmetric, (1 << bits) - 1)
    sizes = {"group_size": size, "in_features": COLUMNS, "out_features": rows, "pack_dtype": torch.int32}
    packed = TorchLinear(bits=bits, sym=symmetric, desc_act=act_order, bias=False, **sizes)
    packed.pack_original(linear, scales, zeros, groups.int())
    packed.optimize = lambda *_, **__: None
    packed.post_init()
    stored = packed.scales
    packed.scales = stored.float()  # Else it rounds to float16.
    expected = packed.dequantize_weight().t()
    packed.scales = stored
    if not is_v2:
        convert_gptq_v2_to_v1_format_module(packed, packed)  # of the second argument it reads what the first has too
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    layout = "gptq_v2" if is_v2 else "gptq"
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    save(name, config | {"checkpoint_format": layout}, tensors, expected)


def write_gptqmodel() -> None:
    gptq("gptq_4bit")
    gptq("gptq_4bit_act_order", act_order=True)
    gptq("gptq_4bit_asymmetric", symmetric=False)
    gptq("gptq_4bit_asymmetric_v2", symmetric=False, is_v2=True)
    gptq("gptq_8bit", bits=8)
    gptq("gptq_8bit_asymmetric", bits=8, symmetric=False)


def write_autoawq() -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    rows, size = 32, 32
    linear = torch.nn.Linear(COLUMNS, rows, bias=False)
    linear.weight.data = matrix(5, rows)
    linear.weight.data[3, :size].abs_()
    scales, zeros = spans(linear.weight.data, torch.arange(COLUMNS) // size, False, 15)
    packed = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
    # With scales in float16 it rounds to them.
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, size)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    save("awq_4bit", config, tensors, expected.t())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for part in sys.argv[1:] or ["compressed_tensors", "bitsandbytes", "torchao", "gptqmodel", "autoawq"]:
        globals()[f"write_{part}"]()
