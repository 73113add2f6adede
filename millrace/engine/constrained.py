"""Requests with a grammar, held back until it is compiled, or a limit on reasoning: given a mask before each draw."""

from __future__ import annotations

import numpy as np

from millrace.engine.grammars import NEVER, Failure, Grammars
from millrace.engine.thinking import ThinkingLimits
from millrace.link.engine_stats import GrammarStats
from millrace.link.messages import unpack_tokens
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.step import Int32s, StepOutcome
from millrace.run.drafting.drafter import DraftAsk
from millrace.run.sampling.masks import MaskedRows, Masks, Uint32s

PROBE_EVERY = 16
"""Most masks allow most tokens: every 16th of their words shows that they do not allow one token only."""


class ConstrainedRequests:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thinking = ThinkingLimits()
        self._held: dict[int, Request] = {}
        """Requests whose grammar is being compiled."""

    @property
    def is_compiling(self) -> bool:
        return bool(self._held)

    def hold(self, request: Request, params: SamplingParams, now: float) -> bool:
        """Compile the request's grammar: it must not be scheduled before `take_ready` returns it. False if it has none
        and can be scheduled at once."""
        if params.thinking is not None:
            self._thinking.open(request.id, params.thinking)
            self._thinking.consume(*_output_of(request))
        grammar = params.grammar
        if grammar is None:
            return False
        self._held[request.id] = request
        ends_from = NEVER if params.ignore_eos else params.min_tokens
        self._grammars.open(request.id, grammar, request.tenant, now, ends_from)
        return True

    def take_ready(self, now: float) -> list[Request]:
        """Requests that can be scheduled now. Those that another engine began are followed to where it stopped."""
        found = (self._held.pop(request_id, None) for request_id in self._grammars.take_ready(now))
        ready = [request for request in found if request is not None]
        for request in ready:
            self._grammars.consume(*_output_of(request))
        return ready

    def take_failed(self) -> list[Failure]:
        """Requests whose grammar failed, held back or running: they must end with an error."""
        return self._grammars.take_failed()

    def drop(self, request_id: int) -> Request | None:
        """The request ends while it is held back: return it, or None if it is not held back."""
        request = self._held.pop(request_id, None)
        if request is not None:
            self.close(request_id)
        return request

    def close(self, request_id: int) -> None:
        """The request has ended. Ids without a grammar are ignored."""
        self._grammars.close(request_id)
        self._thinking.close(request_id)

    def shut_down(self) -> None:
        self._grammars.shut_down()

    @property
    def stats(self) -> GrammarStats:
        return self._grammars.counters

    def consume(self, outcome: StepOutcome) -> None:
        request_ids, tokens = outcome.request_ids.tolist(), outcome.tokens.tolist()
        self._grammars.consume(request_ids, tokens)
        self._thinking.consume(request_ids, tokens)

    def masks(self, rows: MaskedRows, bits: Uint32s) -> Masks:
        ids = rows.request_ids.tolist()
        self._grammars.fill(ids, bits, rows.drafts)
        self._thinking.restrict(ids, bits, rows.drafts)
        return rows.masks(bits)

    def guide(self, request_id: int, ask: DraftAsk, drafts: Int32s) -> tuple[Int32s, bool]:
        return self._grammars.guide(request_id, ask.tokens[ask.num_prompt :], drafts, ask.max_drafts)

    def forced(self, rows: MaskedRows, masks: Masks) -> list[tuple[int, list[int]]]:
        first = masks.bits if masks.places is None else masks.bits[masks.places == 0]
        few = np.flatnonzero(np.count_nonzero(first[:, ::PROBE_EVERY], axis=1) <= 1)
        is_forced = np.bitwise_count(first[few]).sum(axis=1) == 1
        forced = [one for one in rows.request_ids[few[is_forced]].tolist() if not self._thinking.must_end(one)]
        return [(request_id, self._grammars.forced(request_id)) for request_id in forced]


def _output_of(request: Request) -> tuple[list[int], list[int]]:
    """The tokens that another engine generated, with the request of each."""
    tokens = unpack_tokens(request.output).tolist()
    return [request.id] * len(tokens), tokens
