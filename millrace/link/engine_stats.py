"""What an engine reports of itself: counters and gauges of its steps, requests, caches, drafts and adapters."""

from __future__ import annotations

import msgspec

from millrace.link.adapter_messages import CanaryStats


class GrammarStats(msgspec.Struct, frozen=True):
    """Totals since the start, of requests with a grammar."""

    masks: int = 0
    mask_seconds: float = 0.0
    """Spent on masks by the engine's thread. Most of it passes while the device computes."""
    consume_seconds: float = 0.0
    """Spent on following the drawn tokens."""
    compile_seconds: float = 0.0
    """Of the compile threads, without the loading of the vocabulary."""
    compiled: int = 0
    cache_hits: int = 0
    failures: int = 0


class TenantFigures(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one tenant, or of one adapter, since the engine started."""

    name: str
    running: int = 0
    waiting: int = 0
    requests: int = 0
    """Sequences that ended."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    loaded_tokens: int = 0  # Of the cached ones: from host memory or the disk.
    read_tokens: int = 0  # From the disk.
    placed_tokens: int = 0  # Beside the cached ones: of documents that were cached at other positions.


class DraftStats(msgspec.Struct, frozen=True):
    """Drafts of one drafter since the start, by place: the first draft of a row in a step, the second ..."""

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


class MirrorStats(msgspec.Struct, frozen=True):
    """A second process that runs every step too, see `--mirror`."""

    is_up: bool
    """False once it has ended: after a difference, or by itself."""
    steps: int
    """Steps whose draws were compared and are the same."""
    differences: int


class RankClass(msgspec.Struct, frozen=True, array_like=True):
    """Adapters on the device whose largest rank is at most this, and above the next smaller class."""

    rank: int
    adapters: int
    bytes: int


class AdapterStats(msgspec.Struct, frozen=True):
    """Totals since the start, and what is there now."""

    slots: int
    resident: int
    """Adapters in slots."""
    known: int
    held_requests: int
    """Requests that wait for their adapter."""
    host_bytes: int
    loads: int = 0
    """Adapters read from their files."""
    fills: int = 0
    """Slots filled."""
    slot_evictions: int = 0
    host_evictions: int = 0
    refused: int = 0
    """Times that the device had no memory for an adapter."""
    slot_bytes: int = 0
    """Of the adapters in slots."""
    max_slot_bytes: int | None = None
    """Device memory for all slots; None: slots refer to the matrices in host memory."""
    rank_classes: tuple[RankClass, ...] = ()
    canaries: CanaryStats = CanaryStats()
    each: tuple[TenantFigures, ...] = ()
    """Figures of the first adapters to appear; later ones are counted together."""


class EngineStats(msgspec.Struct, frozen=True):
    """Counters and gauges, sent a few times per second at most. Fronts export them as metrics."""

    step_no: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    step_seconds: float
    """Sum over all steps of the time from launch to result."""
    plan_seconds: float
    host_seconds: float = 0.0
    """Sum over all steps of the host's time, without waiting for the device."""
    graphs_left: int = 0
    """Graphs still to be captured until warm-up is complete."""
    waiting_by_class: tuple[int, ...] = (0, 0, 0)
    waiting_tokens: tuple[int, ...] = (0, 0, 0)
    """By class: tokens that waiting requests still have to compute, a prefix that several share counted once."""
    running_prefill_tokens: tuple[int, ...] = (0, 0, 0)
    """By class: prompt tokens that running requests still have to compute."""
    aged_by_class: tuple[int, ...] = (0, 0, 0)
    """By class: waiting requests that aging has promoted, or soon will."""
    rows_free: int = 0
    admissions_per_s: float = 0.0
    """Requests admitted per second, or that could be if enough were waiting."""
    arrivals_per_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """By class: later arrivals of a more urgent class are admitted first."""
    tokens_per_s: float = 0.0
    """Throughput of full steps, prompt and output tokens together; 0 until measured."""
    mean_step_s: float = 0.0
    """Average time of the last steps."""
    host_blocks_total: int = 0
    """KV blocks that fit in host memory; 0 without `--kv-host-gib`."""
    host_blocks_used: int = 0
    host_tokens_loaded: int = 0
    """Tokens whose KV blocks returned from host memory."""
    host_copies_failed: int = 0
    """KV blocks that could not be copied to or from host memory."""
    host_blocks_lost: int = 0
    """KV blocks that were evicted before they were copied to host memory."""
    disk_blocks_total: int = 0
    """KV blocks that fit on the disk; 0 without `--kv-disk`."""
    disk_blocks_used: int = 0
    disk_blocks_written: int = 0
    disk_tokens_read: int = 0
    """Tokens whose KV blocks returned from the disk; they are among those that returned from host memory."""
    disk_copies_failed: int = 0
    """KV blocks that could not be written, or that were unreadable."""
    disk_blocks_lost: int = 0
    """KV blocks that host memory evicted before they were written."""
    evictions_below: dict[str, dict[str, int]] = {}  # KV blocks, by tier and cause.
    grammars: GrammarStats = GrammarStats()
    histograms: bytes = b""
    """float64 counts and sums of latencies and lengths, as `observe.histograms` lays them out."""
    latencies: bytes = b""
    """Values of these histograms since the report before, as an `observe.sketch.Sketch`."""
    adapter_histograms: dict[str, bytes] = {}
    """The same of one adapter's requests, without gaps between tokens, by name of each adapter with an objective."""
    launch_seconds: float = 0.0
    """Sum over all steps of the time to launch them on the device."""
    device_seconds: float = 0.0
    """Sum over all steps of the time for which they occupied the device."""
    apply_seconds: float = 0.0
    """Sum over all steps of the host's time from a step's result to the end of its bookkeeping."""
    step_rows: int = 0
    """Sum over all steps of their rows."""
    prefill_tokens: int = 0
    """Tokens computed in chunks of several tokens of a row."""
    decode_tokens: int = 0
    """Tokens computed one per row."""
    padded_tokens: int = 0
    """Tokens of padding, on a GPU."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption, or for a request of another engine."""
    discarded_tokens: int = 0
    """Tokens computed for requests that were cancelled, passed their deadline or failed."""
    drafted_tokens: int = 0
    """Places for drafts in all steps."""
    accepted_tokens: int = 0
    """Drafts that became output."""
    drafts: dict[str, DraftStats] = {}
    """By drafter. On a GPU places without a draft count as proposed."""
    draft_steps: int = 0
    """Steps that verified drafts."""
    draft_length: int = 0
    """Drafts per request and step that the controller allows now; 0 while drafts do not pay."""
    draft_probes: int = 0
    """Steps that tried drafts again after they had lost."""
    draft_stops: int = 0
    """Times that drafts were turned off because they lost."""
    cached_tokens: int = 0
    """Prompt tokens of ended requests that were found in the prefix cache."""
    evictions: int = 0
    """KV blocks evicted from the prefix cache."""
    evicted_for_arrivals: int = 0
    """Those of them that made room for blocks from host memory; the others did for new tokens."""
    evicted_retained: int = 0
    """Those of them that a handle was to keep."""
    blocks_retained: int = 0
    """Cached blocks that handles keep."""
    retentions_refused: int = 0
    """Prefixes that no handle keeps, although that was asked for."""
    state_slots_total: int = 0
    """Checkpoints of recurrent states for which there is room; 0 if the model has no such state."""
    state_slots_used: int = 0
    state_slot_bytes: int = 0
    """Of one checkpoint."""
    state_hits: int = 0
    """Rows that began with a checkpoint."""
    state_evictions: int = 0
    yields: int = 0
    """Preemptions in favour of a more urgent request; the other `preemptions` were for lack of KV blocks."""
    bytes_read: float = 0.0
    """Weights and KV cache that all steps had to read."""
    flops: float = 0.0
    """Floating-point operations of all steps, without padding."""
    running_by_class: tuple[int, ...] = (0, 0, 0)
    tenants: tuple[TenantFigures, ...] = ()
    """The first tenants to appear; later ones are counted together."""
    finished: dict[str, int] = {}
    """Ended requests by finish reason."""
    forced_tokens: int = 0
    """Output tokens that were not drawn, because a grammar allowed no others."""
    mirror: MirrorStats | None = None
    adapters: AdapterStats | None = None
    """None: the model takes none."""
