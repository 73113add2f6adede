"""The spans of an engine's steps: one per step, for the time that it occupied the device, below one per batch of steps.

A trace covers the steps of one poll, so that its size is bounded however long the engine runs.
"""

from __future__ import annotations

import secrets
from typing import Any

from millrace.observe.tracing.otlp import Span

DETAILS = ("rows", "prefill_tokens", "decode_tokens", "bytes", "flops")


def step_spans(steps: dict[str, Any], after: int, model: str, unix_offset_s: float) -> list[Span]:
    """`steps`: the columns of /v1/steps. Those up to number `after` are left out. `unix_offset_s`: Unix time less the
    machine's monotonic clock, which the engine's times are on."""
    numbers = steps.get("step_no", [])  # Absent with --no-figures.
    chosen = [index for index, number in enumerate(numbers) if number > after]
    if not chosen:
        return []

    def unix_ns(moment: float) -> int:
        return int((moment + unix_offset_s) * 1e9)

    trace_id, root_id = secrets.token_bytes(16), secrets.token_bytes(8)
    done, device_s = steps["done"], steps["device_s"]
    start, end = min(done[index] - device_s[index] for index in chosen), max(done[index] for index in chosen)
    about = {"gen_ai.request.model": model, "millrace.first_step": numbers[chosen[0]], "millrace.steps": len(chosen)}
    found = [Span(trace_id, root_id, b"", "engine steps", unix_ns(start), unix_ns(end), attributes=about)]
    for index in chosen:
        details = {f"millrace.{name}": steps[name][index] for name in DETAILS}
        found.append(
            Span(
                trace_id,
                secrets.token_bytes(8),
                root_id,
                "prefill step" if steps["prefill_tokens"][index] else "decode step",
                unix_ns(done[index] - device_s[index]),
                unix_ns(done[index]),
                attributes={"millrace.step": numbers[index], **details},
            )
        )
    return found
