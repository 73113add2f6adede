"""Which share of the device's limits the last seconds used."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from millrace.link.messages import EngineReady
from millrace.observe.history import Sample

WINDOW_S = 10.0


def device_use(samples: list[Sample], ready: EngineReady | None) -> Iterator[Metric]:
    """Of steps without padding, over about `WINDOW_S` seconds, idle time included. Nothing where limits are unknown."""
    if ready is None or not samples:
        return
    last = samples[-1]
    first = next((one for one in samples if one.time >= last.time - WINDOW_S and one.stats is not None), last)
    seconds = last.time - first.time
    if first.stats is None or last.stats is None or first.stats.step_no > last.stats.step_no or seconds <= 0:
        return
    read, flops = last.stats.bytes_read - first.stats.bytes_read, last.stats.flops - first.stats.flops
    for name, text, amount, limit in (
        ("memory_bandwidth", "Bytes/s of weights and KV cache", read, ready.device_bytes_per_s),
        ("compute", "FLOP/s of steps", flops, ready.device_flops),
    ):
        if limit > 0:
            whole = f"{text} as a share of the device's limit, over {WINDOW_S:g} s."
            yield GaugeMetricFamily(f"millrace_engine_{name}_ratio", whole, value=amount / seconds / limit)
