"""Time of one decode step by kernel, for `--profile`: `python -m millrace.bench.gpu.profile`.

The engine runs in a thread of this process, because the profiler sees only its own process. This is a child process, so
that its GPU memory is freed afterwards. It reads a task as JSON from standard input and writes one record per batch
size to standard output. On a CPU it shows operators instead of kernels.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from millrace.bench.errors import BenchError
from millrace.bench.gpu.client import EngineSession, Prompts, TimedRow
from millrace.bench.gpu.models import GpuModel
from millrace.config import Config, as_dict, child_environment, from_dict, replace
from millrace.errors import MillraceError

STEPS = 48
"""Enough that a partial step at either end does not matter."""
SETTLED_TOKENS = 4
"""Tokens that every row has before profiling begins."""
MAX_KERNELS = 40
OUTPUT_TOKENS = 1024
START_TIMEOUT_S = 600.0
"""The parent ends this process at its own time limit."""
_NAME_CHARS = 110
_POLL_S = 0.001

Record = dict[str, object]


def profile_model(
    model: GpuModel, batches: tuple[int, ...], *, prompt_tokens: int, seed: int, time_limit_s: float
) -> list[Record]:
    """One record per batch size, from a child process."""
    task = {"config": as_dict(model.config), "batches": batches, "prompt_tokens": prompt_tokens, "seed": seed}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "millrace.bench.gpu.profile"],
            input=json.dumps(task),
            stdout=subprocess.PIPE,
            env=child_environment(TEARDOWN_CUPTI="0"),  # Keep CUPTI set up between profiles.
            text=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"The profile took more than {time_limit_s:g} s. Raise --time-limit.") from None
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 and not records:
        raise BenchError(f"The profiling process exited with code {done.returncode}; see its output above.")
    return [{"engine": "millrace", "model": model.label, "case": "profile", **record} for record in records]


def main() -> int:
    try:
        asyncio.run(_profile_all(json.loads(sys.stdin.read())))
    except MillraceError as error:
        print(f"millrace bench gpu --profile: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _profile_all(task: dict[str, Any]) -> None:
    config = replace(from_dict(task["config"]), server__in_process=True)
    _prepare_tracing(config)
    session = await EngineSession.start(config, timeout_s=START_TIMEOUT_S)
    prompts = Prompts(task["seed"], session.ready.vocab_size)
    try:
        for batch in task["batches"]:
            try:
                record = await _profile_batch(session, prompts, batch, task["prompt_tokens"])
            except Exception as error:
                record = {"error": error.message if isinstance(error, MillraceError) else repr(error)}
            print(json.dumps({"batch": batch, **record, "device": session.ready.device}), flush=True)
    finally:
        await session.stop()


def _prepare_tracing(config: Config) -> None:
    """Set up tracing before any graph is captured; kernels of earlier graphs would not be traced. The first setup also
    takes longer than the steps to be profiled."""
    import torch

    is_cuda = config.run.device != "cpu" and torch.cuda.is_available()
    with _profiler(is_cuda):
        torch.zeros(1, device="cuda" if is_cuda else "cpu").add_(1)
        if is_cuda:
            torch.cuda.synchronize()


async def _profile_batch(session: EngineSession, prompts: Prompts, batch: int, prompt_tokens: int) -> Record:
    is_cuda = not session.ready.device.startswith("cpu")
    room = min(session.ready.max_context, session.ready.kv_tokens // batch) - prompt_tokens
    outputs = min(OUTPUT_TOKENS, room)
    if outputs <= SETTLED_TOKENS + STEPS:
        raise BenchError(f"The KV pool is too small for {STEPS} steps after {batch} prompts of {prompt_tokens} tokens.")
    await session.generate(prompts.batch(batch, prompt_tokens), SETTLED_TOKENS)
    await session.wait_warm(START_TIMEOUT_S)
    rows: list[TimedRow] = []

    class Watched(TimedRow):
        def __init__(self, owner: Any) -> None:
            super().__init__(owner)
            rows.append(self)

    task = asyncio.ensure_future(session.generate(prompts.batch(batch, prompt_tokens), outputs, row_type=Watched))
    try:
        await _until(rows, batch, SETTLED_TOKENS, task)
        with _profiler(is_cuda) as profiler:
            before, started = min(row.count for row in rows), time.perf_counter()
            await _until(rows, batch, before + STEPS, task)
            steps, wall_s = min(row.count for row in rows) - before, time.perf_counter() - started
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await session.recover()
    return _summary(kernel_times(profiler, is_cuda), steps, wall_s)


async def _until(rows: list[TimedRow], batch: int, tokens: int, task: asyncio.Future[Any]) -> None:
    """Wait until every row has `tokens` tokens."""
    while len(rows) < batch or min(row.count for row in rows) < tokens:
        if task.done():
            raise BenchError("The requests ended before the profile was complete.")
        await asyncio.sleep(_POLL_S)


def _profiler(is_cuda: bool) -> Any:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    if is_cuda:
        return profile(activities=[ProfilerActivity.CUDA])
    # On a CPU, operators run on the engine's threads, not on this one.
    return profile(activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True))


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    count: int
    seconds: float


def kernel_times(profiler: Any, is_cuda: bool) -> list[KernelTime]:
    """Total time by name, longest first: GPU kernels and copies, or CPU operators (self time)."""
    spent = _device_times(profiler) if is_cuda else _operator_times(profiler)
    found = [KernelTime(name, count, us / 1e6) for name, (count, us) in spent.items() if us > 0]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _device_times(profiler: Any) -> dict[str, tuple[int, float]]:
    from torch._C._autograd import DeviceType

    found: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            count, us = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, us + event.time_range.elapsed_us())
    return found


def _operator_times(profiler: Any) -> dict[str, tuple[int, float]]:
    return {item.key: (item.count, item.self_cpu_time_total) for item in profiler.key_averages()}


def _summary(kernels: list[KernelTime], steps: int, wall_s: float) -> Record:
    """Times per step. Kernels beyond the `MAX_KERNELS` longest are summed up."""
    busy_s = sum(kernel.seconds for kernel in kernels)
    if not kernels or steps <= 0:
        raise BenchError("The profiler recorded no kernel. Is another tool tracing this device?")
    shown, rest = kernels[:MAX_KERNELS], kernels[MAX_KERNELS:]
    if rest:
        shown.append(
            KernelTime(f"{len(rest)} others", sum(k.count for k in rest), sum(kernel.seconds for kernel in rest))
        )
    return {
        "steps": steps,
        "wall_us": round(1e6 * wall_s / steps, 1),
        "busy_us": round(1e6 * busy_s / steps, 1),
        "kernels": [
            {
                "name": kernel.name[:_NAME_CHARS],
                "per_step": round(kernel.count / steps, 2),
                "us": round(1e6 * kernel.seconds / steps, 2),
                "share": round(kernel.seconds / busy_s, 4),
            }
            for kernel in shown
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
