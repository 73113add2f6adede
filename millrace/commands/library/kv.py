"""`millrace kv`: how many bytes a model's KV cache takes, and how many requests fit into a memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.errors import ConfigError, ModelError
from millrace.terminal.folding import folded
from millrace.terminal.table import print_table

if TYPE_CHECKING:
    from millrace.models.spec.model_spec import ModelSpec

USAGE = "millrace kv MODEL [--context N] [--requests N] [--memory-gb X] [--drafts N] [--svg FILE] [--json]"
EXAMPLES = """\
The sizes are those that the engine allocates. A model that is not downloaded can be given by its config.json.

examples:
  millrace kv smollm2
  millrace kv ./config.json --context 32768 --requests 64
  millrace kv llama3.1-8b --memory-gb 80 --svg memory.svg"""

FORMATS = ("float32", "bfloat16", "float16", "fp8", "int8", "int4", "packed")
FLOAT32_MODELS = ("float32", "float16")
"""Formats of models that compute in float32; the others are shown for bfloat16 models."""
MEMORIES_GB = (16, 24, 48, 80, 141, 180)
"""Sizes of common GPUs."""
CONTEXTS = (1024, 4096, 16384, 65536, 262144)
BAR_WIDTH = 40
_RESERVE = 0.9
"""Share of a memory that weights and KV may fill; the rest is for activations and the process."""


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Of one model and KV format."""

    kv_dtype: str
    bytes_per_token: int
    """Of a token that all layers still see."""
    bytes_per_request: int
    """At the context asked for; layers with a window keep only what they see, recurrent ones a state."""
    requests_by_memory: dict[str, int]
    """Requests of that context beside the weights, by memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name, directory, .gguf file, or a config.json")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a request (default: 8,192 or the model's)")
    parser.add_argument("--requests", type=int, metavar="N", help="requests at once, for the plot (default: what fits)")
    parser.add_argument("--memory-gb", type=float, metavar="X", help="memory to fill (default: common sizes, and here)")
    parser.add_argument("--weights-gb", type=float, metavar="X", help="size of the weights (default: the model's)")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens per block (default: the setting's)")
    parser.add_argument(
        "--drafts", type=int, default=0, metavar="N", help="drafts per step: recurrent layers keep a state for each"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot of memory against requests here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from millrace.config import Config

    name, spec, weights_bytes = _model(args.model)
    if args.weights_gb is not None:
        weights_bytes = int(args.weights_gb * 1e9)
    block_size = args.block_size or Config().plan.block_size
    context = args.context or min(8192, spec.max_context)
    _check(args, context, spec.max_context)
    memories = _memories(args.memory_gb)
    places = 1 + args.drafts
    sizes = [
        KvSizes(
            kv_dtype,
            _block_token_bytes(spec, kv_dtype) * spec.kv_groups.num_groups,
            request := request_bytes(spec, kv_dtype, context, block_size, places),
            {label: max(0, int(size * _RESERVE) - weights_bytes) // request for label, size in memories.items()},
        )
        for kv_dtype in _formats(spec)
    ]
    requests = args.requests or _shown_requests(sizes)
    if args.svg:
        args.svg.write_text(_svg(name, sizes, weights_bytes, requests, args.memory_gb), encoding="utf-8")
    if args.json:
        facts = {"model": name, "weights_bytes": weights_bytes, "context": context, "block_size": block_size}
        print(json.dumps({**facts, "formats": [asdict(one) for one in sizes]}))
        return 0
    print(folded(f"{name}: weights {_gb(weights_bytes)}, context {spec.max_context:,}. {_layers(spec)}\n"))
    _print_contexts(spec, block_size, context, places)
    print(f"\nRequests of {context:,} tokens that fit beside the weights:\n")
    labels = list(sizes[0].requests_by_memory)
    rows = [[one.kv_dtype, *(f"{one.requests_by_memory[label]:,}" for label in labels)] for one in sizes]
    print_table([["KV format", *labels], *rows], right=range(1, len(labels) + 1))
    _plot(sizes, weights_bytes, requests, memories)
    return 0


def request_bytes(spec: ModelSpec, kv_dtype: str, context: int, block_size: int, state_places: int = 1) -> int:
    """Bytes of the blocks that one request of `context` tokens holds, and of its recurrent states."""
    from millrace.plan.kv.groups import KvGroups

    blocks = KvGroups(spec.kv_groups.windows).blocks_for(context, block_size)
    model_itemsize = 4 if kv_dtype in FLOAT32_MODELS else 2
    states = state_places * spec.state_bytes(model_itemsize)
    return blocks * block_size * _block_token_bytes(spec, kv_dtype) + states


def _block_token_bytes(spec: ModelSpec, kv_dtype: str) -> int:
    import torch

    from millrace.run.device.kv_pool import bytes_per_token

    if kv_dtype in ("float32", "bfloat16"):
        return bytes_per_token(spec, getattr(torch, kv_dtype))
    return bytes_per_token(spec, torch.bfloat16, kv_dtype)  # type: ignore[arg-type]


def _formats(spec: ModelSpec) -> list[str]:
    from millrace.ops.kv.packed import can_pack
    from millrace.run.device.kv_pool import HEAD_UNIT, shifts_keys

    def holds(kv_dtype: str) -> bool:
        if spec.latent is not None:
            return kv_dtype in ("float32", "bfloat16", "float16")
        if kv_dtype == "packed":
            return can_pack(spec.head_dim) and spec.rotates_whole_heads
        if kv_dtype == "int4" and not shifts_keys(spec):
            return False
        return kv_dtype not in ("fp8", "int8", "int4") or spec.head_dim % HEAD_UNIT == 0

    return [one for one in FORMATS if holds(one)]


def _model(source: str) -> tuple[str, ModelSpec, int]:
    """Name, spec and bytes of the weights, which are bfloat16 if there are none yet."""
    from millrace.models.spec.families import spec_from_config
    from millrace.sources.library import is_downloaded
    from millrace.sources.resolve import resolve_model

    path = Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not a JSON file: {error}.") from None
        spec = spec_from_config(config)
        return str(path), spec, 2 * spec.num_parameters
    if not is_downloaded(source):
        raise ModelError(f"{source!r} is not on this machine. Give its config.json, or `millrace pull {source}` first.")
    files = resolve_model(source, offline=True)
    spec = spec_from_config(files.config)
    return files.name, spec, sum(one.stat().st_size for one in files.weights) or 2 * spec.num_parameters


def _check(args: argparse.Namespace, context: int, max_context: int) -> None:
    if not 1 <= context <= max_context:
        raise ConfigError(f"--context is {context:,}, but the model takes 1 to {max_context:,} tokens.")
    for name in ("requests", "memory_gb", "block_size"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; give a number above 0.")
    if args.drafts < 0:
        raise ConfigError(f"--drafts is {args.drafts}; give 0 or more.")


def _memories(asked: float | None) -> dict[str, float]:
    """Bytes by name."""
    from millrace.sources.estimate import machine_memory

    sizes = {f"{gb:g} GB": gb * 1e9 for gb in ((asked,) if asked else MEMORIES_GB)}
    here = 0 if asked else machine_memory()
    return sizes | ({"here": float(here)} if here else {})


def _layers(spec: ModelSpec) -> str:
    windows = [layer.window for layer in spec.layers if layer.window is not None]
    text = f"{spec.num_attention} layers with {spec.num_kv_heads} KV heads of {spec.head_dim}"
    if spec.latent is not None:
        text = f"{spec.num_layers} layers with latents of {spec.latent.rank} and shared keys of {spec.latent.rope_dim}"
    text += f"; {len(windows)} of them see at most {max(windows):,} tokens back." if windows else "."
    if not spec.num_recurrent:
        return text
    state = _gb(spec.state_bytes(itemsize=2))
    return f"{text} {spec.num_recurrent} recurrent layers: {state} per request, and for each checkpoint of a prefix."


def _print_contexts(spec: ModelSpec, block_size: int, asked: int, places: int) -> None:
    contexts = sorted({one for one in (*CONTEXTS, spec.max_context, asked) if one <= spec.max_context})
    print("Bytes per token, and of a request with so many tokens:\n")
    rows = [["KV format", "per token", *(f"{one:,}" for one in contexts)]]
    for kv_dtype in _formats(spec):
        per_token = _block_token_bytes(spec, kv_dtype) * spec.kv_groups.num_groups
        cells = (_gb(request_bytes(spec, kv_dtype, one, block_size, places)) for one in contexts)
        rows.append([kv_dtype, f"{per_token:,}", *cells])
    print_table(rows, right=range(1, len(rows[0])))


def _shown_requests(sizes: list[KvSizes]) -> int:
    return max(1, *next(one for one in sizes if one.kv_dtype == "bfloat16").requests_by_memory.values())


def _plot(sizes: list[KvSizes], weights_bytes: int, requests: int, memories: Mapping[str, float]) -> None:
    """Bars of memory against the number of requests at once, for the first 16-bit format."""
    shown = next(one for one in sizes if one.kv_dtype == "bfloat16")
    counts = sorted({max(1, round(requests * share / 8)) for share in range(1, 9)})
    most = weights_bytes + counts[-1] * shown.bytes_per_request
    print(f"\nMemory of weights (▒) and KV (█) in {shown.kv_dtype} by requests at once:\n")
    for count in counts:
        total = weights_bytes + count * shown.bytes_per_request
        filled, base = (max(1, round(BAR_WIDTH * part / most)) for part in (total, weights_bytes))
        by_size = sorted(memories.items(), key=lambda one: one[1])
        fitting = next((name for name, size in by_size if total <= size * _RESERVE), "none of these")
        bar = "▒" * min(base, filled) + "█" * max(0, filled - base)
        print(f"{count:>9,}  {bar:<{BAR_WIDTH}}  {_gb(total):>9}  {fitting}")


def _svg(name: str, sizes: list[KvSizes], weights_bytes: int, requests: int, memory_gb: float | None) -> str:
    """Lines of memory against requests at once; formats of one size share a line."""
    from millrace.load.svg import Line, plot, svg_file

    names: dict[int, list[str]] = {}
    for one in sizes:
        names.setdefault(one.bytes_per_request, []).append(one.kv_dtype)
    counts = [float(round(requests * share / 8)) for share in range(9)]
    lines = [
        Line(", ".join(formats), counts, [(weights_bytes + count * size) / 1e9 for count in counts])
        for size, formats in sorted(names.items(), reverse=True)
    ]
    if memory_gb:
        lines.append(Line(f"{_RESERVE:.0%} of {memory_gb:g} GB", counts, [memory_gb * _RESERVE] * len(counts)))
    return svg_file(plot(f"Memory of weights and KV, {name}", lines, "requests at once", "GB"))


def _gb(num_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.3g} {name}" if num_bytes < 1000 * unit else f"{num_bytes / unit:,.0f} {name}"
    return f"{num_bytes / 1e3:.3g} KB"
