"""Whether and how long a model reasons before it answers, as requests ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import BadRequest
from millrace.params.grammar import ThinkingLimit
from millrace.serve.generate.generation import Prompt
from millrace.text.answer_formats import ChatText

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORT_TOKENS: dict[str, int] = {"minimal": 512, "low": 2048, "medium": 8192}
"""Most tokens of reasoning by effort, for models whose template does not read `reasoning_effort`."""


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """What a request says about reasoning. None: nothing."""

    is_on: bool | None = None
    effort: Effort | None = None
    max_tokens: int | None = None
    """Most tokens of reasoning."""
    field: str = "reasoning_effort"
    """The request's field, for errors."""
    effort_is_hint: bool = False
    """The effort asks for no reasoning: a model without it, or without limits of it, answers as usual."""

    @property
    def wants_reasoning(self) -> bool:
        is_asked = self.effort not in (None, "none") and not self.effort_is_hint
        return self.is_on is True or self.max_tokens is not None or is_asked

    def template_kwargs(self) -> dict[str, Any]:
        """Variables that chat templates read under different names."""
        is_on = self.is_on
        if is_on is None and self.effort is not None and not self.effort_is_hint:
            is_on = self.effort != "none"
        found: dict[str, Any] = {} if is_on is None else {"enable_thinking": is_on, "thinking": is_on}
        if self.effort not in (None, "none"):
            found["reasoning_effort"] = self.effort
        return found


NO_WISH = ReasoningWish()


def check_wish(state: ChatText, wish: ReasoningWish) -> None:
    if wish.max_tokens is not None and wish.max_tokens < 0:
        raise BadRequest(f"'{wish.field}' is {wish.max_tokens}; it must not be negative.", param=wish.field)
    if wish.wants_reasoning and state.formats.reasoning is None:
        raise BadRequest(
            f"'{wish.field}' asks for reasoning, but this model does not reason: its chat template has no markers of"
            " reasoning. Remove it, or start the server with --reasoning-format.",
            param=wish.field,
            code="unsupported_parameter",
        )


def effort_effect(state: ChatText, wish: ReasoningWish, limit: ThinkingLimit | None) -> str:
    """What became of an effort that is a hint; empty if the chat template was told of it."""
    if wish.effort is None or "reasoning_effort" in state.template.variables:
        return ""
    if limit is not None and wish.max_tokens is None:
        return f"the effort {wish.effort!r} limits the reasoning to {limit.max_tokens} tokens"
    why = "does not reason" if state.formats.reasoning is None else "takes no effort"
    return f"the effort {wish.effort!r} had no effect: this model {why}"


def thinking_limit(state: ChatText, wish: ReasoningWish, prompt: Prompt) -> ThinkingLimit | None:
    reasoning = state.formats.reasoning
    max_tokens = wish.max_tokens
    if max_tokens is None and "reasoning_effort" not in state.template.variables:
        max_tokens = EFFORT_TOKENS.get(wish.effort or "")
    if max_tokens is None or reasoning is None or prompt.closes_reasoning:
        return None
    start_id, end_id = state.tokenizer.token_id(reasoning.start), state.tokenizer.token_id(reasoning.end)
    if start_id is None or end_id is None:
        if wish.max_tokens is None and wish.effort_is_hint:
            return None
        raise BadRequest(
            f"'{wish.field}' limits the reasoning, which needs a model whose marker {reasoning.end!r} is one token;"
            " remove it.",
            param=wish.field,
            code="unsupported_parameter",
        )
    return ThinkingLimit(max_tokens, start_id, end_id, prompt.opens_reasoning or reasoning.is_open)
