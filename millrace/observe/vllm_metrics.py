"""The engine's figures under vLLM's metric names, for dashboards and autoscalers made for vLLM.

On `/metrics?names=vllm` only: `promtool` warns about colons in names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.link.engine_stats import EngineStats
from millrace.observe import histograms
from millrace.observe.engine_metrics import EngineView, buckets_of
from millrace.observe.histograms import SPECS, Histograms
from millrace.observe.model_figures import ModelFigures

_HISTOGRAMS = {
    "time_to_first_token_seconds": histograms.TTFT,
    "inter_token_latency_seconds": histograms.ITL,
    "time_per_output_token_seconds": histograms.ITL,
    "request_time_per_output_token_seconds": histograms.TPOT,
    "e2e_request_latency_seconds": histograms.SEQUENCE,
    "request_queue_time_seconds": histograms.QUEUE,
    "request_prefill_time_seconds": histograms.PREFILL,
    "request_decode_time_seconds": histograms.DECODE,
    "request_prompt_tokens": histograms.PROMPT_LENGTH,
    "request_generation_tokens": histograms.OUTPUT_LENGTH,
}
"""`time_per_output_token_seconds` is what older versions call the inter-token latency."""
_FINISHED = {"stop": "stop", "length": "length", "abort": "abort", "cancelled": "abort"}
"""Finish reasons of vLLM by ours; the others are errors."""


class VllmCollector(Collector):
    def __init__(self, models: Mapping[str, ModelFigures]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models.values():
            for family in _families(model.engine):
                merged = families.setdefault(family.name, family)
                if merged is not family:
                    merged.samples += family.samples
        yield from families.values()


def _families(engine: EngineView) -> Iterator[Metric]:
    ready, stats = engine.ready, engine.stats
    if ready is None or stats is None:
        return
    model = ready.model_name
    for name, text, value in _gauges(stats):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    for name, text, value in _counters(stats):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    yield _success(stats, model)
    if stats.histograms:
        yield from _histograms(stats, model)


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    used = (stats.blocks_total - stats.blocks_free - stats.blocks_cached) / max(1, stats.blocks_total)
    yield "num_requests_running", "Running sequences.", stats.running
    yield "num_requests_waiting", "Sequences waiting for admission.", stats.waiting
    yield "kv_cache_usage_perc", "Share of the KV blocks in use (1 = all).", used
    yield "gpu_cache_usage_perc", "The same, under its older name.", used


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "num_preemptions", "Sequences preempted.", stats.preemptions
    yield "prompt_tokens", "Prompt tokens of requests that got their first token.", stats.prompt_tokens
    yield "generation_tokens", "Output tokens.", stats.output_tokens
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens
    yield "spec_decode_num_draft_tokens", "Drafts verified; on a GPU places for them.", stats.drafted_tokens
    yield "spec_decode_num_accepted_tokens", "Drafts that became output.", stats.accepted_tokens


def _success(stats: EngineStats, model: str) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success", "Ended sequences by reason.", labels=["model_name", "finished_reason"]
    )
    counts = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason, count in stats.finished.items():
        counts[_FINISHED.get(reason, "error")] += count
    for reason, count in counts.items():
        family.add_metric([model, reason], count)
    return family


def _histograms(stats: EngineStats, model: str) -> Iterator[Metric]:
    values = Histograms(stats.histograms).values.sum(axis=1)
    for name, kind in _HISTOGRAMS.items():
        family = HistogramMetricFamily(f"vllm:{name}", SPECS[kind].help, labels=["model_name"])
        family.add_metric([model], buckets_of(SPECS[kind], values[kind]), sum_value=float(values[kind][-1]))
        yield family
