"""Makes a request one that every replica answers alike, and checks what it brings from another replica."""

from __future__ import annotations

import dataclasses

from millrace.errors import BadRequest
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.resuming.request import TOKENS_HEADER, Resumable


def prepared(generation: Generation, resumable: Resumable | None) -> Generation:
    if resumable is None:
        return generation
    if not generation.stream or generation.beams is not None:
        if resumable.received is not None:
            raise BadRequest(
                f"The header {TOKENS_HEADER} continues a stream, and this answer is none or comes from a beam search;"
                " send the request without it.",
                param=TOKENS_HEADER,
            )
        return generation
    num_choices = len(generation.prompts) * generation.num_sequences
    if resumable.received is not None and len(resumable.received) != num_choices:
        raise BadRequest(
            f"The header {TOKENS_HEADER} has {len(resumable.received)} parts; the answer has {num_choices} choices.",
            param=TOKENS_HEADER,
        )
    params = generation.params if generation.params.seed is not None else generation.params.with_seed(resumable.seed)
    prefix, separator, _ = generation.answer_id.rpartition("_" if "_" in generation.answer_id else "-")
    return dataclasses.replace(
        generation,
        resumable=resumable,
        params=params,
        answer_id=resumable.id_of(prefix + separator),
        created=resumable.created or generation.created,
    )
