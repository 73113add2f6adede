"""What a model will need: memory for weights and context, and a rough decoding speed. For display, not for planning."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from millrace.host.cores import usable_cores
from millrace.host.free_memory import available_bytes, total_bytes
from millrace.sources.catalogue import CatalogueEntry, entry_of_files, find_entry
from millrace.sources.encoders.families import is_encoder
from millrace.sources.encoders.json_files import json_file
from millrace.sources.encoders.known_encoders import KNOWN_ENCODERS
from millrace.sources.known_models import find_known
from millrace.sources.memory_rate import memory_bytes_per_s
from millrace.sources.names import has_gpu

GPU_QUERY_TIMEOUT_S = 10
_SHOWN_CONTEXT = 8192
_OVERHEAD_BYTES = 600e6
"""Libraries and buffers of the engine's process."""


def estimate_lines(name: str, weight_bytes: int) -> Iterator[str]:
    """Memory and speed of a model with these weights; the KV part only for models of the catalogue."""
    entry = find_entry(name) or entry_of_files(name)
    context = min(entry.context, _SHOWN_CONTEXT) if entry is not None else 0
    kv_bytes = entry.kv_bytes_per_token * context if entry is not None else 0
    needed = weight_bytes + kv_bytes + _OVERHEAD_BYTES
    parts = f"weights {_gb(weight_bytes)}" + (f", {context:,} tokens of context {_gb(kv_bytes)}" if kv_bytes else "")
    yield f"{name}: needs about {_gb(needed)} of memory ({parts})."
    if has_gpu():
        return
    available = available_bytes()
    if available and needed > available:
        yield (
            f"Warning: this machine has {_gb(available)} available, so it may not fit."
            " Choose a smaller model or quantisation, or lower --max-context."
        )
    if _reads_only(name):
        yield f"It reads texts and writes none: `millrace bench encode --model {name}` measures texts per second here."
        return
    share = entry.active / entry.parameters if entry is not None and entry.active else 1.0
    bandwidth = memory_bytes_per_s()
    busy = " now. Other programs keep this machine busy: it is faster when they have ended" if is_busy() else ""
    yield (
        f"One stream on this CPU gets at most about {_two_digits(bandwidth / (weight_bytes * share))} tokens/s: the"
        f" weights are read for each token, and memory gives {_rate(bandwidth)}{busy}."
    )


def is_busy() -> bool:
    """True if more programs want to run than there are cores, so that a measurement shows too little."""
    return os.getloadavg()[0] > usable_cores()


def _reads_only(name: str) -> bool:
    """True for an encoder: a known one, or a directory whose config.json describes one."""
    config = json_file(Path(name) / "config.json", dict)
    return find_known(name) in KNOWN_ENCODERS if config is None else is_encoder(config)


def memory_of(entry: CatalogueEntry, weight_format: str) -> float:
    """Bytes for weights in this format, a context of 8,192 tokens and the process."""
    return (
        entry.num_bytes(weight_format) + entry.kv_bytes_per_token * min(entry.context, _SHOWN_CONTEXT) + _OVERHEAD_BYTES
    )


def machine_memory() -> int:
    """Bytes that a model can have here if nothing else runs: of the GPU if there is one, else of the machine. 0 =
    unknown."""
    return gpu_bytes() if has_gpu() else total_bytes()


def gpu_bytes() -> int:
    """Memory of the largest GPU; 0 = unknown."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=True)
        return max(int(line) << 20 for line in found.stdout.split("\n") if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def _two_digits(value: float) -> str:
    """Two significant digits: more would be noise."""
    return f"{float(f'{value:.2g}'):,.10g}"


def _rate(bytes_per_s: float) -> str:
    gb_per_s = bytes_per_s / 1e9
    return f"{gb_per_s:.0f} GB/s" if gb_per_s >= 10 else f"{gb_per_s:.1f} GB/s"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
