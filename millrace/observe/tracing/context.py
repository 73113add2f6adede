"""W3C trace context: the header `traceparent`, which carries trace id, parent span and the sampling decision."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
_FORM = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    """Empty: this span is the root."""
    is_sampled: bool = True
    state: str = ""

    @property
    def header(self) -> str:
        return self.header_for(self.span_id)

    def header_for(self, span_id: bytes) -> str:
        """The header that makes another server's span a child of this span."""
        return f"00-{self.trace_id.hex()}-{span_id.hex()}-{int(self.is_sampled):02x}"


def enter_context(traceparent: str | None, tracestate: str | None) -> TraceContext:
    """A new span in the caller's trace; a new trace if the header is missing or malformed, as W3C demands."""
    found = _FORM.match(traceparent.strip()) if traceparent else None
    span_id = secrets.token_bytes(8)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]) or not (_id(found[2]) and _id(found[3])):
        return TraceContext(secrets.token_bytes(16), span_id)
    state = tracestate if tracestate and len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() else ""
    return TraceContext(_id(found[2]), span_id, _id(found[3]), bool(int(found[4], 16) & 1), state)


def _id(text: str) -> bytes:
    """Empty if it is all zeros, which is not an id."""
    value = bytes.fromhex(text)
    return value if any(value) else b""
