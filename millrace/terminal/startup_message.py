"""What `millrace serve` says once it can serve: the memory plan, and a line that can be pasted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

from millrace.link.messages import EngineReady

_QUESTION = "Why is the sky blue?"


def memory_table(ready: EngineReady) -> Iterator[str]:
    """The parts of the memory plan, one to a line, sizes under each other."""
    yield f"memory on {ready.device}, {ready.dtype}:"
    sizes = {name: f"{num_bytes / 2**20:,.0f} MiB" for name, num_bytes in ready.memory_plan.items()}
    name_width = max(map(len, sizes), default=0)
    size_width = max(map(len, sizes.values()), default=0)
    for name, size in sizes.items():
        yield f"  {name:<{name_width}}  {size:>{size_width}}"


def ready_lines(ready: EngineReady, url: str, took_s: float, *, is_chat: bool) -> Iterator[str]:
    yield f"Serving {ready.model_name} on {url} after {took_s:.1f} s; up to {ready.max_context:,} tokens a request."
    yield f"The API is explained at {url}/docs. Try it:"
    yield curl_line(ready.model_name, url, is_chat=is_chat)


def curl_line(model: str, url: str, *, is_chat: bool) -> str:
    """One line for a shell. A model without a chat template is asked to continue a text instead."""
    body: Mapping[str, object]
    if is_chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
    else:
        path, body = "/v1/completions", {"prompt": "The sky is blue because", "max_tokens": 64}
    data = shlex.quote(json.dumps({"model": model, **body}, ensure_ascii=False))
    return f"curl {url}{path} -H 'Content-Type: application/json' -d {data}"


def reachable_url(host: str, port: int) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
