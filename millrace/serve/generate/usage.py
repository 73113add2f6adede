"""Token counts of a request, as every dialect reports them under its own names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all choices together; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix cache."""
    output_tokens: int
    reasoning_tokens: int = 0
    """Output tokens of the reasoning; `output_tokens` includes them."""
    predicted_tokens: int = 0
    """Tokens of the request's prediction that were tried as drafts."""
    predicted_accepted: int = 0
    """Those of them that became output."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens
