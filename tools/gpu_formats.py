"""Times products with weights of every format on a GPU: `python tools/gpu_formats.py`.

The four products of a layer of an 8B model, in CUDA graphs over weights larger than the L2 cache. Per format and number
of rows: milliseconds of 32 layers as Millrace multiplies them, the share of the floor of their bytes (or, from 256 rows
on, the time over bfloat16's), and the launch configurations that were more than 3% faster. Kernels are compiled by
several processes first. `--quick` checks the tool with small sizes; `--json FILE` keeps all figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from torch.nn import functional as F

from millrace.models.formats.gguf import weight_of_blocks
from millrace.ops.base.quantised import quantise_weight
from millrace.ops.linear.block_planes import PlanesLinear
from millrace.ops.linear.block_weight import BlocksTriton, ThinPlanesLinear
from millrace.ops.linear.fp8 import StoredFp8
from millrace.ops.linear.fp8_groups import Fp8Groups
from millrace.ops.linear.grouped import GroupedTriton
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.int8_products import Int8Products
from millrace.ops.linear.packed_codes import PackedCodesLinear
from millrace.ops.registry import choose

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LAYERS, L2_BYTES, MAX_REPLAYS, ROUND_MS, WORKERS = 32, 160 << 20, 10, 8.0, 14
GGUF = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "Q8_0", "IQ4_XS", "IQ3_S", "IQ2_XXS", "Q4_0")
FORMATS = ("W4A16", "FP8", "FP8 block", "INT8", "MXFP4", *GGUF)
BF16 = torch.bfloat16
Run = Callable[[Tensor], Tensor]


def weight_of(name: str, outputs: int, inputs: int) -> Any:
    device = torch.device("cuda")

    def codes(columns: int) -> Tensor:
        return torch.randint(0, 256, (outputs, columns), dtype=torch.uint8, device=device)

    def scales(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
        return (torch.rand(rows, columns, device=device) * 0.01).to(dtype)

    if name == "W4A16":
        return GroupedWeight(codes(inputs // 2), scales(outputs, inputs // 128), inputs, 128, BF16, zero=8)
    if name == "INT8":
        return GroupedWeight(codes(inputs), scales(outputs, 1), inputs, inputs, BF16, zero=128, int8_inputs=True)
    if name == "FP8":
        return StoredFp8(quantise_weight(torch.randn(outputs, inputs, dtype=BF16, device=device)), BF16)
    if name == "FP8 block":
        values = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        blocks = scales(outputs // 128, inputs // 128, torch.float32)
        return GroupedWeight(values, blocks, inputs, 128, BF16, rows_per_scale=128)
    items, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    weight = weight_of_blocks(name, codes(inputs // items * size), inputs, BF16)
    return weight.to(device)


def bytes_of(name: str, outputs: int, inputs: int) -> float:
    """As they are stored."""
    bits = {"W4A16": 4 + 16 / 128, "INT8": 8, "FP8": 8, "FP8 block": 8, "bfloat16": 16}
    if name in bits:
        return outputs * inputs * bits[name] / 8
    items, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return outputs * inputs / items * size


def linear_of(weight: Any) -> Any:
    outputs, inputs = weight.shape
    op = "fp8_linear" if isinstance(weight, StoredFp8) else "grouped_linear"
    choice = choose(op, torch.device("cuda"), BF16, in_features=inputs, out_features=outputs)
    return choice.make(weight, None)


def candidates(linear: Any, rows: int) -> Iterator[tuple[str, Run]]:
    """How the product runs, and other ways to launch it."""
    yield "now", linear
    if isinstance(linear, PlanesLinear):
        yield from _planes_candidates(linear, rows)
        return
    if isinstance(linear, ThinPlanesLinear):
        yield from _thin_candidates(linear, rows)
        return
    if isinstance(linear, PackedCodesLinear):
        yield from _packed_candidates(linear, rows)
        return
    outputs, inputs = linear.weight.shape
    if isinstance(linear, BlocksTriton):
        yield from _block_candidates(linear, rows, outputs, inputs)
    elif isinstance(linear, GroupedTriton):
        yield from _grouped_candidates(linear, rows, outputs, inputs)
    elif isinstance(linear, Int8Products):
        yield from _int8_candidates(linear, rows)
    elif isinstance(linear, Fp8Groups) and rows <= 64:
        yield from _fp8_candidates(linear, rows)


def _block_candidates(linear: BlocksTriton, rows: int, outputs: int, inputs: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.blocks import product

    operand = product.operand(linear.weight.kind, linear.weight.blocks, inputs)
    if rows > 256:
        return
    now = product.choose_tiles(rows, outputs, inputs, linear._programs)
    tries = [
        dataclasses.replace(now, n=16, warps=2),
        dataclasses.replace(now, n=64),
        dataclasses.replace(now, n=64, split=min(8, 2 * now.split), stages=3),
        dataclasses.replace(now, split=min(8, 2 * now.split), warps=2),
    ]
    if rows > 64:
        tries = [product.BlockTiles(64, 64, 1), product.BlockTiles(128, 64, 1, warps=8)]
    for tiles in tries:
        yield str(tiles), functools.partial(product.multiply, weight=operand, tiles=tiles)


def _grouped_candidates(linear: GroupedTriton, rows: int, outputs: int, inputs: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.gemm import grouped as kernel

    if rows > 256:
        return
    now = kernel.choose_tiles(rows, outputs, inputs, linear._tile_k, linear._programs)
    tries = [
        dataclasses.replace(now, n=32, warps=2, split=now.split),
        dataclasses.replace(now, n=32, split=min(8, 2 * now.split), stages=4),
        dataclasses.replace(now, stages=5),
    ]
    if rows > 64:
        tries = [
            kernel.GroupedTiles(128, 128, linear._tile_k, 1, 8, 3),
            kernel.GroupedTiles(128, 64, linear._tile_k, 1, 4, 4),
        ]
    for tiles in tries:
        yield str(tiles), functools.partial(kernel.grouped_product, weight=linear._operand, tiles=tiles)


def _planes_candidates(linear: PlanesLinear, rows: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.blocks import few_rows as kernel
    from millrace.ops.triton.blocks.planes import SIGNED, SIX

    if rows > kernel.MAX_ROWS:
        return
    for warps, ahead in ((2, 4), (4, 4), (8, 4), (4, 2), (8, 2), (16, 2)):
        if ahead == 4 or linear.weight.kind.scales not in (SIX, SIGNED):
            tiles = kernel.PlaneTiles(warps, ahead)
            yield str(tiles), functools.partial(kernel.multiply, weight=linear.weight, tiles=tiles)


def _thin_candidates(linear: ThinPlanesLinear, rows: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.blocks import thin_rows as kernel

    if rows <= kernel.MAX_ROWS:
        for warps in (2, 4, 8, 16):
            yield f"{warps} warps", functools.partial(kernel.multiply, weight=linear.weight, warps=warps)


def _packed_candidates(linear: PackedCodesLinear, rows: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.grouped.few_rows import FewTiles
    from millrace.ops.triton.grouped.many_rows import ManyTiles, multiply

    weight, few = linear.weight, linear._few_tiles(rows, linear.weight)
    if few is not None:
        for tiles in (FewTiles(8, 2, 1), FewTiles(4, 2, 1), FewTiles(8, 4, 1), FewTiles(4, 2, 2)):
            if tiles != few:
                yield str(tiles), functools.partial(linear._few, weight=weight, tiles=tiles)
    elif linear._is_hopper and rows <= 2048:
        for many in (ManyTiles(256, 128, 3), ManyTiles(128, 128, 4), ManyTiles(128, 128, 6), ManyTiles(256, 64, 4)):
            yield str(many), functools.partial(multiply, weight=weight, tiles=many, counters=linear._counters)


def _fp8_candidates(linear: Fp8Groups, rows: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.gemm.fp8_groups import Fp8Tiles, multiply

    weight, m = linear.weight, 16 if rows <= 16 else 32 if rows <= 32 else 64
    shapes = ((64, 1, 4, 8), (64, 2, 4, 6), (64, 4, 4, 6), (128, 1, 4, 6), (128, 2, 4, 6), (128, 4, 4, 6))
    for n, split, warps, stages in shapes:
        tiles = Fp8Tiles(m, n, split, warps, stages)
        yield (
            str(tiles),
            functools.partial(
                multiply,
                codes=weight.codes,
                scales=weight.scales,
                rows_per_scale=weight.rows_per_scale,
                tiles=tiles,
                counters=linear._counters,
            ),
        )


def _int8_candidates(linear: Int8Products, rows: int) -> Iterator[tuple[str, Run]]:
    from millrace.ops.triton.gemm.int8_rows import Int8Tiles, multiply, round_rows

    codes, scales = linear.weight.codes, linear._scales
    if rows <= 64:
        m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        shapes = ((128, 128, 4, 6, 4), (64, 128, 4, 8, 1), (64, 256, 4, 6, 2), (128, 256, 8, 4, 2), (64, 512, 4, 3, 1))
        for n, k, warps, stages, split in shapes:
            tiles = Int8Tiles(m, n, k, warps, stages, is_few=True, split=split)
            yield str(tiles), functools.partial(multiply, codes=codes, scales=scales, tiles=tiles)
        return
    shapes = ((128, 128, 128, 8, 4), (128, 256, 128, 8, 3), (128, 256, 64, 8, 4), (128, 128, 128, 4, 4))
    for tiles in (Int8Tiles(*shape) for shape in shapes):
        yield str(tiles), functools.partial(multiply, codes=codes, scales=scales, tiles=tiles)

    def cublas(x: Tensor) -> Tensor:
        values, x_scales = round_rows(x)
        return (torch._int_mm(values, codes.t()).float() * x_scales[:, None] * scales).to(x.dtype)

    yield "torch._int_mm", cublas


def milliseconds(runs: list[Run], x: Tensor) -> float:
    """Of one run; the runs have different weights."""
    for run in runs[:2]:
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    torch.cuda.synchronize()
    best, replays = float("inf"), 1
    for _ in range(4):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / replays / len(runs))
        replays = max(1, min(MAX_REPLAYS, int(ROUND_MS / (best * len(runs)))))
    return best


def made(name: str, outputs: int, inputs: int, copies: int) -> list[Any]:
    if name == "bfloat16":
        weights = [torch.randn(outputs, inputs, dtype=BF16, device="cuda") for _ in range(copies)]
        return [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
    return [linear_of(weight_of(name, outputs, inputs)) for _ in range(copies)]


def compile_kernels(task: tuple[str, list[int], tuple[tuple[int, int], ...]]) -> str:
    """Runs every candidate once, to fill Triton's cache on disk."""
    name, batches, shapes = task
    failed = []
    for outputs, inputs in shapes:
        (linear,) = made(name, outputs, inputs, 1)
        for rows in batches:
            x = torch.randn(rows, inputs, dtype=BF16, device="cuda")
            for label, run in candidates(linear, rows):
                try:
                    run(x)
                except Exception as error:  # a configuration that does not fit is not timed
                    failed.append(f"{name} {rows} {label}: {str(error).splitlines()[0][:120]}")
    torch.cuda.synchronize()
    return "\n".join(failed)


