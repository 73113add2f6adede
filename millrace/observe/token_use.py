"""Goodput in tokens: which of the tokens that steps computed were of use, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.link.engine_stats import EngineStats

CAUSES = ("cancelled", "rejected_drafts", "recomputed", "padding")


@dataclass(frozen=True, slots=True)
class TokenUse:
    computed: int
    """Tokens of all steps: prompts, output, drafts and padding."""
    wasted: dict[str, int]
    """By cause. `cancelled` includes requests that failed or passed their deadline."""

    @property
    def useful(self) -> int:
        return max(0, self.computed - sum(self.wasted.values()))


def token_use(stats: EngineStats) -> TokenUse:
    wasted = (
        stats.discarded_tokens,
        max(0, stats.drafted_tokens - stats.accepted_tokens),
        stats.recomputed_tokens,
        stats.padded_tokens,
    )
    computed = stats.prefill_tokens + stats.decode_tokens + stats.drafted_tokens + stats.padded_tokens
    return TokenUse(computed, dict(zip(CAUSES, wasted, strict=True)))
