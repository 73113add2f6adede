"""Times products of one or two rows on a GPU, in many launch configurations: `python tools/gpu_products.py`.

Sizes of models that the tables in `ops/tuning/` do not have, in CUDA graphs over weights larger than the L2 cache.
Prints microseconds of cuBLAS and of the fastest tiles of each size, then how far each configuration is from the fastest
over all sizes: the first one is what sizes without an entry should take.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator

import torch
from gpu_formats import BF16, L2_BYTES, milliseconds
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.triton.gemm.product import Tiles, multiply

SIZES = {
    "latent attention of V2-Lite": ((3648, 2048), (2048, 2048), (2048, 2816), (64, 2048)),
    "Qwen 2.5 7B": ((4608, 3584), (3584, 3584), (3584, 18944)),
    "Qwen 2.5 1.5B": ((2048, 1536), (1536, 1536), (1536, 8960)),
    "Gemma 2 2B": ((4096, 2304), (2304, 2048), (2304, 9216)),
    "Llama 3.2 1B": ((3072, 2048), (2048, 8192)),
    "14B": ((7168, 5120), (5120, 5120), (5120, 17408)),
}
GATED = ((5632, 2048), (17920, 1536), (37888, 3584), (18432, 2304), (16384, 2048), (34816, 5120))
SHAPES = ((1, 1024, 1), (2, 512, 1), (2, 512, 2), (4, 512, 2), (8, 512, 4), (2, 1024, 2), (4, 1024, 4), (4, 2048, 8))
Run = Callable[[Tensor], Tensor]


def tiles() -> Iterator[Tiles]:
    for outputs, inputs, warps in SHAPES:
        for shared in (False, True):
            yield Tiles("gemv", 2, outputs, inputs, 1, warps, 1, True, 1, shared)


def candidates(kind: str, outputs: int, inputs: int) -> Iterator[tuple[str, Run]]:
    weight = torch.randn(outputs, inputs, device="cuda").to(BF16)
    if kind == "gated":
        yield "cuBLAS", lambda x: composed(F.linear(x, weight))
        for one in tiles():
            yield name_of(one), functools.partial(multiply, weight=weight, tiles=one, activation="silu")
        return
    yield "cuBLAS", lambda x: F.linear(x, weight)
    for one in tiles():
        yield name_of(one), functools.partial(multiply, weight=weight, tiles=one)


def composed(gate_up: Tensor) -> Tensor:
    from millrace.ops.triton.activation import gated

    return gated(gate_up, "silu")[0]


def name_of(one: Tiles) -> str:
    return f"n={one.n} k={one.k} warps={one.warps}" + (" shared" if one.shared_x else "")


def products() -> list[tuple[str, int, int]]:
    plain = [("plain", *size) for sizes in SIZES.values() for size in sizes]
    return plain + [("gated", *size) for size in GATED]


def compile_kernels(task: tuple[tuple[str, int, int], list[int]]) -> None:
    (kind, outputs, inputs), rows = task
    for count in rows:
        x = torch.randn(count, inputs, dtype=BF16, device="cuda")
        for _, run in candidates(kind, outputs, inputs):
            run(x)
    torch.cuda.synchronize()


def measure(kind: str, outputs: int, inputs: int, rows: int) -> dict[str, float]:
    """Microseconds by configuration."""
    size = 2 * outputs * inputs
    copies = [list(candidates(kind, outputs, inputs)) for _ in range(max(2, min(12, int(L2_BYTES // size) + 1)))]
    x = torch.randn(rows, inputs, dtype=BF16, device="cuda")
    return {each[0][0]: 1000 * milliseconds([run for _, run in each], x) for each in zip(*copies, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s that the floor assumes (default: 4.2)")
    args = parser.parse_args()
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_kernels, [(product, args.rows) for product in products()], chunksize=1)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for rows in args.rows:
        print(f"\n| {rows} rows | floor, µs | cuBLAS | fastest tiles | |\n| --- | --- | --- | --- | --- |")
        ratios: dict[str, dict[str, list[float]]] = {}
        for kind, outputs, inputs in products():
            took = measure(kind, outputs, inputs, rows)
            cublas = took.pop("cuBLAS")
            best = min(took, key=took.__getitem__)
            floor = 2 * outputs * inputs / args.bandwidth / 1e6
            print(f"| {kind} {outputs}x{inputs} | {floor:.1f} | {cublas:.2f} | {took[best]:.2f} | {best} |", flush=True)
            for name, each in took.items():
                ratios.setdefault(kind, {}).setdefault(name, []).append(each / min(took[best], cublas))
        for kind, by_name in ratios.items():
            means = {name: math.exp(sum(map(math.log, each)) / len(each)) for name, each in by_name.items()}
            ranked = sorted(means, key=means.__getitem__)[:4]
            text = "; ".join(f"{name}: {means[name]:.3f}, at most {max(by_name[name]):.2f}" for name in ranked)
            print(f"{kind}, time over the fastest: {text}")


if __name__ == "__main__":
    main()
