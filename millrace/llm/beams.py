"""Beam search of `LLM.generate`."""

from __future__ import annotations

import asyncio

from millrace.beams import Beam, OneToken, check_beams, search, step_params
from millrace.errors import RequestFailed
from millrace.link.client import EngineClient
from millrace.link.messages import TokenLogprobs
from millrace.llm.outputs import Choice, Generation
from millrace.params import BeamParams, SamplingParams
from millrace.text.text_stream import TextStream, stop_finder
from millrace.text.tokenizers.tokenizer import Tokenizer


async def search_one(
    client: EngineClient, tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams, beams: BeamParams
) -> Generation:
    """The best `params.n` beams after one prompt."""
    own = () if params.ignore_eos else tokenizer.end_token_ids
    ends = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    check_beams(beams, params, len(ends))
    asked = step_params(beams, len(ends), params.logprobs)

    async def expand(live: list[list[int]]) -> list[TokenLogprobs]:
        steps = [OneToken() for _ in live]
        ids = [client.submit(token_ids + beam, asked, step) for beam, step in zip(live, steps, strict=True)]
        try:
            finishes = await asyncio.gather(*(step.done for step in steps))
        finally:
            for request_id in ids:
                client.abort(request_id)
        for finish in finishes:
            if finish.reason not in ("stop", "length"):
                raise RequestFailed(finish.message or f"The request ended early: {finish.reason}.")
        return [step.logprobs for step in steps if step.logprobs is not None]

    max_tokens = client.output_limit(len(token_ids), params)
    has_stop = stop_finder(tokenizer, params)
    found = await search(
        beams, expand, max_tokens=max_tokens, ends=ends, min_tokens=params.min_tokens, has_stop=has_stop
    )
    choices = [_choice(tokenizer, index, beam, params) for index, beam in enumerate(found[: params.n])]
    return Generation(token_ids, choices)


def _choice(tokenizer: Tokenizer, index: int, beam: Beam, params: SamplingParams) -> Choice:
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
