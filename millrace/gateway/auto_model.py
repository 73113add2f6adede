"""`model: "auto"` at a gateway: which model answers, what the small one is asked first, what each tenant has spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import BadRequest, MillraceError
from millrace.gateway.fleet import Fleet
from millrace.gateway.limits.limits import Limits
from millrace.gateway.routing.decisions import RequestRecord
from millrace.gateway.routing.request_facts import facts_of
from millrace.gateway.upstream import LOST, Opened, Payload, Sender
from millrace.model_router.budgets import Budgets
from millrace.model_router.classifier import load
from millrace.model_router.router import Decision, ModelRouter, RouterSettings

PROBE_TOKENS = 32
"""The beginning of the small model's answer that its confidence is read from."""


class AutoModel:
    """A cascade asks the small model for the first tokens of its answer. If they are confident, the request goes on
    there, where its prompt is cached by then. So streams begin at once, in every dialect."""

    def __init__(
        self, settings: RouterSettings, fleet: Fleet, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._limits = limits
        self._clock = clock
        self.budgets = Budgets(settings.budget_per_hour, settings.budgets)
        self.tenants: dict[str, dict[str, int]] = {}
        """By tenant, how many requests each model got."""
        classifier = load(Path(settings.file).expanduser()) if settings.file else None
        self._router = ModelRouter(settings, classifier, self.budgets)

    async def choose(self, sender: Sender, tenant: str) -> Decision:
        """Decide for the request of `sender`, and note it in its record."""
        body, settings = sender.facts.body, self.settings
        await self._know(tenant)
        decision = self._router.decide(body, tenant, self._clock())
        if decision.is_cascade and decision.model in self._models():
            decision = await self._cascaded(sender, tenant, decision)
        available = self._models()
        other = settings.small if decision.model == settings.large else settings.large
        if decision.model not in available and other in available:
            why = f"{decision.reason} No replica has {decision.model!r} now, so {other!r} answers."
            decision = msgspec.structs.replace(decision, model=other, reason=why)
        sender.record.model_choice = decision
        counts = self.tenants.setdefault(tenant, {}) if tenant in self.tenants or len(self.tenants) < 10_000 else {}
        counts[decision.model] = counts.get(decision.model, 0) + 1
        return decision

    async def _cascaded(self, sender: Sender, tenant: str, decision: Decision) -> Decision:
        """After the small model was asked for its first tokens."""
        probabilities = await self._probe(sender, tenant)
        if probabilities:
            return self._router.after_answer(decision, probabilities, tenant, self._clock())
        large = self.settings.large
        why = f"{decision.reason} Its confidence could not be read, so {large!r} answers."
        return msgspec.structs.replace(decision, model=large, reason=why, is_cascade=False)

    def _models(self) -> set[str]:
        return {name for one in self._fleet.open_replicas() for name in one.models.ids}

    async def spent(self, tenant: str, model: str, num_tokens: int) -> None:
        """A request has ended."""
        price = self.settings.large_price if model == self.settings.large else self.settings.small_price
        self._router.spent(tenant, model, num_tokens, self._clock())
        await self._limits.spend(tenant, price * num_tokens / 1e6, self.budgets.limit(tenant))

    def describe(self) -> list[dict[str, Any]]:
        """By tenant: its budget, what is left of it as this gateway knows, and the requests that each model got."""
        now, shown = self._clock(), []
        for tenant, counts in self.tenants.items():
            limit = self.budgets.limit(tenant)
            is_limited = not math.isinf(limit)
            left = round(self.budgets.left(tenant, now), 6) if is_limited else None
            about = {"per_hour": limit if is_limited else None, "left": left}
            shown.append({"tenant": tenant, **about, "requests": counts})
        return shown

    async def _know(self, tenant: str) -> None:
        limit = self.budgets.limit(tenant)
        owed = await self._limits.owed(tenant, limit) if not math.isinf(limit) else None
        if owed is not None:
            self.budgets.know(tenant, owed, self._clock())

    async def _probe(self, sender: Sender, tenant: str) -> list[float]:
        """Log-probabilities of the first tokens of the small model's answer; empty if it gives none."""
        question = _question(sender.facts.body, self.settings.small)
        if question is None:
            return []
        path, raw = "/v1/chat/completions", msgspec.json.encode(question)
        request_id = f"{sender.request_id}-probe"
        facts = facts_of(path, raw, sender.request.headers, request_id, tenant, self._fleet.settings.long_tokens)
        asked = (sender.client, sender.request, request_id, facts, RequestRecord())
        probe = Sender(self._fleet, *asked, salt=sender.salt, owner=sender.owner, path=path)
        try:
            opened = await probe.open(lambda replica: Payload(raw), "probe")
            if not isinstance(opened, Opened):
                return []
            try:
                answer = await opened.response.read()
            finally:
                opened.close()
        except (MillraceError, *LOST):
            return []
        sender.record.notes.append(
            f"{self.settings.small} was asked for {PROBE_TOKENS} tokens on {opened.replica.name}"
        )
        found = _logprobs_in(answer)
        await self.spent(tenant, self.settings.small, facts.asked.prompt_tokens + len(found))
        return found


def with_model(body: Mapping[str, Any], model: str) -> bytes:
    try:
        return msgspec.json.encode({**body, "model": model})
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"The body cannot be routed: {error}", code="invalid_json") from None


def _question(body: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """The request as a short chat completion; None if it has no text to ask about."""
    given = body.get("messages") or body.get("input") or body.get("prompt") or ""
    turns = given if isinstance(given, list) else [{"role": "user", "content": given}]
    messages = [{"role": one.get("role", "user"), "content": _text(one)} for one in turns if isinstance(one, dict)]
    for name in ("system", "instructions"):
        if body.get(name):
            messages.insert(0, {"role": "system", "content": _text({"content": body[name]})})
    messages = [one for one in messages if one["content"] and one["role"] in ("system", "user", "assistant")]
    if not messages:
        return None
    drawn = {name: body[name] for name in ("temperature", "top_p", "seed") if isinstance(body.get(name), int | float)}
    return {"model": model, "messages": messages, "max_tokens": PROBE_TOKENS, "logprobs": True, **drawn}


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _logprobs_in(answer: bytes) -> list[float]:
    try:
        tokens = msgspec.json.decode(answer)["choices"][0]["logprobs"]["content"]
        return [float(one["logprob"]) for one in tokens]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError):
        return []
