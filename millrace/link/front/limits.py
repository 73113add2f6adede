"""Checks of a request against the engine's limits, in the front: what fails here costs the engine nothing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.errors import BadRequest, ContextOverflow
from millrace.link.messages import EngineReady
from millrace.params.sampling import SamplingParams


def checked_ids(prompt: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The prompt as an array. Raises if it is empty or has ids outside the vocabulary."""
    try:
        token_ids = np.asarray(prompt, np.int64)
    except OverflowError:
        raise _no_token(max(prompt, key=abs), vocab_size) from None
    if not len(token_ids):
        raise BadRequest("The prompt has no tokens; send at least one.", param="prompt")
    # Viewed as unsigned, negative ids exceed any vocabulary too.
    if int(token_ids.view(np.uint64).max()) >= vocab_size:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        raise _no_token(lowest if lowest < 0 else highest, vocab_size)
    return token_ids


def _no_token(token_id: int, vocab_size: int) -> BadRequest:
    return BadRequest(
        f"The prompt holds token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}.", param="prompt"
    )


def check_named_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, token_ids in (
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", [max(params.allowed_token_ids)] if params.allowed_token_ids else []),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise BadRequest(
                    f"{name} names token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}.", param=name
                )


def checked_ends(params: SamplingParams, end_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end the answer, of the model's end tokens. Refuses a minimum length that no allowed token could
    fill."""
    of_model = () if params.ignore_eos and params.grammar is None else end_token_ids
    end_token_ids = tuple(dict.fromkeys((*of_model, *params.stop_token_ids)))
    if params.min_tokens and params.allowed_token_ids and set(params.allowed_token_ids) <= set(end_token_ids):
        raise BadRequest(
            "allowed_token_ids has nothing but tokens that end the answer, which min_tokens forbids; add others or"
            " remove min_tokens.",
            param="allowed_token_ids",
        )
    return end_token_ids


def overflow(num_prompt: int, max_tokens: int, ready: EngineReady) -> ContextOverflow:
    """`max_tokens` is named only where lowering it helps: not every request has sent one."""
    room, what, more = ready.max_context, "the context", ""
    if ready.kv_tokens < ready.max_context:
        room, what, more = ready.kv_tokens, "the KV pool", ", or give the server a larger --kv-gib"
    if num_prompt < room:
        return ContextOverflow(
            f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}, but {what} holds {room}. Shorten the"
            f" prompt or lower max_tokens{more}.",
            param="max_tokens",
        )
    after = ", one of them after the prompt" if max_tokens else ""
    return ContextOverflow(
        f"The prompt has {num_prompt} tokens, but {what} holds {room}{after}. Shorten the prompt{more}.",
        param="prompt",
    )


def text_too_long(num_tokens: int, ready: EngineReady) -> ContextOverflow:
    """For models that read a text at once and write nothing after it."""
    return ContextOverflow(
        f"The text has {num_tokens} tokens, special tokens included, but the model reads at most {ready.max_context}."
        " Shorten it, or ask for its end to be cut (`truncate`).",
        param="prompt",
    )


def completed(params: SamplingParams, num_prompt: int, ready: EngineReady) -> SamplingParams:
    """Check the request against the engine's limits, and fill in `max_tokens` and the seed."""
    if params.logit_bias or params.stop_token_ids or params.allowed_token_ids:
        check_named_ids(params, ready.vocab_size)
    room = min(ready.max_context, ready.kv_tokens)
    max_tokens = params.max_tokens if params.max_tokens is not None else max(room - num_prompt, 1)
    if params.pooling == "model":
        if num_prompt > ready.max_context:
            raise text_too_long(num_prompt, ready)
    elif num_prompt + max_tokens > room:
        raise overflow(num_prompt, max_tokens, ready)
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=max_tokens)
    return params if params.seed is not None else params.with_seed(secrets.randbits(63))
