"""The decision: which model answers a request with `model: "auto"`, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.model_router.budgets import Budgets
from millrace.model_router.classifier import Classifier
from millrace.model_router.features import features_of

AUTO = "auto"


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `router` of a fleet's file."""

    small: str
    large: str
    file: str = ""
    """What `millrace router train` wrote; empty: every request tries the small model first (a cascade)."""
    threshold: float = 0.5
    """The small model answers if it is good enough with at least this probability."""
    min_confidence: float = 0.0
    """With a cascade: least mean probability per token of the small model's answer; 0: no cascade after a file."""
    small_price: float = 1.0
    """Per million tokens, in any currency. Like the next one, only their ratio and the budgets matter."""
    large_price: float = 10.0
    budget_per_hour: float = math.inf
    """What each tenant may spend, in the currency of the prices."""
    budgets: dict[str, float] = {}
    """By tenant, instead of that."""

    def __post_init__(self) -> None:
        wrong = [
            (self.small == self.large, f"small and large are both {self.small!r}"),
            (not 0.0 <= self.threshold <= 1.0, f"threshold is {self.threshold:g}; it must be from 0 to 1"),
            (not 0.0 <= self.min_confidence < 1.0, f"min_confidence is {self.min_confidence:g}; it must be below 1"),
            (min(self.small_price, self.large_price) < 0, "a price is negative"),
            (not self.file and not self.min_confidence, "set 'file', or 'min_confidence' for a cascade"),
        ]
        for is_wrong, what in wrong:
            if is_wrong:
                raise ConfigError(f"The router's settings are wrong: {what}.", param="router")


class Decision(msgspec.Struct, frozen=True):
    model: str
    reason: str
    """One sentence."""
    probability: float | None = None
    """That the small model is good enough; None if nothing was trained."""
    features: tuple[tuple[str, float], ...] = ()
    """What counted most, positive for the small model."""
    is_cascade: bool = False
    """The answer's confidence decides whether the large model is asked too: call `after_answer`."""
    budget_left: float | None = None
    """None: no limit."""


class ModelRouter:
    def __init__(self, settings: RouterSettings, classifier: Classifier | None, budgets: Budgets | None = None) -> None:
        if settings.file and classifier is None:
            raise ConfigError("A router with a file needs the classifier in it.", param="router")
        self.settings = settings
        self._classifier = classifier
        self._budgets = budgets or Budgets(settings.budget_per_hour, settings.budgets)

    def decide(self, request: Mapping[str, Any], tenant: str, now: float) -> Decision:
        """`now`: seconds on any clock that only grows."""
        settings, left = self.settings, self._budgets.left(tenant, now)
        shown = None if math.isinf(left) else round(left, 6)
        if left <= 0:
            why = f"The budget of tenant {tenant!r} for this hour is spent, so the small model answers."
            return Decision(settings.small, why, budget_left=shown)
        if self._classifier is None:
            why = "Every request tries the small model first; the large one is asked if the answer is not confident."
            return Decision(settings.small, why, is_cascade=True, budget_left=shown)
        features = features_of(request)
        chance = self._classifier.probability(features)
        is_small = chance >= settings.threshold
        model = settings.small if is_small else settings.large
        why = (
            f"The small model is good enough with probability {chance:.2f}, and"
            f" {settings.threshold:.2f} is required, so {model!r} answers."
        )
        return Decision(
            model,
            why,
            round(chance, 4),
            tuple(self._classifier.reasons(features)),
            is_cascade=is_small and settings.min_confidence > 0,
            budget_left=shown,
        )

    def after_answer(self, decision: Decision, logprobs: Sequence[float], tenant: str, now: float) -> Decision:
        """The small model has answered: keep its answer, or ask the large model. `logprobs`: of the answer's tokens."""
        settings, left = self.settings, self._budgets.left(tenant, now)
        sure = confidence(logprobs)
        said = f"The small model's answer has a mean probability of {sure:.2f} per token"
        if not decision.is_cascade or sure >= settings.min_confidence:
            return msgspec.structs.replace(decision, reason=f"{said}, so it is kept.", is_cascade=False)
        if left <= 0:
            why = f"{said}, but the budget of tenant {tenant!r} for this hour is spent, so it is kept."
            return msgspec.structs.replace(decision, reason=why, is_cascade=False, budget_left=round(left, 6))
        why = f"{said}, less than {settings.min_confidence:.2f}, so {settings.large!r} is asked."
        return msgspec.structs.replace(decision, model=settings.large, reason=why, is_cascade=False)

    def spent(self, tenant: str, model: str, num_tokens: int, now: float) -> None:
        """A request has ended: its prompt and output tokens count against the tenant's budget."""
        price = self.settings.large_price if model == self.settings.large else self.settings.small_price
        self._budgets.spend(tenant, price * num_tokens / 1e6, now)


def confidence(logprobs: Sequence[float]) -> float:
    """Geometric mean of the tokens' probabilities; 0 for no tokens."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0