def measure(name: str, batches: list[int], shapes: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    for outputs, inputs in shapes:
        size = bytes_of(name, outputs, inputs)
        linears = made(name, outputs, inputs, max(2, min(12, int(L2_BYTES // size) + 1)))
        for rows in batches:
            x = torch.randn(rows, inputs, dtype=BF16, device="cuda")
            variants = [
                [("now", linear)] if name == "bfloat16" else list(candidates(linear, rows)) for linear in linears
            ]
            for each in zip(*variants, strict=True):
                try:
                    took = milliseconds([run for _, run in each], x)
                except Exception as error:
                    print(f"{name} {rows} {each[0][0]}: {str(error).splitlines()[0][:120]}")
                    torch.cuda.synchronize()
                    continue
                yield {
                    "format": name,
                    "outputs": outputs,
                    "inputs": inputs,
                    "rows": rows,
                    "how": each[0][0],
                    "ms": took,
                }
        del linears


def report(figures: list[dict[str, Any]], batches: list[int], bandwidth: float) -> None:
    now: dict[tuple[str, int], float] = {}
    for one in figures:
        if one["how"] == "now":
            key = one["format"], one["rows"]
            now[key] = now.get(key, 0.0) + LAYERS * one["ms"]
    names = list(dict.fromkeys(one["format"] for one in figures))
    sizes = {(int(one["outputs"]), int(one["inputs"])) for one in figures}
    print(f"| ms of {LAYERS} layers | " + " | ".join(f"{rows} rows" for rows in batches) + " |")
    print("| --- |" + " --- |" * len(batches))
    for name in names:
        floor = LAYERS * sum(bytes_of(name, *size) for size in sizes) / (bandwidth * 1e9)
        cells = []
        for rows in batches:
            took = now.get((name, rows))
            wide = now.get(("bfloat16", rows))
            if took is None:
                cells.append("")
            elif rows < 256:
                cells.append(f"{took:.2f} ({floor / took:.2f} of floor)")
            else:
                cells.append(f"{took:.2f} ({took / wide:.2f} x bf16)" if wide else f"{took:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nfaster configurations:")
    products: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in figures:
        products.setdefault((one["format"], one["outputs"], one["inputs"], one["rows"]), []).append(one)
    for (name, outputs, inputs, rows), own in products.items():
        usual = next((one["ms"] for one in own if one["how"] == "now"), None)
        best = min(own, key=lambda one: float(one["ms"]))
        if usual is not None and best["ms"] < 0.97 * usual:
            print(f"{name} {outputs}x{inputs} {rows} rows: {best['ms'] / usual:.2f} with {best['how']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats, by commas")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256, 2048])
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s that the floor assumes (default: 4.2)")
    parser.add_argument("--limit-s", type=float, default=230.0, help="begin no format after so many seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    shapes = ((512, 1024),) if args.quick else SHAPES
    names = [name for name in args.formats.split(",") if name]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(WORKERS, len(names))) as pool:
        tasks = [(name, args.rows, shapes) for name in names]
        for failed in pool.imap_unordered(compile_kernels, tasks):
            if failed:
                print(failed, flush=True)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    figures: list[dict[str, Any]] = []
    for name in ("bfloat16", *names):
        if time.monotonic() - began > args.limit_s:
            print(f"{name} was not measured: {args.limit_s:.0f} s have passed")
            continue
        figures.extend(measure(name, args.rows, shapes))
        print(f"{name} after {time.monotonic() - began:.0f} s", flush=True)
    report(figures, args.rows, args.bandwidth)
    if args.json is not None:
        args.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
