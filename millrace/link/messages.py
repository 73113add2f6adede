"""The messages between fronts and the engine: msgpack structs, with tokens as raw little-endian arrays.

A front numbers its requests (`front_index << FRONT_SHIFT | counter`), so a request id contains its front. Each step
sends one `StepTokens` to each front that has rows in it. Every submitted request gets exactly one `Finish`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.link.adapter_messages import CanaryStats
from millrace.link.block_parts import PartOfPrefix
from millrace.link.frames import HEADER
from millrace.params import Documents, FinishReason, Retain, SamplingParams

FRONT_SHIFT = 48
KV_KEY_BYTES = 8
MAX_FINISHED_KEPT = 4096
"""Finished requests that the engine keeps, to answer a `Query` about them."""


class Resumption(msgspec.Struct, frozen=True):
    """What a front had of a request when the engine that computed it was lost. Times are on `time.monotonic`."""

    output: bytes
    """int32 ids of the tokens generated so far."""
    first_token: float
    """When the front got the first of them; 0 if there are none."""
    lost: float
    """When the last engine was lost."""
    losses: int = 1
    """Engines that were lost while the request was open."""


class NewRequest(msgspec.Struct, frozen=True, tag="new"):
    """One request. A job with n choices sends n of these."""

    id: int
    prompt: bytes
    """int32 token ids."""
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    """The model's end tokens (none with `ignore_eos`) and the request's `stop_token_ids`."""
    priority: int = 1
    """Index into `params.CLASS_NAMES`: 0 interactive, 1 standard, 2 batch."""
    deadline: float | None = None
    """Seconds on `time.monotonic`, which all processes of a machine share."""
    arrival: float = 0.0
    """When the front submitted the request, on the same clock."""
    received: float = 0.0
    """When the front had received its HTTP headers."""
    names: tuple[str, ...] = ()
    """Ids that clients know: of the HTTP request and of the answer."""
    tenant: str = ""
    weight: float = 1.0
    """Weight of the fair share that it takes."""
    cache_salt: str = ""
    retain: Retain | None = None
    documents: Documents | None = None
    search: int | None = None
    """Id of the beam search that this is one step of. From its first step to `EndSearch`, a search is one request."""
    resumed: Resumption | None = None
    """What another engine computed of it. Limits, seeds, penalties and grammar count from the beginning of its output,
    as after a preemption."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests. Unknown ids are ignored: their `Finish` may already be on its way."""

    ids: tuple[int, ...]
    reason: FinishReason = "abort"


class AbortFront(msgspec.Struct, frozen=True, tag="abort_front"):
    """A front is gone: end all its requests."""

    front: int


class EndSearch(msgspec.Struct, frozen=True, tag="end_search"):
    """A beam search has ended. Unknown ids are ignored: none of its steps arrived."""

    finish: Finish


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sent by a front when it connects. Answered by `EngineReady` if the engine is ready."""

    front: int


HandleQuery = Literal["handles", "drop_handles", "renew_handle", "copy_handle", "prefix_facts"]
TenantQuery = Literal["forget", "forgotten"]
AdapterQuery = Literal["adapters", "add_adapter", "drop_adapter", "add_canary", "promote_canary", "abort_canary"]
QueryKind = Literal["explain", "cancel", "steps", "block_map"] | HandleQuery | TenantQuery | AdapterQuery


class Query(msgspec.Struct, frozen=True, tag="query"):
    """A question about a request by name, sent through any front. Answered by one `Reply`."""

    front: int
    query_id: int
    kind: QueryKind
    name: str
    """Of the request, of the handles or of the adapter; with `steps`, how many of the last ones are wanted; with
    `block_map`, how many nodes; with `add_adapter`, an `AddAdapter` as JSON; with `add_canary`, an `AddCanary`."""
    tenant: str | None = None
    """Find only requests or handles of this tenant; None = of any."""
    value: str = ""
    """Seconds (`renew_handle`), the name of the copy (`copy_handle`), or a gateway's salt (`forget`)."""


class HandleFigures(msgspec.Struct, frozen=True):
    """A prefix that is kept cached."""

    name: str
    owner: str
    tokens: int
    resident_tokens: int
    """Those of them, from the first on, that need not be computed now."""
    bytes: int
    age_s: float
    ttl_s: float
    expires_in_s: float
    is_hint: bool
    locations: dict[str, int]
    """Tokens by the nearest location that has their block."""


class HandleList(msgspec.Struct, frozen=True):
    """The answer to a `Query` for handles."""

    handles: list[HandleFigures]
    used_bytes: int
    max_bytes: int
    """That all tenants' handles may keep together."""


class AdapterNames(msgspec.Struct, frozen=True, tag="adapter_names"):
    """The adapters of the engine's model that requests may name, sent to all fronts when they change."""

    names: tuple[str, ...]


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """The engine stops if no request is open and none was for `idle_s` seconds. Answered by one `Reply` with an
    `Idleness`. An engine that stops first tells every front with `EngineRetired`."""

    front: int
    query_id: int
    idle_s: float = 0.0
    """Infinite: only ask."""


