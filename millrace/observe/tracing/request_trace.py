"""The spans of one HTTP request: the request itself, and for each sequence its stages."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from millrace.link.messages import Finish
from millrace.observe.tracing.context import TraceContext
from millrace.observe.tracing.otlp import CLIENT, SERVER, Span, Value


@dataclass(slots=True)
class RequestTrace:
    context: TraceContext
    began: float = field(default_factory=time.monotonic)
    attributes: dict[str, Value] = field(default_factory=dict)
    _stages: list[tuple[str, float, float, dict[str, Value]]] = field(default_factory=list)

    _calls: list[Span] = field(default_factory=list)

    def call(self, name: str, attributes: dict[str, Value]) -> Span:
        """A question to another server begins. The caller sets its end, or it ends with the request."""
        context = self.context
        span = Span(
            context.trace_id, secrets.token_bytes(8), context.span_id, name, time.time_ns(), 0, CLIENT, attributes
        )
        self._calls.append(span)
        return span

    def add_stage(self, name: str, start: float, end: float, attributes: dict[str, Value]) -> None:
        """Times are on `time.monotonic`."""
        self._stages.append((name, start, end, attributes))

    def add_sequence(self, index: int, finish: Finish, received: float, submitted: float) -> None:
        """Stages of an ended sequence. Times are on `time.monotonic`."""
        number: dict[str, Value] = {"millrace.sequence": index}
        admitted, end = submitted + finish.queued_s, submitted + finish.total_s
        self._stages.append(("front", received, submitted, number))
        self._stages.append(("queue", submitted, min(admitted, end), number))
        if finish.output_tokens == 0:
            return
        first = submitted + finish.first_token_s
        cached: dict[str, Value] = {
            "millrace.prompt_tokens": finish.prompt_tokens,
            "millrace.cached_tokens": finish.cached_tokens,
        }
        output: dict[str, Value] = {
            "millrace.output_tokens": finish.output_tokens,
            "millrace.preemptions": finish.preemptions,
            "millrace.finish_reason": finish.reason,
        }
        self._stages.append(("prefill", admitted, first, number | cached))
        self._stages.append(("decode", first, end, number | output))

    def spans(self, name: str, status: int) -> list[Span]:
        """Called once, when the answer has been sent."""
        now, offset = time.monotonic(), time.time() - time.monotonic()

        def unix_ns(moment: float) -> int:
            return int((moment + offset) * 1e9)

        context = self.context
        ids = secrets.token_bytes(8 * len(self._stages))
        root = Span(
            context.trace_id,
            context.span_id,
            context.parent_id,
            name,
            unix_ns(self.began),
            unix_ns(now),
            SERVER,
            self.attributes,
            error=f"HTTP {status}" if status >= 500 else "",
            state=context.state,
        )
        children = [
            Span(
                context.trace_id,
                ids[8 * index : 8 * index + 8],
                context.span_id,
                stage,
                unix_ns(start),
                unix_ns(max(start, end)),
                attributes=attributes,
            )
            for index, (stage, start, end, attributes) in enumerate(self._stages)
        ]
        for call in self._calls:
            call.end_ns = call.end_ns or root.end_ns
        return [root, *children, *self._calls]
