"""What an engine may have beside its planner and its runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.figures.shares import Shares
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.fronts.transfers import Transfers
from millrace.engine.ranks.group import RankGroup
from millrace.engine.ranks.mirror import Mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    constrained: ConstrainedRequests | None = None
    """None: the model's tokenizer cannot be used with grammars."""
    work: ModelWork = field(default_factory=ModelWork)
    """Bytes and FLOPs of the model's steps; zeros if they are unknown."""
    has_figures: bool = True
    """False: no more is counted than reports need."""
    drafter: str = "ngram"
    """Who proposes drafts where the runner does not say."""
    mirror: Mirror | None = None
    ranks: RankGroup | None = None
    disk: DiskCopier | None = None
    adapters: Callable[[Shares], EngineAdapters | None] = lambda _: None
    """Makes them, given the figures by adapter."""
    timed_adapters: frozenset[str] = frozenset()
    """Those that have objectives."""
    shares_by_adapter: bool = False
    """Fair shares are those of adapters, not of tenants."""
    transfers: Transfers | None = None
    """None: there is no KV cache."""


NO_PARTS = EngineParts()
