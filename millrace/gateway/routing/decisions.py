"""Every routing decision with its reason: the last ones for `explain`, all of them in a file that can be replayed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.gateway.routing.candidates import Asked, Candidate, Choice, Moment
from millrace.model_router.router import Decision as ModelChoice
from millrace.observe.tracing.otlp import Span
from millrace.observe.tracing.request_trace import RequestTrace

log = logging.getLogger("millrace.gateway")
MAX_KEPT = 4096


class Decision(msgspec.Struct, frozen=True):
    at: float
    """Seconds since the epoch."""
    policy: str
    asked: Asked
    moment: Moment
    candidates: tuple[Candidate, ...]
    choice: Choice
    attempt: int = 0
    """0 for the first replica of a request."""
    cause: str = "new"
    """new, retry, resume or hedge."""
    kv_from: str = ""
    """A replica with more of the prompt in its cache, from which the chosen one may fetch it."""


def decision_span(trace: RequestTrace | None, decision: Decision) -> Span | None:
    """A span of the request's trace for what follows from the decision: the time until that replica is done."""
    if trace is None:
        return None
    chosen = next(one for one in decision.candidates if one.name == decision.choice.replica)
    return trace.call(
        "route",
        {
            "millrace.route.policy": decision.policy,
            "millrace.route.cause": decision.cause,
            "millrace.route.replica": chosen.name,
            "millrace.route.reason": decision.choice.reason,
            "millrace.route.candidates": tuple(one.name for one in decision.candidates),
            "millrace.route.matched_tokens": chosen.matched_tokens,
            "millrace.route.kv_from": decision.kv_from,
            "millrace.route.outstanding_tokens": chosen.outstanding_tokens,
        },
    )


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended."""

    id: str
    replica: str
    ended: str
    first_byte_s: float
    total_s: float
    num_resumes: int = 0


class RequestRecord(msgspec.Struct):
    """All that is known of one request."""

    decisions: list[Decision] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    outcome: Outcome | None = None
    owner: str = ""
    model_choice: ModelChoice | None = None
    """How `model: "auto"` was answered."""


class DecisionLog:
    def __init__(self, path: str = "", max_kept: int = MAX_KEPT) -> None:
        self._kept: OrderedDict[str, RequestRecord] = OrderedDict()
        self._max_kept = max_kept
        try:
            self._file = open(path, "ab") if path else None  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise ConfigError(f"Cannot write {path}: {error.strerror}.", param="decision_log") from error

    def begin(self, request_id: str, owner: str) -> RequestRecord:
        record = self._kept[request_id] = RequestRecord(owner=owner)
        self._kept.move_to_end(request_id)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        return record

    def find(self, request_id: str) -> RequestRecord | None:
        return self._kept.get(request_id)

    def recent(self, count: int) -> list[RequestRecord]:
        return [record for _, record in zip(range(count), reversed(self._kept.values()), strict=False)]

    def decided(self, record: RequestRecord, decision: Decision) -> None:
        record.decisions.append(decision)
        self._write(decision)

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        record.outcome = outcome
        self._write(outcome)

    def _write(self, entry: Any) -> None:
        """A full disk ends the log, not the gateway."""
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            log.error("The decision log ends here: %s.", error.strerror)
            self._close_quietly()

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                log.error("The decision log ends here: %s.", error.strerror)
                self._close_quietly()

    def _close_quietly(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            pass

    def close(self) -> None:
        self.flush()
        self._close_quietly()


def read_log(path: Path) -> Iterator[Decision | Outcome]:
    """The entries of a log. A last line that a kill cut off is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", param="log") from error
    for number, line in enumerate(lines[:-1], start=1):
        try:
            if b'"candidates":' in line:
                yield msgspec.json.decode(line, type=Decision)
            else:
                yield msgspec.json.decode(line, type=Outcome)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="log") from error
