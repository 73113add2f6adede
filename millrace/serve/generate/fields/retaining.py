"""How long a prompt stays cached after its request, as the dialects ask for it."""

from __future__ import annotations

from typing import Literal

from millrace.errors import BadRequest
from millrace.params.keeping import Retain

IN_MEMORY_S = 600.0
DAY_S = 86400.0
MAX_KEY_CHARS = 256
MAX_TTL_S = 30 * DAY_S


def retention_of(key: str | None, retention: Literal["in_memory", "in-memory", "24h"] | None) -> Retain | None:
    """OpenAI's `prompt_cache_key` and `prompt_cache_retention`: the key names the handle, so that the next request with
    it replaces this one's."""
    if key is not None and len(key) > MAX_KEY_CHARS:
        raise BadRequest(
            f"prompt_cache_key has {len(key)} characters; at most {MAX_KEY_CHARS} are allowed.",
            param="prompt_cache_key",
        )
    if retention is None:
        return None
    return Retain(DAY_S if retention == "24h" else IN_MEMORY_S, f"key-{key}" if key else "")
