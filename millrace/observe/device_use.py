"""Which share of the device's limits the last seconds used."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from millrace.link.messages import EngineReady
from millrace.observe.history import Sample

WINDOW_S = 10.0


def device_use(samples: list[Sample], ready: EngineReady | None) -> Iterator[Metric]:
    """Of steps without padding, over about `WINDOW_S` seconds, idle time included. Nothing where limits are unknown."""
    if ready is None:
        return
    read, flops = _per_second(samples)
    for name, text, rate, limit in (
        ("memory_bandwidth", "Bytes/s of weights and KV cache", read, ready.device_bytes_per_s),
        ("compute", "FLOP/s of steps", flops, ready.device_flops),
    ):
        if limit > 0:
            whole = f"{text} as a share of the device's limit, over {WINDOW_S:g} s."
            yield GaugeMetricFamily(f"millrace_engine_{name}_ratio", whole, value=rate / limit)


def _per_second(samples: list[Sample]) -> tuple[float, float]:
    """Bytes and FLOPs of the engine that runs now; 0 until there are two samples of it."""
    last = samples[-1] if samples else None
    if last is None or last.stats is None:
        return 0.0, 0.0
    for one in samples:
        seconds = last.time - one.time
        if 0 < seconds <= WINDOW_S and one.stats is not None and one.stats.step_no <= last.stats.step_no:
            read, flops = last.stats.bytes_read - one.stats.bytes_read, last.stats.flops - one.stats.flops
            return max(0.0, read) / seconds, max(0.0, flops) / seconds
    return 0.0, 0.0
