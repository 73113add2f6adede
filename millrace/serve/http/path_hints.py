"""What to call instead of a path that this server does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_OTHERS = {
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions with 'stream'",
    "/completion": "/v1/completions",
    "/completions": "/v1/completions",
    "/chat/completions": "/v1/chat/completions",
    "/infill": "/v1/completions with 'suffix'",
    "/pooling": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/embeddings": "/v1/embeddings",
    "/props": "/v1/models",
    "/info": "/v1/models",
    "/get_model_info": "/v1/models",
    "/models": "/v1/models",
    "/v1/engines": "/v1/models",
    "/slots": "/v1/requests",
    "/server_info": "/v1/stats",
    "/version": "/api/version",
    "/ping": "/health",
    "/health_generate": "/ready",
}
"""Paths of other engines, and what has their place here."""


def path_hint(path: str, paths: Iterable[str], absent: Iterable[str] = ()) -> str:
    """A sentence, or nothing. `paths`: those that the server has; below those of `absent` it answers with a refusal."""
    if other := _OTHERS.get(path):
        return f"Here it is {other}."
    refused = tuple(absent)
    known = [one for one in paths if not one.startswith(refused)]
    close = difflib.get_close_matches(path[:200], known, n=1, cutoff=0.7)
    return f"Did you mean {close[0]}?" if close else ""
