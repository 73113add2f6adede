"""The messages between fronts and the engine: msgpack structs, with tokens as raw little-endian arrays.

A front numbers its requests (`front_index << FRONT_SHIFT | counter`), so a request id contains its front. Each step
sends one `StepTokens` to each front that has rows in it. Every submitted request gets exactly one `Finish`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.link.block_parts import PartOfPrefix
from millrace.link.engine_stats import EngineStats
from millrace.link.frames import HEADER
from millrace.params.classes import FinishReason
from millrace.params.keeping import Documents, Retain
from millrace.params.sampling import SamplingParams

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
