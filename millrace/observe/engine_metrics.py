"""Turns the engine's last report into metrics when `/metrics` is scraped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from millrace.link.adapter_messages import CanaryStats
from millrace.link.engine_stats import EngineStats, TenantFigures
from millrace.link.messages import EngineReady
from millrace.observe.histograms import SPECS, Floats, Histograms, HistogramSpec
from millrace.observe.sketch import Sketch
from millrace.observe.token_use import token_use
from millrace.params.classes import CLASS_NAMES
from millrace.version import __version__


class ResumedRequests(Protocol):
    """What became of the requests of this front whose engine died."""

    num_resumed: int
    num_given_up: int

    @property
    def num_waiting(self) -> int: ...


class EngineView(Protocol):
    """The part of the engine client that metrics are read from."""

    ready: EngineReady | None
    stats: EngineStats | None
    latencies: Sketch
    num_engine_starts: int
    is_unloaded: bool
    is_wanted: bool
    failure: str | None

    @property
    def requests(self) -> ResumedRequests: ...

    def is_progressing(self, now: float) -> bool: ...


def engine_metrics(engine: EngineView) -> Iterator[Metric]:
    ready, stats = engine.ready, engine.stats
    is_asleep = engine.is_unloaded and not engine.is_wanted and engine.failure is None
    yield GaugeMetricFamily("millrace_engine_unloaded", "1 if no request needs the model.", value=float(is_asleep))
    if not is_asleep:  # A model that nobody needs is no reason for an alert.
        is_ready = float(engine.is_progressing(time.monotonic()))
        yield GaugeMetricFamily("millrace_engine_ready", "1 if the engine makes progress, else 0.", value=is_ready)
    starts = engine.num_engine_starts
    yield CounterMetricFamily(
        "millrace_engine_starts", "Number of times that an engine became ready.", value=float(starts)
    )
    if ready is not None:
        yield from _limits(ready)
    if stats is not None:
        yield from _gauges(stats)
        yield from _kv(stats)
        yield from _mirror(stats)
        yield from _adapters(stats)
        yield from _counters(stats)
        yield from _labelled_counters(stats)
        yield from _histograms(stats)


def resume_metrics(engine: EngineView) -> Iterator[Metric]:
    """Of one front."""
    of = engine.requests
    yield GaugeMetricFamily(
        "millrace_sequences_awaiting_engine",
        "Sequences whose engine died and that wait for the next.",
        value=of.num_waiting,
    )
    yield CounterMetricFamily(
        "millrace_resumed_sequences",
        "Sequences that the next engine continued after theirs had died.",
        value=of.num_resumed,
    )
    yield CounterMetricFamily(
        "millrace_given_up_sequences",
        "Sequences that ended with an error because their engine had died.",
        value=of.num_given_up,
    )


def _limits(ready: EngineReady) -> Iterator[Metric]:
    labels = {"version": __version__, "model": ready.model_name, "dtype": ready.dtype, "device": ready.device}
    yield InfoMetricFamily("millrace_engine", "Version, model, dtype and device.", value=labels)
    yield GaugeMetricFamily(
        "millrace_max_context_tokens", "Maximum tokens of prompt and output together.", value=ready.max_context
    )
    yield GaugeMetricFamily("millrace_kv_capacity_tokens", "Capacity of the KV pool in tokens.", value=ready.kv_tokens)
    if ready.device_flops:
        yield GaugeMetricFamily(
            "millrace_device_flops", "FLOP/s of the device (CPU: measured).", value=ready.device_flops
        )
    if ready.device_bytes_per_s:
        yield GaugeMetricFamily(
            "millrace_device_bytes_per_second",
            "Bandwidth of the device (CPU: measured).",
            value=ready.device_bytes_per_s,
        )


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("millrace_running_requests", "Running sequences.", value=stats.running)
    yield GaugeMetricFamily("millrace_waiting_requests", "Sequences waiting for admission.", value=stats.waiting)
    yield _by_class("millrace_running_by_class", "Running sequences, by priority class.", stats.running_by_class)
    yield _by_class(
        "millrace_waiting_by_class", "Sequences waiting for admission, by priority class.", stats.waiting_by_class
    )
    left = "CUDA graphs that remain to be captured during warm-up."
    yield GaugeMetricFamily("millrace_engine_graphs_left", left, value=stats.graphs_left)


def _by_class(name: str, text: str, counts: tuple[int, ...]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["priority"])
    for class_name, count in zip(CLASS_NAMES, counts, strict=True):
        family.add_metric([class_name], count)
    return family


def _kv(stats: EngineStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("millrace_kv_blocks", "KV blocks by state.", labels=["state"])
    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    blocks.add_metric(["free"], stats.blocks_free)
    blocks.add_metric(["cached"], stats.blocks_cached - stats.blocks_retained)
    blocks.add_metric(["retained"], stats.blocks_retained)
    blocks.add_metric(["used"], used)
    yield blocks
    lower = [
        ("host", "in host memory", stats.host_blocks_total, stats.host_blocks_used),
        ("disk", "on the disk", stats.disk_blocks_total, stats.disk_blocks_used),
    ]
    lower = [tier for tier in lower if tier[2]]
    for name, where, num_total, num_used in lower:
        tier = GaugeMetricFamily(f"millrace_kv_{name}_blocks", f"KV blocks {where} by state.", labels=["state"])
        tier.add_metric(["free"], num_total - num_used)
        tier.add_metric(["used"], num_used)
        yield tier
    if stats.state_slots_total:
        yield from _states(stats)
    places = GaugeMetricFamily(
        "millrace_kv_used_ratio", "Share of the KV blocks of a place that hold keys and values.", labels=["place"]
    )
    places.add_metric(["device"], (used + stats.blocks_cached) / max(1, stats.blocks_total))
    for name, _, num_total, num_used in lower:
        places.add_metric([name], num_used / num_total)
    yield places


def _states(stats: EngineStats) -> Iterator[Metric]:
    slots = GaugeMetricFamily("millrace_state_slots", "Checkpoints of recurrent states by state.", labels=["state"])
    slots.add_metric(["free"], stats.state_slots_total - stats.state_slots_used)
    slots.add_metric(["used"], stats.state_slots_used)
    yield slots
    kept = stats.state_slots_used * stats.state_slot_bytes
    yield GaugeMetricFamily("millrace_state_used_bytes", "Bytes of these checkpoints.", value=kept)
    for name, text, value in (
        ("hits", "Times that a request began with a checkpoint of a recurrent state.", stats.state_hits),
        ("evictions", "Checkpoints of recurrent states that made room for others.", stats.state_evictions),
    ):
        yield CounterMetricFamily(f"millrace_engine_state_{name}", text, value=value)


def _mirror(stats: EngineStats) -> Iterator[Metric]:
    mirror = stats.mirror
    if mirror is None:
        return
    yield GaugeMetricFamily("millrace_mirror_up", "1 while the mirror compares draws.", value=mirror.is_up)
    for name, text, value in (
        ("steps", "Steps whose draws the mirror compared and found the same.", mirror.steps),
        ("differences", "Draws that the mirror found to differ. The first one ends it.", mirror.differences),
    ):
        yield CounterMetricFamily(f"millrace_mirror_{name}", text, value=value)


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    adapters = stats.adapters
    if adapters is None:
        return
    for name, text, value in (
        ("slots", "Adapters that can be on the device at once.", adapters.slots),
        ("resident", "Adapters on the device.", adapters.resident),
        ("known", "Adapters that requests may name.", adapters.known),
        ("waiting_requests", "Sequences that wait for their adapter.", adapters.held_requests),
        ("host_bytes", "Host memory of adapters that have been read.", adapters.host_bytes),
        ("slot_bytes", "Memory of the adapters that are on the device.", adapters.slot_bytes),
        ("slot_bytes_limit", "Device memory reserved for adapters; none without it.", adapters.max_slot_bytes),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"millrace_adapter_{name}", text, value=value)
    for name, text, value in (
        ("loads", "Adapters read from their files.", adapters.loads),
        ("fills", "Times that a slot on the device was filled.", adapters.fills),
        ("slot_evictions", "Adapters that left the device for others.", adapters.slot_evictions),
        ("host_evictions", "Adapters that left host memory for others.", adapters.host_evictions),
        ("refused", "Times that the device had no memory for an adapter.", adapters.refused),
    ):
        yield CounterMetricFamily(f"millrace_adapter_{name}", text, value=value)
    classes = GaugeMetricFamily(
        "millrace_adapter_rank_class_bytes",
        "Memory of the adapters that are on the device, by the smallest of 8, 16, 32, 64, 128 and 256 that is not below"
        " their largest rank.",
        labels=["rank_class"],
    )
    for held in adapters.rank_classes:
        classes.add_metric([str(held.rank)], held.bytes)
    yield classes
    yield from canary_metrics(adapters.canaries)
    requests = GaugeMetricFamily(
        "millrace_adapter_requests", "Open sequences by adapter and state.", labels=["adapter", "state"]
    )
    ended = CounterMetricFamily("millrace_adapter_ended_requests", "Ended sequences by adapter.", labels=["adapter"])
    tokens = CounterMetricFamily(
        "millrace_adapter_tokens", "Tokens of ended sequences by adapter and kind.", labels=["adapter", "kind"]
    )
    for one in adapters.each:
        requests.add_metric([one.name, "running"], one.running)
        requests.add_metric([one.name, "waiting"], one.waiting)
        ended.add_metric([one.name], one.requests)
        tokens.add_metric([one.name, "prompt"], one.prompt_tokens - one.cached_tokens)
        tokens.add_metric([one.name, "cached"], one.cached_tokens)
        tokens.add_metric([one.name, "output"], one.output_tokens)
    yield requests
    yield ended
    yield tokens


def canary_metrics(canaries: CanaryStats) -> Iterator[Metric]:
    """Labels are bounded: few canaries may run at once."""
    share = GaugeMetricFamily(
        "millrace_adapter_canary_share", "Share of an adapter's requests that its canary gets.", labels=["adapter"]
    )
    labels = ["adapter", "version"]
    requests = GaugeMetricFamily(
        "millrace_adapter_canary_requests", "Ended sequences of both versions since a canary began.", labels=labels
    )
    failed = GaugeMetricFamily("millrace_adapter_canary_failed", "Those of them that failed.", labels=labels)
    token = GaugeMetricFamily(
        "millrace_adapter_canary_token_seconds", "Median time of a token with both versions.", labels=labels
    )
    for one in canaries.running:
        share.add_metric([one.adapter], one.share)
        for version, figures in (("old", one.old), ("new", one.new)):
            requests.add_metric([one.adapter, version], figures.requests)
            failed.add_metric([one.adapter, version], figures.failed)
            token.add_metric([one.adapter, version], figures.token_ms / 1e3)
    ended = CounterMetricFamily(
        "millrace_adapter_canaries_ended", "Canaries that were promoted, aborted or taken back.", labels=["how"]
    )
    for how in ("promoted", "aborted", "returned"):
        ended.add_metric([how], canaries.ended.get(how, 0))
    yield from (share, requests, failed, token, ended)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("steps", "Completed steps.", stats.step_no),
        ("preemptions", "Sequences preempted, for any reason.", stats.preemptions),
        ("evictions", "KV blocks evicted from the prefix cache.", stats.evictions),
        ("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
        ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens),
        ("host_tokens_loaded", "Tokens whose KV blocks returned from host memory.", stats.host_tokens_loaded),
        ("forced_tokens", "Output tokens appended without a draw: a grammar allowed no others.", stats.forced_tokens),
        ("host_copies_failed", "KV blocks not copied to or from host memory, by error.", stats.host_copies_failed),
        ("host_blocks_lost", "KV blocks evicted before they were copied to host memory.", stats.host_blocks_lost),
        ("disk_tokens_read", "Tokens whose KV blocks returned from the disk.", stats.disk_tokens_read),
        ("disk_blocks_written", "KV blocks written to the disk.", stats.disk_blocks_written),
        ("disk_copies_failed", "KV blocks not written to the disk, or unreadable there.", stats.disk_copies_failed),
        ("disk_blocks_lost", "KV blocks that host memory evicted before they were written.", stats.disk_blocks_lost),
        ("prompt_tokens", "Prompt tokens of requests that got their first token.", stats.prompt_tokens),
        ("cached_tokens", "Prompt tokens of ended requests found in the prefix cache.", stats.cached_tokens),
        ("output_tokens", "Output tokens.", stats.output_tokens),
        ("drafted_tokens", "Drafts verified; on a GPU places for them.", stats.drafted_tokens),
        ("accepted_tokens", "Drafts that became output.", stats.accepted_tokens),
        ("draft_steps", "Steps that verified drafts.", stats.draft_steps),
        ("draft_probes", "Steps that tried drafts again after they had lost.", stats.draft_probes),
        ("draft_stops", "Times that drafts were turned off because they lost.", stats.draft_stops),
        ("step_rows", "Rows, summed over all steps.", stats.step_rows),
        ("step_seconds", "Time of steps, from launch to result.", stats.step_seconds),
        ("plan_seconds", "Time spent in the scheduler.", stats.plan_seconds),
        ("launch_seconds", "Time spent launching steps on the device.", stats.launch_seconds),
        ("device_seconds", "Time for which steps occupied the device.", stats.device_seconds),
        ("apply_seconds", "Host time from a step's result to the end of its bookkeeping.", stats.apply_seconds),
        ("host_seconds", "Host time for steps, without waiting for the device.", stats.host_seconds),
        ("read_bytes", "Weights and KV cache that all steps had to read.", stats.bytes_read),
        ("floating_point_operations", "FLOPs of all steps, without padding.", stats.flops),
        ("grammar_masks", "Steps that needed masks of grammars.", stats.grammars.masks),
        ("grammar_mask_seconds", "Time spent on masks of grammars.", stats.grammars.mask_seconds),
        ("grammar_consume_seconds", "Time spent on following drawn tokens.", stats.grammars.consume_seconds),
        ("grammar_compile_seconds", "Time spent on compiling grammars.", stats.grammars.compile_seconds),
        ("grammars_compiled", "Grammars compiled.", stats.grammars.compiled),
        ("grammar_cache_hits", "Grammars found compiled.", stats.grammars.cache_hits),
        ("grammar_failures", "Grammars that could not be compiled.", stats.grammars.failures),
    ):
        yield CounterMetricFamily(f"millrace_engine_{name}", text, value=value)


def _labelled_counters(stats: EngineStats) -> Iterator[Metric]:
    tokens = CounterMetricFamily("millrace_engine_step_tokens", "Tokens computed in steps, by kind.", labels=["kind"])
    tokens.add_metric(["prefill"], stats.prefill_tokens)
    tokens.add_metric(["decode"], stats.decode_tokens)
    tokens.add_metric(["padding"], stats.padded_tokens)
    yield tokens
    use = token_use(stats)
    computed = CounterMetricFamily(
        "millrace_engine_computed_tokens", "Tokens computed in steps, drafts and padding too."
    )
    computed.add_metric([], use.computed)
    yield computed
    wasted = CounterMetricFamily(
        "millrace_engine_wasted_tokens", "Tokens computed in vain, by cause.", labels=["cause"]
    )
    for cause, count in use.wasted.items():
        wasted.add_metric([cause], count)
    yield wasted
    reasons = CounterMetricFamily(
        "millrace_engine_preemptions_by_reason", "Sequences preempted, by reason.", labels=["reason"]
    )
    reasons.add_metric(["memory"], stats.preemptions - stats.yields)
    reasons.add_metric(["priority"], stats.yields)
    yield reasons
    yield from _cache_counters(stats)
    finished = CounterMetricFamily("millrace_engine_finished", "Ended sequences, by finish reason.", labels=["reason"])
    for reason, count in stats.finished.items():
        finished.add_metric([reason], count)
    yield finished
    drafts = CounterMetricFamily(
        "millrace_engine_drafts",
        "Drafts by drafter, by place among the drafts of a step, and by result.",
        labels=["drafter", "place", "result"],
    )
    for drafter, counts in stats.drafts.items():
        for place, (proposed, accepted) in enumerate(zip(counts.proposed, counts.accepted, strict=True), 1):
            drafts.add_metric([drafter, str(place), "proposed"], proposed)
            drafts.add_metric([drafter, str(place), "accepted"], accepted)
    yield drafts
    length = GaugeMetricFamily("millrace_engine_draft_length", "Drafts per request and step allowed now; 0 = none.")
    length.add_metric([], stats.draft_length)
    yield length


def _cache_counters(stats: EngineStats) -> Iterator[Metric]:
    evicted = CounterMetricFamily(
        "millrace_engine_evictions_by_reason", "KV blocks evicted from the prefix cache, by reason.", labels=["reason"]
    )
    evicted.add_metric(["new_tokens"], stats.evictions - stats.evicted_for_arrivals)
    evicted.add_metric(["arrival"], stats.evicted_for_arrivals)
    retained = CounterMetricFamily(
        "millrace_engine_retained_evictions", "KV blocks evicted although a handle was to keep them."
    )
    retained.add_metric([], stats.evicted_retained)
    yield retained
    refused = CounterMetricFamily(
        "millrace_engine_retentions_refused", "Prefixes that no handle keeps, although that was asked for."
    )
    refused.add_metric([], stats.retentions_refused)
    yield refused
    yield evicted
    below = CounterMetricFamily(
        "millrace_engine_tier_evictions", "KV blocks that left host memory or the disk.", labels=["tier", "cause"]
    )
    for tier, causes in stats.evictions_below.items():
        for cause, count in causes.items():
            below.add_metric([tier, cause], count)
    yield below
    tiers = CounterMetricFamily(
        "millrace_engine_prefix_tokens", "Prompt tokens by where their KV blocks were found.", labels=["tier"]
    )
    loaded = min(stats.host_tokens_loaded, stats.prefix_hit_tokens)  # It was on the device when it was looked up.
    tiers.add_metric(["device"], stats.prefix_hit_tokens - loaded)
    read = min(stats.disk_tokens_read, loaded)
    tiers.add_metric(["host"], loaded - read)
    tiers.add_metric(["disk"], read)
    tiers.add_metric(["none"], stats.prefix_query_tokens - stats.prefix_hit_tokens)
    yield tiers


def tenant_metrics(engine: EngineView) -> Iterator[Metric]:
    """Only on servers with tenants: without keys, every request belongs to the same one."""
    stats = engine.stats
    if stats is None or not any(one.name for one in stats.tenants):
        return
    requests = GaugeMetricFamily(
        "millrace_tenant_requests", "Open sequences by tenant and state.", labels=["tenant", "state"]
    )
    tokens = CounterMetricFamily(
        "millrace_tenant_tokens", "Tokens of ended sequences by tenant and kind.", labels=["tenant", "kind"]
    )
    found = CounterMetricFamily(
        "millrace_tenant_prefix_tokens",
        "Prompt tokens of ended sequences by tenant and by where their KV blocks were found.",
        labels=["tenant", "tier"],
    )
    for one in stats.tenants:
        for tier, num_tokens in tokens_by_tier(one).items():
            found.add_metric([one.name, tier], num_tokens)
        requests.add_metric([one.name, "running"], one.running)
        requests.add_metric([one.name, "waiting"], one.waiting)
        tokens.add_metric([one.name, "prompt"], one.prompt_tokens - one.cached_tokens)
        tokens.add_metric([one.name, "cached"], one.cached_tokens)
        tokens.add_metric([one.name, "output"], one.output_tokens)
    yield requests
    yield tokens
    yield found


def tokens_by_tier(one: TenantFigures) -> dict[str, int]:
    """Prompt tokens by where their KV blocks were found."""
    return {
        "device": one.cached_tokens - one.loaded_tokens,
        "host": one.loaded_tokens - one.read_tokens,
        "disk": one.read_tokens,
        "documents": one.placed_tokens,
        "none": one.prompt_tokens - one.cached_tokens - one.placed_tokens,
    }


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    if not stats.histograms:
        return
    for spec, by_class in zip(SPECS, Histograms(stats.histograms).values, strict=True):
        name = f"millrace_{spec.name}_{'seconds' if spec.is_time else 'tokens'}"
        family = HistogramMetricFamily(name, spec.help, labels=["priority"])
        for class_name, values in zip(CLASS_NAMES, by_class, strict=True):
            family.add_metric([class_name], buckets_of(spec, values), sum_value=float(values[-1]))
        yield family


def buckets_of(spec: HistogramSpec, values: Floats) -> list[tuple[str, float]]:
    """Cumulated counts, as Prometheus wants them."""
    bounds = [*(f"{edge:g}" for edge in spec.edges), "+Inf"]
    return list(zip(bounds, values[:-1].cumsum().tolist(), strict=True))
