"""The outbox: packs the outcome of a step into one message per front, with tokens as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
from torch.nn.functional import normalize

from millrace.engine.ledger import Ledger, front_of
from millrace.link.channel import EngineChannel
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import FRONT_SHIFT, Finish, StepTokens, TokenLogprobs
from millrace.plan.step import Ended, Int64s, StepOutcome
from millrace.run.protocol import StepResult
from millrace.run.sampling.logprobs import LogprobColumns
from millrace.run.sampling.pooling import PooledPart

T = TypeVar("T")
PromptLogprobsById = dict[int, tuple[TokenLogprobs | None, ...]]


class Outbox:
    def __init__(self, channel: EngineChannel, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._pooled: dict[int, PooledPart] = {}
        """Of requests whose prompt is being computed: the sum of their parts so far."""

    @property
    def num_collected(self) -> int:
        """Requests of which parts of a result are kept until it is whole."""
        return len(self._prompt_logprobs.keys() | self._pooled.keys())

    def send_step(self, outcome: StepOutcome, result: StepResult, now: float) -> list[Finish]:
        """Send the outcome to all fronts concerned. Returns the terminal events sent."""
        first_ids: list[int] = outcome.first_ids.tolist()
        prompt_logprobs = (
            self._complete_prompt_logprobs(first_ids, result, now) if first_ids or result.prompt_logprobs else {}
        )
        for part in result.pooled:
            if part.request_id not in self._ledger:
                continue  # It ended during the step, and nobody would take the sum.
            before = self._pooled.get(part.request_id) if part.first else None
            self._pooled[part.request_id] = (
                part if before is None else replace(part, vector=before.vector + part.vector)
            )
        logprobs = _token_logprobs(outcome, result) if result.logprobs is not None else {}
        finished = [self._finish(ended, now) for ended in outcome.ended]
        whole = StepTokens(
            step_no=outcome.step_no,
            ids=outcome.request_ids.tobytes(),
            tokens=outcome.tokens.tobytes(),
            finished=tuple(finished),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        if self._channel.num_fronts == 1:
            self._send(0, whole)
        else:
            for front, message in enumerate(_parts_of(whole, outcome, self._channel.num_fronts)):
                self._send(front, message)
        return finished

    def _send(self, front: int, message: StepTokens) -> None:
        if message.ids or message.finished or message.prompt_logprobs:
            self._channel.send(front, message)

    def send_ended(self, step_no: int, ended: tuple[Ended, ...], now: float) -> None:
        """Send the terminal events of requests that ended outside a step."""
        by_front: dict[int, list[Finish]] = {}
        for event in ended:
            by_front.setdefault(front_of(event.request_id), []).append(self._finish(event, now))
        for front, finished in by_front.items():
            self._channel.send(front, StepTokens(step_no=step_no, ids=b"", tokens=b"", finished=tuple(finished)))

    def send_stats(self, step_no: int, stats: EngineStats) -> None:
        self._channel.send_all(StepTokens(step_no=step_no, ids=b"", tokens=b"", stats=stats))

    def _finish(self, ended: Ended, now: float) -> Finish:
        self._prompt_logprobs.pop(ended.request_id, None)
        pooled = self._pooled.pop(ended.request_id, None)
        finish = self._ledger.close(ended, now)
        if pooled is None or ended.reason != "stop":
            return finish
        vector = pooled.vector if pooled.is_finished else normalize(pooled.vector, dim=0)
        return msgspec.structs.replace(finish, vector=vector.numpy().tobytes())

    def _complete_prompt_logprobs(self, first_ids: list[int], result: StepResult, now: float) -> PromptLogprobsById:
        """Collect log-probabilities over the chunks of a prompt; return them whole with the request's first token."""
        for part in result.prompt_logprobs:
            if part.request_id not in self._ledger:
                continue
            if part.first == 1:
                self._prompt_logprobs[part.request_id] = []
            self._prompt_logprobs.setdefault(part.request_id, []).extend(
                _rows(part.columns, [part.num_top] * len(part.columns.token_ids))
            )
        complete: PromptLogprobsById = {}
        for request_id in first_ids:
            if self._ledger.on_first_token(request_id, now):
                complete[request_id] = (None, *self._prompt_logprobs.pop(request_id, []))
        return complete


def _parts_of(step: StepTokens, outcome: StepOutcome, num_fronts: int) -> Iterator[StepTokens]:
    """The part of a step that concerns each front."""
    fronts = (outcome.request_ids >> FRONT_SHIFT).astype(np.uint16)
    order = fronts.argsort(kind="stable")  # 16-bit keys sort in a fraction of the time.
    ids, tokens = outcome.request_ids[order], outcome.tokens[order]
    ends = fronts[order].searchsorted(np.arange(num_fronts), side="right").tolist()
    finished: dict[int, list[Finish]] = {}
    for finish in step.finished:
        finished.setdefault(front_of(finish.id), []).append(finish)
    for front, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield StepTokens(
            step_no=step.step_no,
            ids=ids[begin:end].tobytes(),
            tokens=tokens[begin:end].tobytes(),
            finished=tuple(finished.get(front, ())),
            logprobs=_of_front(step.logprobs, front),
            prompt_logprobs=_of_front(step.prompt_logprobs, front),
        )


def _of_front(by_request: dict[int, T], front: int) -> dict[int, T]:
    return {key: value for key, value in by_request.items() if front_of(key) == front} if by_request else by_request


def _token_logprobs(outcome: StepOutcome, result: StepResult) -> dict[int, tuple[TokenLogprobs, ...]]:
    if result.logprobs is None:
        return {}
    num_rows = len(result.tokens) if result.counts is None else len(result.counts)
    place: Int64s = np.full(num_rows, -1, np.int64)
    place[result.logprob_index] = np.arange(len(result.logprob_index))
    rows = _rows(result.logprobs, result.logprob_counts.tolist())
    if result.logprob_places is not None:
        return _placed_logprobs(outcome, result, result.logprob_places, rows)
    return {
        request_id: (rows[place[index]],)
        for request_id, index in zip(outcome.request_ids.tolist(), outcome.sample_index.tolist(), strict=True)
        if place[index] >= 0
    }


def _placed_logprobs(
    outcome: StepOutcome, result: StepResult, places: Int64s, rows: list[TokenLogprobs]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """With drafts, a row may have several tokens, one after the other."""
    found = dict(zip(zip(result.logprob_index.tolist(), places.tolist(), strict=True), rows, strict=True))
    num_seen: dict[int, int] = {}
    by_request: dict[int, tuple[TokenLogprobs, ...]] = {}
    for request_id, row in zip(outcome.request_ids.tolist(), outcome.sample_index.tolist(), strict=True):
        place = num_seen.get(row, 0)
        num_seen[row] = place + 1
        if (row, place) in found:
            by_request[request_id] = (*by_request.get(request_id, ()), found[row, place])
    return by_request


def _rows(columns: LogprobColumns, counts: list[int]) -> list[TokenLogprobs]:
    """One record per position, each with as many top tokens as its request set."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids[:count]), tuple(top_logprobs[:count]))
        for count, token_id, logprob, rank, top_ids, top_logprobs in zip(
            counts,
            columns.token_ids.tolist(),
            columns.logprobs.tolist(),
            columns.ranks.tolist(),
            columns.top_ids.tolist(),
            columns.top_logprobs.tolist(),
            strict=True,
        )
    ]
