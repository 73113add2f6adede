"""Other servers as replicas: where they say how they are, and how a stream goes on there by its text.

Their APIs take no token ids of an answer. A stream that moves to or from such a server is continued from its text,
which may be cut into other tokens there: the stream and `explain` say so.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from millrace.gateway.replica import LoadReport, Replica

_PROBES = {"millrace": "/v1/load", "vllm": "/metrics", "llama.cpp": "/health", "ollama": "/api/version"}
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_CACHE = re.compile(r"^vllm:(?:gpu_cache_usage_perc|kv_cache_usage_perc)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def probe_path(replica: Replica) -> str:
    return _PROBES[replica.settings.kind]


def read_report(replica: Replica, body: bytes) -> LoadReport:
    if replica.is_millrace:
        return msgspec.json.decode(body, type=LoadReport)
    if replica.settings.kind != "vllm":
        return LoadReport()
    text = body.decode(errors="replace")
    counts = {name: int(float(value)) for name, value in _GAUGE.findall(text)}
    cache = _CACHE.search(text)
    return LoadReport(
        running=counts.get("running", 0), waiting=counts.get("waiting", 0), kv_used=float(cache[1]) if cache else 0.0
    )


# ── resume by text ────────────────────────────────────────────────────────────────────────────────────────────────────
def text_in(frames: bytes) -> str:
    """The text that frames of chat completions or completions add."""
    found: list[str] = []
    for line in frames.split(b"\n"):
        if line.startswith(b"data: {"):
            choices = msgspec.json.decode(line[6:]).get("choices") or []
            for choice in choices[:1]:
                delta = choice.get("delta") or {}
                found.append(delta.get("content") or choice.get("text") or "")
    return "".join(found)


def continued_body(path: str, kind: str, body: dict[str, Any], text: str, num_tokens: int) -> dict[str, Any] | None:
    """The request that continues an answer after `text`; None if that server's API cannot."""
    continued = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int):
            continued[name] = max(1, body[name] - num_tokens)
    if path == "/v1/completions" and isinstance(body.get("prompt"), str):
        continued["prompt"] = body["prompt"] + text
        return continued
    if path != "/v1/chat/completions" or body.get("tools") or body.get("response_format"):
        return None
    continued["messages"] = [*body.get("messages", []), {"role": "assistant", "content": text}]
    if kind in ("vllm", "millrace"):
        continued |= {"continue_final_message": True, "add_generation_prompt": False}
    return continued
