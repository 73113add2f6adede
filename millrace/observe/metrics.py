"""Prometheus metrics of a front: its requests, counted as each ends, and the engine's last report.

Nothing here runs per token. The engine sends its counters as `EngineStats` a few times a second; they are turned into
metrics only when `/metrics` is scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.link.messages import EngineReady, EngineStats, Finish
from millrace.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAITS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOTALS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)


class EngineView(Protocol):
    """The part of the engine client that metrics are read from."""

    ready: EngineReady | None
    stats: EngineStats | None
    num_engine_starts: int

    def is_progressing(self, now: float) -> bool: ...


class FrontMetrics:
    """Metrics of one front, in their own registry, so that one process can hold several fronts."""

    def __init__(self, engine: EngineView) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "millrace_requests",
            "HTTP requests by route, status and, if text was generated, finish reason.",
            ("route", "status", "finish_reason"),
            registry=registry,
        )
        self.ttft = _histogram(registry, "ttft", "Time from a request's arrival to its first token.", _WAITS_S)
        self.tpot = _histogram(
            registry, "tpot", "Mean time per output token after the first, per sequence.", _PER_TOKEN_S
        )
        self.e2e = _histogram(registry, "e2e", "Time from a request's arrival to its last token.", _TOTALS_S)
        self.queued = _histogram(registry, "queue", "Time from arrival to admission by the scheduler.", _WAITS_S)
        self.prompt_tokens = Counter(
            "millrace_request_prompt_tokens", "Prompt tokens of ended sequences.", registry=registry
        )
        self.cached_tokens = Counter(
            "millrace_request_cached_tokens",
            "Prompt tokens of ended sequences that were found in the prefix cache.",
            registry=registry,
        )
        self.output_tokens = Counter(
            "millrace_request_output_tokens", "Generated tokens of ended sequences.", registry=registry
        )
        self.open_requests = Gauge("millrace_open_requests", "Requests that are generating.", registry=registry)
        self.open_streams = Gauge("millrace_open_streams", "Streaming requests that are generating.", registry=registry)
        self.slow_client_drops = Counter(
            "millrace_slow_client_drops", "Streams closed because their client read too slowly.", registry=registry
        )
        self.client_disconnects = Counter(
            "millrace_client_disconnects", "Requests whose client disconnected before the end.", registry=registry
        )
        self.refused = Counter(
            "millrace_refused_requests",
            "Requests refused with a 429, by priority class.",
            ("priority",),
            registry=registry,
        )
        ProcessCollector(registry=registry)
        self._engine_registry = CollectorRegistry()
        self.fronts_up = Gauge(
            "millrace_fronts_up", "Fronts that answered this scrape.", registry=self._engine_registry
        )
        self.fronts_up.set(1)
        self.front_restarts = Counter(
            "millrace_front_restarts", "Fronts that were restarted after they died.", registry=registry
        )
        self._engine_registry.register(_EngineCollector(engine))

    def observe_sequence(self, finish: Finish, before_submit_s: float) -> None:
        """Count one ended sequence. `before_submit_s` is the front's time before it submitted it to the engine."""
        self.prompt_tokens.inc(finish.prompt_tokens)
        self.cached_tokens.inc(finish.cached_tokens)
        self.output_tokens.inc(finish.output_tokens)
        if finish.output_tokens == 0:
            return
        self.queued.observe(finish.queued_s)
        self.ttft.observe(before_submit_s + finish.first_token_s)
        if finish.output_tokens > 1:
            self.tpot.observe(max(0.0, finish.total_s - finish.first_token_s) / (finish.output_tokens - 1))

    def own_part(self) -> bytes:
        """The page of this front's own metrics."""
        return generate_latest(self.registry)

    def engine_part(self) -> bytes:
        """The page of the engine's metrics, which is the same for all fronts."""
        return generate_latest(self._engine_registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"millrace_{name}_seconds", text, buckets=buckets, registry=registry)


class _EngineCollector(Collector):
    """Turns the engine's last report into metrics."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        ready, stats = self._engine.ready, self._engine.stats
        is_ready = self._engine.is_progressing(time.monotonic())
        yield GaugeMetricFamily(
            "millrace_engine_ready", "1 if the engine makes progress, else 0.", value=float(is_ready)
        )
        starts = self._engine.num_engine_starts
        yield CounterMetricFamily(
            "millrace_engine_starts", "Number of times that an engine became ready.", value=float(starts)
        )
        if ready is not None:
            yield from _limits(ready)
        if stats is not None:
            yield from _gauges(stats)
            yield from _counters(stats)


def _limits(ready: EngineReady) -> Iterator[Metric]:
    labels = {"version": __version__, "model": ready.model_name, "dtype": ready.dtype, "device": ready.device}
    yield InfoMetricFamily("millrace_engine", "Version, model, dtype and device.", value=labels)
    yield GaugeMetricFamily(
        "millrace_max_context_tokens", "Maximum tokens of prompt and output together.", value=ready.max_context
    )
    yield GaugeMetricFamily("millrace_kv_capacity_tokens", "Capacity of the KV pool in tokens.", value=ready.kv_tokens)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("millrace_running_requests", "Running sequences.", value=stats.running)
    yield GaugeMetricFamily("millrace_waiting_requests", "Sequences waiting for admission.", value=stats.waiting)
    by_class = GaugeMetricFamily(
        "millrace_waiting_by_class", "Sequences waiting for admission, by priority class.", labels=["priority"]
    )
    for name, count in zip(("interactive", "standard", "batch"), stats.waiting_by_class, strict=True):
        by_class.add_metric([name], count)
    yield by_class
    blocks = GaugeMetricFamily("millrace_kv_blocks", "KV blocks by state.", labels=["state"])
    blocks.add_metric(["free"], stats.blocks_free)
    blocks.add_metric(["cached"], stats.blocks_cached)
    blocks.add_metric(["used"], stats.blocks_total - stats.blocks_free - stats.blocks_cached)
    yield blocks
    if stats.host_blocks_total:
        host = GaugeMetricFamily("millrace_kv_host_blocks", "KV blocks in host memory by state.", labels=["state"])
        host.add_metric(["free"], stats.host_blocks_total - stats.host_blocks_used)
        host.add_metric(["used"], stats.host_blocks_used)
        yield host
    left = "CUDA graphs that remain to be captured during warm-up."
    yield GaugeMetricFamily("millrace_engine_graphs_left", left, value=stats.graphs_left)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("steps", "Completed steps.", stats.step_no),
        ("preemptions", "Sequences preempted to free KV blocks.", stats.preemptions),
        ("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
        ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens),
        ("host_tokens_loaded", "Tokens whose KV blocks returned from host memory.", stats.host_tokens_loaded),
        ("host_copies_failed", "KV blocks not copied to or from host memory, by error.", stats.host_copies_failed),
        ("host_blocks_lost", "KV blocks evicted before they were copied to host memory.", stats.host_blocks_lost),
        ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", stats.prompt_tokens),
        ("output_tokens", "Output tokens.", stats.output_tokens),
        ("step_seconds", "Time of steps, from launch to result.", stats.step_seconds),
        ("plan_seconds", "Time spent planning steps.", stats.plan_seconds),
        ("host_seconds", "Host time for steps, without waiting for the device.", stats.host_seconds),
    ):
        yield CounterMetricFamily(f"millrace_engine_{name}", text, value=value)
