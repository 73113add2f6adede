"""The messages between fronts and the engine: msgpack structs whose bulk is columns (raw little-endian arrays).

A front numbers its requests (`front_index << 48 | counter`), so an id names its front. Each step sends ONE
`StepTokens` per front that has rows in it. Every submitted request is answered by exactly one `Finish`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.link.frames import HEADER
from millrace.params import FinishReason, SamplingParams

FRONT_SHIFT = 48
MAX_FINISHED_KEPT = 4096
"""Finished requests that the engine keeps, to answer a `Query` about them."""


class NewRequest(msgspec.Struct, frozen=True, tag="new"):
    """One sequence to generate. `n` choices are n of these with one `group`, so that they share blocks."""

    id: int
    prompt: bytes
    """int32 token ids."""
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end generation: the model's own unless `ignore_eos`, plus `stop_token_ids`."""
    priority: int = 1
    """0 interactive, 1 standard, 2 batch; lower runs first."""
    deadline: float | None = None
    """On the machine-wide monotonic clock, in seconds."""
    arrival: float = 0.0
    """When the front submitted it, on the same clock."""
    received: float = 0.0
    """When the front had its HTTP head."""
    names: tuple[str, ...] = ()
    """What clients may call it: the HTTP request's id and the answer's."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share relative to others'."""
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests now. Unknown ids are ignored: a finish may already be on its way."""

    ids: tuple[int, ...]
    reason: FinishReason = "abort"


class AbortFront(msgspec.Struct, frozen=True, tag="abort_front"):
    """A front is gone: end everything that it had asked for."""

    front: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A front has come, perhaps late: it wants to be told what the engine can do."""

    front: int


class Query(msgspec.Struct, frozen=True, tag="ask"):
    """About a request by name, whichever front it came through. Answered by one `Reply` with the same token."""

    front: int
    token: int
    what: Literal["explain", "cancel"]
    name: str
    tenant: str | None = None
    """Only a request of this tenant is meant; None means whoever's."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The engine finishes nothing more and ends."""


ToEngine = NewRequest | Abort | AbortFront | Hello | Query | Stop


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, its rank, and of the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Finish(msgspec.Struct, frozen=True):
    """The one terminal event of a request."""

    id: int
    reason: FinishReason
    message: str = ""
    """For people, when the reason is an error."""
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


class EngineStats(msgspec.Struct, frozen=True):
    """Counters and gauges, sent along at most a few times a second; the front turns them into Prometheus."""

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
    """Sum over all steps, from launch to result."""
    plan_seconds: float
    host_seconds: float = 0.0
    """Sum over all steps of what the host did for them, waiting for the device left out."""
    graphs_left: int = 0
    """Captures that are still to be made before every usual step is a replay."""
    waiting_by_class: tuple[int, ...] = (0, 0, 0)
    waiting_tokens: tuple[int, ...] = (0, 0, 0)
    """Tokens that those have yet to compute."""
    aged_by_class: tuple[int, ...] = (0, 0, 0)
    """Those that have waited so long that they count, or soon will, as more urgent than their class."""
    rows_free: int = 0
    admissions_per_s: float = 0.0
    """How fast waiting requests are being seated, or would be if there were any."""
    arrivals_per_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """By class: who comes later and is more urgent is seated first."""
    tokens_per_s: float = 0.0
    """Tokens computed per second in full steps, prompts and outputs alike; 0 until known."""


class StepTokens(msgspec.Struct, frozen=True, tag="tokens"):
    step_no: int
    ids: bytes
    """int64 request ids, one per generated token."""
    tokens: bytes
    """int32 token ids."""
    finished: tuple[Finish, ...] = ()
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    """Request id to the log-probabilities of the tokens it got in this step."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    """Request id to those of its prompt, the first being None; sent before its first token."""
    stats: EngineStats | None = None


class Reply(msgspec.Struct, frozen=True, tag="told"):
    """The answer to one `Query`: JSON, or nothing when there is no such request."""

    token: int
    body: bytes = b""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once the engine can run steps. What the front needs to refuse impossible requests."""

    model_name: str
    max_context: int
    vocab_size: int
    kv_tokens: int
    """Tokens the whole KV pool holds: no single request may need more."""
    block_size: int
    dtype: str
    device: str
    memory_plan: dict[str, int]
    """Name of each part of the memory plan to its bytes."""
    fingerprint: str
    """Changes when weights, dtype, device or version change."""


class EngineLoading(msgspec.Struct, frozen=True, tag="loading"):
    """How far the engine's start has come, for a progress bar."""

    what: str
    done: int
    total: int


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine is gone or cannot start; every open request of this front has ended with it."""

    message: str


ToFront = StepTokens | Reply | EngineReady | EngineLoading | EngineFailed

_TOKEN: np.dtype[np.int32] = np.dtype("<i4")
_ID: np.dtype[np.int64] = np.dtype("<i8")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode_frame(message: ToEngine | ToFront) -> bytearray:
    """With its length before it, in one piece: what a socket is given."""
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
