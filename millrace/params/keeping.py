"""What a request asks of the cache: to keep its prompt, to reuse documents."""

from __future__ import annotations

import msgspec


class Retain(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the blocks of a prompt, or of its beginning, in the prefix cache for a time."""

    ttl_s: float
    name: str = ""
    """Of the handle; a later request of the same owner with this name replaces it. Empty: named after the prefix."""
    num_tokens: int = 0
    """Of the prompt; 0: all."""
    max_bytes: int = 0
    """Quota of all handles of this owner; 0: what the server allows."""
    is_hint: bool = True
    """It may take the place of its owner's older hints."""
    handle_bytes: int = 0
    """Quota of this handle alone; 0: none of its own."""
    is_required: bool = False
    """The request is refused if its prefix cannot be kept."""
    covers_answer: bool = False
    """Keep the answer's blocks too, once the request has ended."""


MAX_DOCUMENTS = 64
"""Of one request."""


class DocumentSpan(msgspec.Struct, frozen=True, array_like=True):
    start: int
    end: int
    first: int
    """The tokens before this one are computed in their place."""


class Documents(msgspec.Struct, frozen=True):
    """Parts of a prompt, in order, whose keys and values may be those of the same text alone. The answer is then an
    approximation."""

    spans: tuple[DocumentSpan, ...]
