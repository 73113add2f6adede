"""One replica as the gateway knows it: what it serves, how busy it is, and the requests that are open there."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.gateway.routing.candidates import Asked
from millrace.gateway.routing.health import Health, HealthLimits
from millrace.gateway.routing.model_list import ModelList
from millrace.gateway.settings import ReplicaSettings, replica_name
from millrace.observe.tracing.otlp import Span

MIN_TOKEN_SAMPLES = 20
KEPT_EJECTIONS = 8
ASSUMED_TOKENS = 256
"""Work of a request that another gateway sent."""
_SMOOTHING = 0.05
_SALTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_FETCH_SMOOTHING = 0.3
_FETCHED = re.compile(r"fetched: (\d{1,9}) tokens in (\d{1,6}\.\d{1,6}) s")


class ModelLoad(msgspec.Struct):
    """One model in a replica's load report. Fields that this gateway does not know are for a newer one."""

    model: str = ""
    status: str = "loaded"
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used: float = 0.0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0


class LoadReport(ModelLoad):
    draining: bool = False
    version: str = ""
    models: list[ModelLoad] = msgspec.field(default_factory=list)


@dataclass(eq=False)
class OpenAttempt:
    """A request at one replica."""

    asked: Asked
    work_tokens: int
    """Tokens still to be computed for it, as estimated when it was sent."""
    abort: Callable[[], None] = lambda: None
    aborted: str = ""
    """Why the gateway gave it up, if it did."""
    num_frames: int = 0
    last_frame_at: float = 0.0
    heard_at: float = 0.0
    """When a stream last sent anything, signs of life included; 0 before its head."""
    is_held: bool = False
    """Its client reads slowly, so the gateway reads nothing either."""
    kv_from: str = ""
    """URL of a replica that has more of the prompt in its cache."""
    span: Span | None = None
    """Of the decision that sent it there, if spans are exported."""

    def failed(self, reason: str) -> None:
        if self.span is not None:
            self.span.error = reason

    def released(self, now: float) -> None:
        """It is read again. The time that its client took is not the replica's."""
        self.is_held, self.heard_at, self.last_frame_at = False, now, now

    def give_up(self, reason: str) -> None:
        if not self.aborted:
            self.aborted = reason
            self.abort()


@dataclass(eq=False)
class Replica:
    settings: ReplicaSettings
    limits: HealthLimits
    health: Health = field(init=False)
    models: ModelList = field(default_factory=ModelList)
    load: LoadReport = field(default_factory=LoadReport)
    is_draining: bool = False
    """Asked of this gateway; `load.draining` is the replica's own word."""
    attempts: set[OpenAttempt] = field(default_factory=set)
    own_tokens: int = 0
    """Sum of the open attempts' work."""
    token_ms: float = 0.0
    """Smoothed time between two frames of a stream."""
    num_token_samples: int = 0
    lacks_adapters: bool = True
    """It has joined or was away: it may lack adapters that clients added meanwhile."""
    to_forget: dict[str, dict[str, str]] = field(default_factory=dict)
    """By `ROOM/ID`, what went on at another replica meanwhile, and the headers to remove it with."""
    forgetting: set[str] = field(default_factory=set)
    """Of these, those that are being removed now."""
    marks_tokens: bool = False
    """True once a stream of it had token ids: then one without has no tokens yet."""
    fetch_tokens_per_s: float = 0.0
    """Smoothed speed at which it fetched blocks from others; 0: not known, or it did not help."""
    num_sent: int = 0
    num_failed: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    source: str = ""
    """Who added it: the fleet's file, DNS, or nothing for options and registrations."""
    lease_until: float = 0.0
    """When it must have registered again; 0: never."""
    recent_ejections: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_EJECTIONS))
    """Unix times and reasons, the last one last."""

    def __post_init__(self) -> None:
        self.health = Health(self.limits, lambda reason: self.recent_ejections.append((time.time(), reason)))

    @property
    def name(self) -> str:
        return replica_name(self.settings)

    @property
    def is_millrace(self) -> bool:
        return self.settings.kind == "millrace"

    @property
    def outstanding_tokens(self) -> int:
        """Of this gateway's requests, and an estimate for those of others that the replica reports."""
        others = self.load.running + self.load.waiting - len(self.attempts)
        mean = self.own_tokens // len(self.attempts) if self.attempts else ASSUMED_TOKENS
        return self.own_tokens + max(0, others) * mean

    def add(self, attempt: OpenAttempt) -> None:
        self.attempts.add(attempt)
        self.own_tokens += attempt.work_tokens
        self.num_sent += 1

    def remove(self, attempt: OpenAttempt) -> None:
        if attempt in self.attempts:
            self.attempts.remove(attempt)
            self.own_tokens -= attempt.work_tokens
            if attempt.span is not None:
                attempt.span.end_ns = time.time_ns()

    def takes(self, model: str) -> bool:
        """An unknown model goes anywhere: the replica's own error says what there is."""
        return not model or not self.models.entries or self.models.find(model) is not None

    def is_open(self, now: float, max_open: int) -> bool:
        draining = self.is_draining or self.load.draining
        return self.health.share(now) > 0 and not draining and len(self.attempts) < max_open

    def saw_frame(self, attempt: OpenAttempt, now: float) -> None:
        """Progress of a stream. The first frame's time is prefill, not decoding."""
        if attempt.num_frames:
            gap_ms = (now - attempt.last_frame_at) * 1e3
            self.num_token_samples += 1
            count = self.num_token_samples
            weight = 1 / count if count * _SMOOTHING < 1 else _SMOOTHING
            self.token_ms += weight * (gap_ms - self.token_ms)
        attempt.num_frames += 1
        attempt.last_frame_at = now

    def salted_body(self, path: str, raw: bytes, salt: str) -> bytes:
        """The body with the tenant's salt, before the client's own, where the server has no header but a field for it:
        vLLM's `cache_salt`."""
        if self.settings.kind != "vllm" or path not in _SALTED or not salt:
            return raw
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
            given = body.get("cache_salt")
            own = f"{salt}.{given}" if isinstance(given, str) and given else salt
            return msgspec.json.encode({**body, "cache_salt": own})
        except (msgspec.DecodeError, OverflowError, ValueError, RecursionError) as error:
            raise BadRequest(f"The body is not JSON that can be passed on: {error}.", code="invalid_json") from None

    def has_fetched(self, said: str) -> None:
        """What its answer says of a fetch: a failed or slow one is not counted on until another succeeds."""
        found = _FETCHED.match(said)
        if found is not None and float(found[2]) > 0:
            speed = int(found[1]) / float(found[2])
            known = self.fetch_tokens_per_s or speed
            self.fetch_tokens_per_s = known + _FETCH_SMOOTHING * (speed - known)
        elif not said.startswith("unneeded"):
            self.fetch_tokens_per_s = 0.0

    def stalled_since(self) -> float | None:
        """The time of the last progress, if streams that had begun are open."""
        begun = [one.last_frame_at for one in self.attempts if one.num_frames and not one.is_held]
        return max(begun) if begun else None

    def silent(self, now: float, limit_s: float) -> list[OpenAttempt]:
        """Streams that send nothing, not even signs of life. Other servers send none."""
        if not self.is_millrace:
            return []
        return [one for one in self.attempts if one.heard_at and not one.is_held and now - one.heard_at > limit_s]

    def give_up_all(self, reason: str) -> None:
        for attempt in list(self.attempts):
            attempt.give_up(reason)
