"""What `millrace serve` prints when it is ready: the memory plan, a curl line to paste, and any warning."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.link.messages import EngineReady

_QUESTION = "Why is the sky blue?"
_ENCODER_PATHS = {"embed": "/v1/embeddings", "sparse": "/v1/sparse-vector", "multi": "/v1/multi-vector"}


def memory_table(ready: EngineReady) -> Iterator[str]:
    """The parts of the memory plan, one per line, with aligned sizes."""
    yield f"Memory on {ready.device}, {ready.dtype}:"
    sizes = {name: f"{num_bytes / 2**20:,.0f} MiB" for name, num_bytes in ready.memory_plan.items()}
    name_width = max(map(len, sizes), default=0)
    size_width = max(map(len, sizes.values()), default=0)
    for name, size in sizes.items():
        yield f"  {name:<{name_width}}  {size:>{size_width}}"
    yield from ready.notes


def ready_lines(
    ready: EngineReady, url: str, took_s: float, *, is_chat: bool, needs_key: bool = False
) -> Iterator[str]:
    yield from serving_lines(ready, url, took_s)
    yield from try_lines(ready.model_name, url, is_chat=is_chat, needs_key=needs_key)


def serving_lines(ready: EngineReady, url: str, took_s: float) -> Iterator[str]:
    yield f"Serving {ready.model_name} on {url} (ready in {took_s:.1f} s, context {ready.max_context:,} tokens)."
    if ready.step_ms:
        yield f"Steps with decoding requests take about {ready.step_ms:g} ms at most (--step-ms)."


def others_lines(names: Sequence[str], loaded: Sequence[str], url: str) -> Iterator[str]:
    """The models that are not loaded yet, if there are any."""
    others = ", ".join(name for name in names if name not in loaded)
    if others and loaded:
        yield f"Loaded when a request names them: {others}."
    elif others:
        yield f"Serving on {url}, loaded when a request names them: {others}."


def try_lines(model: str, url: str, *, is_chat: bool, needs_key: bool, task: str = "") -> Iterator[str]:
    yield f"Playground: {url}/. API documentation: {url}/docs. Try it:"
    yield curl_line(model, url, is_chat=is_chat, needs_key=needs_key, task=task)


def open_server_warning(host: str) -> str:
    """A warning for a server that other machines can reach and that requires no API key; empty for loopback."""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return ""
    return (
        f"Warning: the server listens on {host} and requires no API key, so anyone who can reach this machine can use"
        " it. Require keys with --keys-file, or listen on 127.0.0.1 only."
    )


def curl_line(model: str, url: str, *, is_chat: bool, needs_key: bool = False, task: str = "") -> str:
    """A request to paste into a shell: a chat, or a completion if the model has no chat template. `task`: what an
    encoder does; "" for a model that writes text."""
    body: Mapping[str, object]
    if task == "rank":
        path, body = "/v1/rerank", {"query": _QUESTION, "documents": ["Air scatters blue light.", "Cats sleep."]}
    elif task:
        path = _ENCODER_PATHS.get(task, "/v1/classify")
        body = {"input": "The sky is blue."}
    elif is_chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
    else:
        path, body = "/v1/completions", {"prompt": "The sky is blue because", "max_tokens": 64}
    data = shlex.quote(json.dumps({"model": model, **body}, ensure_ascii=False))
    key = ' -H "Authorization: Bearer $MILLRACE_API_KEY"' if needs_key else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {data}"


def reachable_url(host: str, port: int) -> str:
    """The URL under which a client on this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