class Idleness(msgspec.Struct, frozen=True):
    """How much an engine is used."""

    is_retired: bool
    open_requests: int
    idle_s: float
    """Seconds since its last request ended or since it started; 0 while requests are open."""


class WatchKv(msgspec.Struct, frozen=True, tag="watch_kv"):
    """A front listens to KV events, from a snapshot on, or no longer does."""

    front: int
    is_on: bool


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The engine stops at once, without finishing open requests."""


ToEngine = NewRequest | Abort | AbortFront | EndSearch | Hello | Query | PartOfPrefix | Retire | WatchKv | Stop


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, with its rank, and of the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Finish(msgspec.Struct, frozen=True):
    """The terminal event of a request."""

    id: int
    reason: FinishReason
    message: str = ""
    """What happened, if the reason is an error."""
    stop_token_id: int = -1
    """The end token that stopped it, or -1."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    """From arrival to the first token."""
    total_s: float = 0.0
    predicted_tokens: int = 0
    """Drafts that came from the request's `prediction`."""
    predicted_accepted: int = 0
    """Those of them that became output."""
    retained_tokens: int = 0
    """Prompt tokens that a handle keeps cached from now on."""
    handle: str = ""
    resident_tokens: int = 0
    """Of a request with a handle: prompt tokens that were on the device when it arrived."""
    refused: str = ""
    """Why no handle keeps its prompt, although that was asked for."""
    placed_tokens: int = 0
    """Prompt tokens whose keys and values were those of a document at other positions."""
    vector: bytes = b""
    """Of a request with `pooling` that succeeded: float32."""


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


class StepTokens(msgspec.Struct, frozen=True, tag="tokens"):
    step_no: int
    ids: bytes
    """int64 request ids, one per output token."""
    tokens: bytes
    """int32 token ids."""
    finished: tuple[Finish, ...] = ()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    """By request id: log-probabilities of its tokens in this step."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    """By request id: log-probabilities of its prompt (None for the first token), sent with its first output token."""
    stats: EngineStats | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a `Query`: JSON, or empty if there is no such request. Blocks of prefixes travel as msgpack."""

    query_id: int
    body: bytes = b""


class KvEvents(msgspec.Struct, frozen=True, tag="kv"):
    """Blocks that entered or left the cache, or all that are there."""

    kind: Literal["snapshot", "filled", "evicted", "cleared"]
    tier: Literal["device", "host", "disk"]
    keys: bytes
    """The first `KV_KEY_BYTES` of each block's hash."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sent when the engine can run steps, with the limits that fronts check requests against."""

    model_name: str
    max_context: int
    vocab_size: int
    kv_tokens: int
    """Capacity of the KV pool: no request may need more."""
    block_size: int
    dtype: str
    device: str
    memory_plan: dict[str, int]
    """Bytes by part of the memory plan."""
    fingerprint: str
    """Changes when weights, dtype, device or version change."""
    num_parameters: int = 0
    """Of the model; 0 if unknown."""
    step_ms: float = 0.0
    """Target for steps with decoding requests; 0 if there is none."""
    device_bytes_per_s: float = 0.0
    """Memory bandwidth of the device; 0 if unknown."""
    device_flops: float = 0.0
    """Peak FLOP/s of the device; 0 if unknown."""
    drafters: tuple[str, ...] = ("off",)
    """What a request may name as `speculate`, beside "auto"."""
    notes: tuple[str, ...] = ()
    """What the memory plan chose, and the settings that change it."""
    adapters: tuple[str, ...] | None = None
    """Names of its adapters; None if it takes none (no slots)."""
    no_documents: str = ""
    """Why cached documents cannot be used at other positions, as a clause; empty if they can."""


class EngineLoading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the engine's start."""

    what: str
    done: int
    total: int


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine is gone or cannot start. All open requests have ended with it."""

    message: str
    lacks_memory: bool = False
    """It did not start because the model does not fit in the memory that is free."""


class EngineRetired(msgspec.Struct, frozen=True, tag="retired"):
    """The engine was idle and has stopped. It has taken no request that is still open: the front keeps those for the
    next engine."""


ToFront = StepTokens | Reply | KvEvents | AdapterNames | EngineReady | EngineLoading | EngineFailed | EngineRetired

_TOKEN: np.dtype[np.int32] = np.dtype("<i4")
_ID: np.dtype[np.int64] = np.dtype("<i8")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode_frame(message: ToEngine | ToFront) -> bytearray:
    """The message with its length before it, ready to be sent."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    return _to_engine.decode(data)


def decode_to_front(data: bytes | memoryview) -> ToFront:
    return _to_front.decode(data)


def pack_tokens(token_ids: npt.ArrayLike) -> bytes:
    return np.asarray(token_ids).astype(_TOKEN).tobytes()


def unpack_tokens(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, _TOKEN)


def unpack_ids(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, _ID)
