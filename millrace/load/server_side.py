"""What a Millrace server says about a run: read from /v1/stats. Other servers are judged by what clients see."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import numpy as np

from millrace.load.client import Endpoint

TIMEOUT_S = 5.0


async def server_stats(endpoint: Endpoint, window_s: float) -> dict[str, Any] | None:
    """None if the server has no such page."""
    window = min(900, max(5, round(window_s)))
    path = f"{endpoint.url}/v1/stats?window={window}&step={max(1, window // 60)}"
    request = urllib.request.Request(path, headers=endpoint.headers)

    def get() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                stats = json.loads(answer.read())
                return stats if isinstance(stats, dict) and stats.get("object") == "stats" else None
        except (OSError, ValueError):
            return None

    return await asyncio.to_thread(get)


def bottleneck(stats: dict[str, Any] | None, late_ms: float | None, ttft_ms: float, queue_limit: float = 0.25) -> str:
    """One sentence that names what limits throughput at this load."""
    if late_ms is not None and late_ms > max(20.0, 0.2 * ttft_ms):
        return (
            f"this client: it sent requests up to {late_ms:.0f} ms late (p99). Use more --processes or another machine."
        )
    if stats is None:
        return "unknown: the server has no /v1/stats, so only its latency is seen."
    series = stats["series"]
    kv_used, waiting = _mean(series["kv_share"]["used"]), _mean(series["waiting"])
    steps_per_s = series["steps_per_s"]
    step = {name: _mean_per_step(values, steps_per_s) for name, values in series["step_ms"].items()}
    rows, busy = _mean_per_step(series["rows_per_step"], steps_per_s), step["device"] * _mean(steps_per_s) / 1e3
    rows_free = stats["now"].get("rows_free", 1)
    if _mean(series["refused_per_s"]) > 0:
        return "admission control: requests were refused because their first token would have come too late."
    if _mean(series["preemptions_per_s"]) > 0.05 or kv_used > 0.9:
        return f"KV memory: {100 * kv_used:.0f}% of the KV blocks were in use and requests were preempted or waited."
    if waiting > queue_limit and not rows_free:
        return f"the number of rows: all were taken and {waiting:.1f} requests waited on average (--max-running)."
    host = step["plan"] + step["launch"] + step["apply"]
    if host > step["device"]:
        return f"the engine's host code: {host:.1f} ms per step against {step['device']:.1f} ms on the device."
    prefill = _mean_per_step(series["prefill_tokens_per_step"], steps_per_s)
    decode = _mean_per_step(series["decode_tokens_per_step"], steps_per_s)
    if busy > 0.8:
        kind = "prefill (compute)" if prefill > decode else "decode (memory bandwidth)"
        return (
            f"the device: busy {100 * min(1.0, busy):.0f}% of the time, mostly {kind}; {rows:.1f} rows and"
            f" {step['device']:.1f} ms per step."
        )
    if _mean(series["event_loop_lag_ms"]) > 20:
        return "the fronts: their event loop was late; use more --fronts."
    return f"none was saturated: the device was busy {100 * busy:.0f}% of the time."


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0


def _mean_per_step(values: list[float | None], steps_per_s: list[float | None]) -> float:
    """Mean over all steps of values that are means over the steps of an interval."""
    pairs = [(value, steps) for value, steps in zip(values, steps_per_s, strict=True) if value is not None and steps]
    return sum(value * steps for value, steps in pairs) / sum(steps for _, steps in pairs) if pairs else 0.0
