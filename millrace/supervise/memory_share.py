"""How the engines of one server share memory: what an engine must leave to the others when it makes its plan.

On a CPU a KV pool takes memory only as it is used, so what is free now is promised to the engines that run. On a GPU
an engine takes its memory at once; there, the default share is divided among the models that are still to be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from millrace.config import Config, replace
from millrace.host.early_context import has_gpu
from millrace.link.messages import EngineReady

GIB = 1 << 30
GPU_FRACTION = 0.9
"""Default of `memory.fraction` on a GPU."""
NOT_TAKEN = "left free"
"""The part of a memory plan that the engine does not take."""


def config_beside(config: Config, others: Iterable[tuple[EngineReady, int]], places_left: int) -> Config:
    """The settings of a model that is loaded beside `others`, the running engines with their process ids.

    `places_left`: models that may still be loaded, this one included.
    """
    promised = sum(untaken_bytes(ready, pid) for ready, pid in others)
    if promised:
        config = replace(config, memory__reserved_gib=config.memory.reserved_gib + promised / GIB)
    if not config.memory.fraction and places_left > 1 and config.run.device != "cpu" and has_gpu():
        config = replace(config, memory__fraction=GPU_FRACTION / places_left)
    return config


def untaken_bytes(ready: EngineReady, pid: int) -> int:
    """Bytes that the engine planned with and has not touched yet. Those on a GPU are taken at start."""
    if ready.device.startswith("cuda"):
        return 0
    planned = sum(size for part, size in ready.memory_plan.items() if part != NOT_TAKEN)
    return max(0, planned - resident_bytes(pid))


def resident_bytes(pid: int) -> int:
    """Memory of the process that no other use can take: without mapped files, which the kernel counts as available."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
