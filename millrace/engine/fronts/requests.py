"""Requests as the planner sees them, made of the messages of fronts."""

from __future__ import annotations

from millrace.link.messages import NewRequest, unpack_tokens
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import BATCH, INTERACTIVE, Request
from millrace.run.facts import RunnerFacts


def to_request(
    message: NewRequest, facts: RunnerFacts, *, has_drafts: bool = True, shares_by_adapter: bool = False
) -> Request:
    """`has_drafts`: False if no step ever has drafts. `shares_by_adapter`: fair shares are those of adapters."""
    params = message.params
    if params.max_tokens is None:
        raise AssertionError("the front must fill in max_tokens")
    constrained = params.is_constrained
    return Request(
        id=message.id,
        prompt=unpack_tokens(message.prompt),
        max_tokens=params.max_tokens,
        end_token_ids=message.end_token_ids,
        min_tokens=params.min_tokens if params.grammar is None else 0,  # The grammar's masks keep it from ending.
        priority=min(max(message.priority, INTERACTIVE), BATCH),
        tenant=message.tenant,
        weight=message.weight,
        share_of=params.adapter if shares_by_adapter else None,
        arrival=message.arrival,
        deadline=message.deadline if message.deadline is not None else float("inf"),
        salt=message.cache_salt.encode(),
        retain=message.retain,
        documents=message.documents,
        read_cache=params.prompt_logprobs is None and params.pooling != "mean",
        constrained=constrained,
        can_draft=has_drafts and _can_draft(params, facts),
        can_jump=constrained and _can_verify(params, verifies_adjusted=False),
        row_params=RowParams(params, message.end_token_ids, message.cache_salt),
        output=message.resumed.output if message.resumed is not None else b"",
    )


def _can_draft(params: SamplingParams, facts: RunnerFacts) -> bool:
    """False if drafts are off, or if a token's draw depends on where earlier tokens are."""
    if params.speculate == "off" or (params.logit_bias and not facts.verifies_adjusted):
        return False
    return _can_verify(params, verifies_adjusted=facts.verifies_adjusted)


def _can_verify(params: SamplingParams, *, verifies_adjusted: bool) -> bool:
    is_drawn_apart = params.needs_tokens or params.allowed_token_ids is not None or params.has_further_cuts
    if is_drawn_apart or params.prompt_logprobs is not None:
        return False
    return verifies_adjusted or not (params.uses_penalties or params.logprobs is not None)
