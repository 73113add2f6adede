"""Time of GPU decode steps over long contexts, against the bytes that they read: `python -m
millrace.bench.gpu.long_steps`.

No engine takes part, and no prompt is computed: the cache is filled with random keys and values, so that contexts of
any length cost nothing. A step is the forward pass and the logits, in a captured graph, without the packet and the
draw, which take some 20 µs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millrace.bench.figures import Figure, print_table
from millrace.bench.gpu.models import known_shapes
from millrace.config import KvDtype
from millrace.models.batch import ForwardBatch
from millrace.models.decoder import Decoder
from millrace.models.load import load_decoder
from millrace.ops.attention import TiledRows
from millrace.ops.kv.cache import write_kv
from millrace.run.device.kv_pool import allocate_kv, bytes_per_token, resolve_kv_dtype
from millrace.sources.resolve import resolve_model

BLOCK_SIZE = 16
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (4000, 8000, 16000, 32000)
RANDOM_BLOCKS = 1024
"""Blocks of random content; the rest of the cache repeats them."""
COPY_BYTES = 2 << 30
REPLAYS = 15
SPARE_BYTES = 6 << 30
"""Device memory left for everything but weights and cache."""


@dataclass(frozen=True, slots=True)
class LongStep:
    batch: int
    context: int
    queries: int
    ms: float
    floor_ms: float
    """Weights and KV at the speed of a copy."""

    def figure(self) -> Figure:
        name = f"{self.batch} rows at {self.context:,} tokens" + (f", {self.queries} each" if self.queries > 1 else "")
        ratio = f"bytes alone {self.floor_ms:.2f} ms: {self.ms / self.floor_ms:.2f} x"
        return Figure(name, "step", self.ms, "ms", note=ratio)


class LongSteps:
    """A model with random weights and a cache with random content."""

    def __init__(self, shape: Path, kv_dtype: KvDtype, max_tokens: int) -> None:
        self.device, dtype = torch.device("cuda"), torch.bfloat16
        self.bytes_per_ms = _copy_speed(self.device)
        before = torch.cuda.memory_allocated()
        self.decoder: Decoder = load_decoder(resolve_model(f"random:{shape}"), device=self.device, dtype=dtype)
        spec = self.decoder.spec
        self.weight_bytes = torch.cuda.memory_allocated() - before
        if not spec.tied_head:
            self.weight_bytes -= spec.vocab_size * spec.hidden_size * dtype.itemsize
        self.kv_dtype = resolve_kv_dtype(kv_dtype, spec, dtype=dtype, device=self.device)
        self.token_bytes = bytes_per_token(spec, dtype, self.kv_dtype)
        room = (torch.cuda.mem_get_info()[0] - SPARE_BYTES) // self.token_bytes
        self.num_blocks = min(max_tokens, room) // BLOCK_SIZE
        self._kv = allocate_kv(
            spec, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=self.device,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        for layer in self._kv:
            _fill(layer, spec.num_kv_heads, spec.head_dim)

    def measure(self, batch: int, context: int, queries: int = 1) -> LongStep | None:
        """None if the cache has no room for it."""
        if batch * -(-context // BLOCK_SIZE) > self.num_blocks:
            return None
        graph = self.capture(batch, context, queries)
        times = sorted(_milliseconds(graph.replay) for _ in range(REPLAYS))
        num_bytes = self.weight_bytes + batch * context * self.token_bytes
        return LongStep(batch, context, queries, statistics.median(times), num_bytes / self.bytes_per_ms)

    @torch.inference_mode()
    def capture(self, batch: int, context: int, queries: int) -> torch.cuda.CUDAGraph:
        step = self._batch(batch, context, queries)
        self.decoder.logits(self.decoder.forward(step, self._kv), draws=True)  # compiles kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decoder.logits(self.decoder.forward(step, self._kv), draws=True)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _batch(self, batch: int, context: int, queries: int) -> ForwardBatch:
        blocks = -(-context // BLOCK_SIZE)
        positions = torch.arange(context - queries, context, device=self.device).repeat(batch)
        tables = torch.arange(1, batch * blocks + 1, dtype=torch.int32, device=self.device).view(batch, blocks)
        rows = torch.arange(batch, device=self.device).repeat_interleave(queries)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        return ForwardBatch(
            token_ids=torch.randint(0, self.decoder.spec.vocab_size, (batch * queries,), device=self.device),
            positions=positions,
            block_ids=tables[rows, positions // BLOCK_SIZE].long()[None],
            offsets=positions % BLOCK_SIZE,
            rows=TiledRows(
                starts * queries, torch.full_like(starts[1:], context), tables[None], table_rows=starts[:-1],
                queries_per_row=queries,
            ),
        )  # fmt: skip


def _fill(layer: Tensor, num_kv_heads: int, head_dim: int) -> None:
    count = min(RANDOM_BLOCKS, layer.shape[1])
    slots = torch.arange(count * BLOCK_SIZE, device=layer.device)
    numbers = torch.randn((len(slots), 2, num_kv_heads, head_dim), dtype=torch.bfloat16, device=layer.device)
    write_kv(numbers, layer, slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    for first in range(count, layer.shape[1], count):
        part = layer[:, first : first + count]
        part.copy_(layer[:, : part.shape[1]])


def _copy_speed(device: torch.device) -> float:
    """Bytes per millisecond, read and written, of a copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(_milliseconds(lambda: target.copy_(source)) for _ in range(5))


def _milliseconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def figures(steps: LongSteps, batches: list[int], contexts: list[int], queries: int) -> Iterator[Figure]:
    for context in contexts:
        for batch in batches:
            found = steps.measure(batch, context, queries)
            if found is not None:
                yield found.figure()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b", choices=sorted(known_shapes()))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--queries", type=int, default=1, help="tokens of each row in a step: one and its drafts")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "full", "packed", "fp8", "int4"))
    args = parser.parse_args()
    longest = max(args.batches) * (max(args.contexts) + BLOCK_SIZE)
    steps = LongSteps(known_shapes()[args.shape], args.kv_dtype, longest)
    copy = f"copy {steps.bytes_per_ms / 1e9:.2f} TB/s"
    title = f"{args.shape}, KV {steps.kv_dtype}, weights {steps.weight_bytes / 1e9:.2f} GB, {copy}"
    print_table(figures(steps, args.batches, args.contexts, args.queries), title)


if __name__ == "__main__":
    main()
