"""What a routing decision is made from, and what it is. All of it is plain data, so that a decision can be replayed."""

from __future__ import annotations

import msgspec

CHUNK_BYTES = 256
"""Prompts are compared in pieces of this size."""
BYTES_PER_TOKEN = 4
"""Assumed where no tokenizer is at hand."""
CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN


class Asked(msgspec.Struct, frozen=True):
    """A request as policies see it."""

    id: str
    model: str
    prompt_tokens: int
    """Estimated."""
    output_tokens: int
    """The most that it may generate, or an assumption."""
    chain: tuple[str, ...] = ()
    """A chained hash per `CHUNK_BYTES` of the prompt: equal prefixes have equal first entries."""
    session: str = ""
    is_long: bool = False
    """Kept apart from interactive requests."""


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may take the request."""

    name: str
    weight: float = 1.0
    """Capacity relative to the others; smaller while a replica returns."""
    outstanding_tokens: int = 0
    """Prompt tokens to compute and output tokens to come, of all open requests."""
    num_open: int = 0
    matched_tokens: int = 0
    """Leading tokens of this prompt that it probably has in its cache."""
    has_model: bool = True
    """True if the model is loaded there, not only known."""
    region: str = ""
    tokens_per_s: float = 0.0
    """What the replica's own model of its steps predicts for full ones; 0: not known."""

    fetch_tokens: int = 0
    """Leading tokens of this prompt beyond those that another replica surely has on its device, to be fetched."""
    fetch_tokens_per_s: float = 0.0
    """How fast it fetched from others before; 0: not known."""

    def missing_work(self, prompt_tokens: int, weight: float) -> float:
        """Work for the prompt's tokens that are not cached there, in tokens. Each that is computed counts `weight`
        times; one that is fetched counts as what the replica could compute meanwhile, and never more."""
        missing = prompt_tokens - self.matched_tokens
        if not (self.tokens_per_s > 0 and self.fetch_tokens_per_s > 0):
            return weight * missing
        fetched = min(missing, self.fetch_tokens)
        return weight * (missing - fetched) + min(weight, self.tokens_per_s / self.fetch_tokens_per_s) * fetched

    @property
    def load(self) -> float:
        return self.outstanding_tokens / self.weight


class Moment(msgspec.Struct, frozen=True):
    """What else a decision depends on."""

    turn: int = 0
    """Number of decisions made before this one."""
    draw: float = 0.0
    """A random number from 0 to 1, drawn by the caller."""
    region: str = ""
    """The gateway's own."""


class Choice(msgspec.Struct, frozen=True):
    replica: str
    reason: str
    """One sentence for `explain`."""
