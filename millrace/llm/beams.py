"""Beam search of `LLM.generate`."""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.beams import Beam, check_beams, search, step_params
from millrace.errors import RequestFailed
from millrace.link.client import EngineClient
from millrace.link.messages import Finish, TokenLogprobs
from millrace.link.search_steps import SearchSteps
from millrace.llm.outputs import Choice, Generation
from millrace.params.beams import BeamParams
from millrace.params.sampling import SamplingParams
from millrace.text.text_stream import TextStream, stop_finder
from millrace.text.tokenizers.tokenizer import Tokenizer


async def search_one(
    client: EngineClient, tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams, beams: BeamParams
) -> Generation[Any]:
    """The best `params.n` beams after one prompt."""
    own = () if params.ignore_eos else tokenizer.end_token_ids
    ends = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    check_beams(beams, params, len(ends))
    asked = step_params(beams, len(ends), params.logprobs, params.adapter)
    max_tokens = client.output_limit(len(token_ids), params)
    client.check_room()
    steps = SearchSteps(client, token_ids, _error_of)

    async def expand(live: list[list[int]]) -> list[TokenLogprobs]:
        return list(await asyncio.gather(*(steps.following(beam, asked) for beam in live)))

    best: list[Beam] = []
    try:
        found = await search(
            beams,
            expand,
            max_tokens=max_tokens,
            ends=ends,
            min_tokens=params.min_tokens,
            has_stop=stop_finder(tokenizer, params),
        )
        best = found[: params.n]
    finally:
        reason = best[0].finish_reason(max_tokens) if best else None
        steps.end(reason, sum(len(beam.token_ids) for beam in best))
    return Generation(token_ids, [_choice(tokenizer, index, beam, params) for index, beam in enumerate(best)])


def _error_of(finish: Finish) -> RequestFailed:
    return RequestFailed(finish.message or f"The request ended early: {finish.reason}.")


def _choice(tokenizer: Tokenizer, index: int, beam: Beam, params: SamplingParams) -> Choice[Any]:
    text = TextStream(tokenizer, params)
    num_shown = len(beam.token_ids) - beam.is_stopped  # an end token is not part of the answer
    shown = list(beam.token_ids[:num_shown])
    pieces = [text.push(token) for token in shown] + [text.finish()]
    stopped_by = text.stopped_by if text.stopped_by is not None else beam.token_ids[-1] if beam.is_stopped else None
    return Choice(
        index,
        "".join(pieces),
        shown,
        "length" if stopped_by is None else "stop",
        stopped_by,
        beam.entries(params.logprobs)[:num_shown] if params.logprobs is not None else None,
    )
