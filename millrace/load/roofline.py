"""Operating points of steps against what the machine can do: arithmetic intensity, achieved FLOP/s, bandwidth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.load.svg import Line, plot

MEASURED_BYTES = 1 << 27
MEASURED_SIZE = 768
PAUSE_S = 1.0
"""A device that waits longer than this for the next step had nothing to do."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    bytes_per_s: float
    flops: float
    is_measured: bool
    """True: measured here, on this processor; False: of the server's GPU."""


def machine_limits(steps: dict[str, Any]) -> MachineLimits:
    """Of the server's device, or of this machine's processor if the server runs on one."""
    if steps["device_flops"] > 0:
        return MachineLimits(steps["device_bytes_per_s"], steps["device_flops"], False)
    return measure_processor()


def measure_processor() -> MachineLimits:
    """Read bandwidth and float32 FLOP/s with NumPy; takes a fraction of a second."""
    data = np.ones(MEASURED_BYTES // 8)
    matrix = np.ones((MEASURED_SIZE, MEASURED_SIZE), np.float32)
    read_s = min(_seconds(data.sum) for _ in range(3))
    product_s = min(_seconds(lambda: matrix @ matrix) for _ in range(4))
    return MachineLimits(MEASURED_BYTES / read_s, 2 * MEASURED_SIZE**3 / product_s, True)


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(steps: dict[str, Any], stats: dict[str, Any], limits: MachineLimits) -> list[str]:
    device, prefill = np.array(steps["device_s"]), np.array(steps["prefill_tokens"])
    lines = [f"{len(device)} steps of {steps['model']} on {steps['device']}"]
    for name, chosen in (("decode only", prefill == 0), ("with prefill", prefill > 0)):
        if chosen.any():
            lines.append(_kind(name, steps, device, chosen, limits))
    lines.append(_busy(steps, device.sum()))
    parts = {name: [v for v in values if v is not None] for name, values in stats["series"]["step_ms"].items()}
    means = {name: float(np.mean(values)) for name, values in parts.items() if values}
    if means:
        lines.append("per step (last minute): " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in means.items()))
    where = "measured on this machine with NumPy" if limits.is_measured else "of the device"
    lines.append(f"limits {where}: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s")
    return lines


def _busy(steps: dict[str, Any], device_s: float) -> str:
    """How busy the device was between the first and the last step, without the pauses of a server that had no work."""
    launched, done = np.array(steps["launched"]), np.array(steps["done"])
    gaps = launched[1:] - np.maximum.accumulate(done)[:-1]
    pauses_s = gaps[gaps > PAUSE_S].sum()
    span = max(done.max() - launched.min() - pauses_s, 1e-9)
    left_out = f", pauses of {pauses_s:.0f} s without work left out" if pauses_s else ""
    return f"device busy {100 * min(1.0, device_s / span):.0f}% of {span:.1f} s{left_out}"


def _kind(name: str, steps: dict[str, Any], device: Any, chosen: Any, limits: MachineLimits) -> str:
    seconds = device[chosen].sum()
    rows, read = np.array(steps["rows"])[chosen], np.array(steps["bytes"], np.float64)[chosen]
    flops = np.array(steps["flops"], np.float64)[chosen]
    bandwidth, rate = read.sum() / seconds, flops.sum() / seconds
    middle, tail = np.percentile(device[chosen], [50, 95])
    return (
        f"{name:<13}{chosen.sum():>6} steps, {100 * seconds / device.sum():5.1f}% of device time;"
        f" p50 {1e3 * middle:.2f} ms, p95 {1e3 * tail:.2f} ms; {rows.mean():.1f} rows;"
        f" {bandwidth / 1e9:.1f} GB/s ({100 * bandwidth / limits.bytes_per_s:.0f}%),"
        f" {rate / 1e9:.1f} GFLOP/s ({100 * rate / limits.flops:.0f}%)"
    )


def page(steps: dict[str, Any], limits: MachineLimits) -> str:
    device = np.maximum(np.array(steps["device_s"]), 1e-9)
    read, flops = np.array(steps["bytes"], np.float64), np.array(steps["flops"], np.float64)
    known = (read > 0) & (flops > 0)
    intensity, achieved = flops[known] / read[known], flops[known] / device[known] / 1e9
    lowest, highest = (intensity.min(), intensity.max()) if known.any() else (1.0, 1.0)
    xs = np.geomspace(lowest / 2, max(highest, limits.flops / limits.bytes_per_s) * 2, 60)
    roof = np.minimum(xs * limits.bytes_per_s, limits.flops) / 1e9
    has_prefill = np.array(steps["prefill_tokens"])[known] > 0
    lines = [
        Line("limit", xs.tolist(), roof.tolist()),
        Line("with prefill", intensity[has_prefill].tolist(), achieved[has_prefill].tolist(), dots=True),
        Line("decode only", intensity[~has_prefill].tolist(), achieved[~has_prefill].tolist(), dots=True),
    ]
    drawn = plot("Roofline of the steps", lines, "FLOPs per byte read", "GFLOP/s", log_x=True)
    times = plot(
        "Step time", [Line("device", list(range(len(device))), (1e3 * device).tolist(), dots=True)], "step", "ms"
    )
    return f"<!doctype html><meta charset=utf-8><title>millrace profile</title>{drawn}{times}"
