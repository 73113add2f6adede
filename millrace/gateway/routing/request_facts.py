"""What a gateway reads from a request before it routes it. Bodies are checked by the replica, not here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.gateway.routing.candidates import BYTES_PER_TOKEN, Asked
from millrace.gateway.routing.homes import stored_at
from millrace.gateway.routing.prefix_map import chain_of
from millrace.params.classes import CLASS_NAMES
from millrace.serve.generate.fields.session import SESSION_HEADER

GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"}
)
NAMED_BY = {"/v1/sessions": "id", "/v1/cache": "name"}
"""Paths that make something under a name that the client may choose, and the field of that name."""
_READING = frozenset(
    {"/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank", "/rerank"}
    | {"/v1/score", "/score", "/v1/multi-vector", "/v1/sparse-vector", "/v1/classify", "/classify", "/v1/cache"}
)
"""Paths that compute prompts, and write no answer."""
_OWN = re.compile(
    r"/v1/(?:sessions|cache|files|batches|conversations|requests|adapters|kv|stats|steps|cost|multi-vector|sparse-vector)"
    r"(?:/.*)?"
)
_OF_MODEL = re.compile(r"/v1/models/(.+?)(?:/(?:un)?load)?")
ASSUMED_OUTPUT_TOKENS = 256
_MAX_CHOICES = 1024
_LINES_BY_DEFAULT = frozenset({"/api/chat", "/api/generate"})
_PROMPT_FIELDS = (
    *("tools", "system", "instructions", "messages", "prompt", "input"),
    *("query", "documents", "texts", "text_1", "text_2"),
)
"""In the order in which templates write them; then those of rerankers and encoders."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SESSION_HEADERS = ("X-Millrace-Session", "X-Session-Id")
"""The second is sent by agents."""
_SESSIONS = ("prompt_cache_key", "user", "safety_identifier")
_STORED = {
    "previous_response_id": "responses",
    "conversation": "conversations",
    "input_file_id": "files",
    "session_id": "sessions",
}
"""Fields that refer to something stored, and where that is found."""
_TURN = re.compile(r"/v1/sessions/[^/]+/turns")


class RequestFacts(msgspec.Struct, frozen=True):
    asked: Asked
    is_stream: bool
    num_choices: int
    can_resume: bool
    """A stream whose choices are drawn one token at a time, and that any replica can continue."""
    prompt_bytes: int
    stored: str
    """`ROOM/ID` of something stored on one replica that the request refers to."""
    body: dict[str, Any]


def facts_of(
    path: str, raw: bytes, headers: Mapping[str, str], request_id: str, tenant: str, long_tokens: int
) -> RequestFacts:
    body = _decoded(raw)
    prompt = b"".join(msgspec.json.encode(body[name]) for name in _PROMPT_FIELDS if name in body)
    model = body.get("model")
    model = model if isinstance(model, str) else ""
    limit = _output_limit(body)
    output_tokens = 0 if path in _READING else limit or ASSUMED_OUTPUT_TOKENS
    prompt_tokens = _prompt_tokens(body, prompt)
    is_long = limit + prompt_tokens >= long_tokens or _is_batch(body)
    asked = Asked(
        id=request_id,
        model=model,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chain=chain_of(prompt, f"{model}\0{tenant}".encode()),
        session=_session(body, headers),
        is_long=is_long,
    )
    stored = _stored(path, body, headers)
    is_stream = body.get("stream", path in _LINES_BY_DEFAULT) is True and generates(path)
    return RequestFacts(
        asked,
        is_stream,
        _num_choices(body),
        is_stream and not (body.get("best_of") or body.get("use_beam_search")),
        len(prompt),
        stored,
        body,
    )


def named_model(path: str, facts: RequestFacts) -> str | None:
    """The model that a request is about which is not routed by its prompt; None if it is about none."""
    if (found := _OF_MODEL.fullmatch(path)) is not None:
        return found[1]
    if path.startswith("/v1/adapters/"):
        return path.removeprefix("/v1/adapters/")
    given = facts.asked.model
    if not given and path == "/v1/sessions":
        return ""  # With the first model.
    if path == "/api/show" and not given and isinstance(facts.body.get("name"), str):
        given = facts.body["name"]
    return given or None


def is_turn(path: str) -> bool:
    """Of a session."""
    return _TURN.fullmatch(path) is not None


def generates(path: str) -> bool:
    return path in GENERATING or is_turn(path)


def is_own_path(path: str) -> bool:
    """Whether only Millrace has it."""
    return _OWN.fullmatch(path) is not None


def computes(path: str) -> bool:
    """Whether its tokens count: a request to this path is held back by quotas, and retried as a whole."""
    return path in _READING or generates(path)


def _stored(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> str:
    if is_turn(path):
        return stored_at(path)
    if path in NAMED_BY and isinstance(name := body.get(NAMED_BY[path]), str):
        return f"{path.removeprefix('/v1/')}/{name}"
    for field, room in _STORED.items():
        given = body.get(field)
        given = given.get("id") if isinstance(given, dict) else given
        if isinstance(given, str) and given:
            return f"{room}/{given}"
    name = headers.get(SESSION_HEADER, "")
    return f"sessions/{name}" if name and path in GENERATING else ""


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _num_choices(body: dict[str, Any]) -> int:
    prompts, count = body.get("prompt"), body.get("n")
    num_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return num_prompts * (count if isinstance(count, int) and 0 < count <= _MAX_CHOICES else 1)


def _prompt_tokens(body: dict[str, Any], prompt: bytes) -> int:
    ids = body.get("prompt")
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return len(ids)
    return len(prompt) // BYTES_PER_TOKEN


def _output_limit(body: dict[str, Any]) -> int:
    options = body.get("options")
    found = [body.get(name) for name in _LIMITS]
    found.append(options.get("num_predict") if isinstance(options, dict) else None)
    return next((value for value in found if isinstance(value, int) and 0 < value < 1 << 31), 0)


def _is_batch(body: dict[str, Any]) -> bool:
    return body.get("priority") in ("batch", CLASS_NAMES.index("batch")) or body.get("service_tier") == "flex"


def _session(body: dict[str, Any], headers: Mapping[str, str]) -> str:
    named = (*(headers.get(name) for name in _SESSION_HEADERS), *(body.get(name) for name in _SESSIONS))
    return next((name for name in named if isinstance(name, str) and name), "")[:256]
