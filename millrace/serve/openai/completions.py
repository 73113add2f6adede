"""POST /v1/completions: its body translated into a `Generation`."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from millrace.errors import BadRequest
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.prompts import cut_prompt, encode_texts
from millrace.serve.generate.sampling import (
    check_fields,
    check_logprobs,
    check_model,
    check_num_sequences,
    check_range,
    check_truncation,
    deadline_of,
    priority_of,
    salt_of,
    sampling_params,
)
from millrace.serve.http.body import json_error
from millrace.serve.http.ids import new_id
from millrace.serve.openai.schemas import MAX_SEQUENCES, CompletionRequest
from millrace.serve.state import FrontState

_T = TypeVar("_T")
_OPENING = re.compile(rb"\s*(\[?)\s*([^\s])")
"""The first two signs of a JSON value say which form of prompt it is."""

DEFAULT_MAX_TOKENS = 16
"""As OpenAI defines it for this endpoint."""


async def completion_generation(state: FrontState, request: CompletionRequest, received: float) -> Generation:
    check_model(request.model, state.model_name)
    check_fields(request)
    check_truncation(request.truncate_prompt_tokens)
    echo = bool(request.echo)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    score_only = echo and max_tokens == 0
    n = 1 if request.n is None else request.n
    best_of = _best_of(request, n)
    _check_logprobs(request)
    params = sampling_params(
        request,
        max_tokens=1 if score_only else max_tokens,
        # best_of ranks by the log-probability of the tokens that were chosen.
        logprobs=0 if best_of > n and request.logprobs is None else request.logprobs,
        prompt_logprobs=_prompt_logprobs(request, echo),
    )
    prompts = await _prompts(state, request, best_of, max_tokens)
    options = request.stream_options
    return Generation(
        prompts=prompts,
        params=params,
        answer_id=new_id("cmpl-"),
        deadline=deadline_of(request, state.config, received),
        n=n,
        num_sequences=best_of,
        priority=priority_of(request),
        cache_salt=salt_of(request),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=echo,
        score_only=score_only,
        return_token_ids=bool(request.return_token_ids),
        reports_dropped=request.truncate_prompt_tokens is not None,
    )


def _best_of(request: CompletionRequest, n: int) -> int:
    if request.best_of is None:
        return n
    check_range("best_of", request.best_of, 1, MAX_SEQUENCES)
    if request.best_of < n:
        raise BadRequest(f"best_of is {request.best_of}, below n {n}; raise it to at least {n}.", param="best_of")
    if request.best_of > n and request.stream:
        raise BadRequest(
            f"best_of is {request.best_of} and n is {n}, but which choices are best is known only at the end;"
            " set stream to false or best_of to n.",
            param="best_of",
        )
    return request.best_of


def _check_logprobs(request: CompletionRequest) -> None:
    check_logprobs("logprobs", request.logprobs)
    check_logprobs("prompt_logprobs", request.prompt_logprobs)
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest(
            "'prompt_logprobs' is not available with 'stream'; set stream to false.", param="prompt_logprobs"
        )


def _prompt_logprobs(request: CompletionRequest, echo: bool) -> int | None:
    """An echoed prompt has log-probabilities too, when those of the output were asked for."""
    wanted = [value for value in (request.prompt_logprobs, request.logprobs if echo else None) if value is not None]
    return max(wanted, default=None)


async def _prompts(state: FrontState, request: CompletionRequest, per_prompt: int, max_tokens: int) -> list[Prompt]:
    texts, token_lists = _split(request.prompt)
    check_num_sequences(max(len(texts), len(token_lists)), per_prompt)
    if texts:
        encoded = await encode_texts(
            state,
            texts,
            add_special=request.add_special_tokens is not False,
            max_tokens=max_tokens,
            may_cut=request.truncate_prompt_tokens is not None,
        )
        prompts = [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    else:
        prompts = [Prompt(token_ids, None) for token_ids in token_lists]
    for prompt in prompts:
        if not prompt.token_ids:
            raise BadRequest("'prompt' has no tokens; send at least one character or token.", param="prompt")
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompts
    return [cut_prompt(state, prompt.token_ids, prompt.text, keep, max_tokens) for prompt in prompts]


def _split(raw: msgspec.Raw) -> tuple[list[str], list[list[int]]]:
    """The four forms of a prompt as texts or as token lists; one of the two is empty."""
    data = bytes(raw)
    opening = _OPENING.match(data)
    head = opening[1] + opening[2] if opening else b""
    if head.startswith(b'"'):
        return [_decoded(data, str, "a text")], []
    if head == b"[[":
        _check_num_lists(data)
        return [], [_token_ids(items) for items in _decoded(data, list[list[int]], "arrays of token ids only")]
    if head == b'["':
        return _decoded(data, list[str], "texts only"), []
    if head.startswith(b"[") and head != b"[]":
        return [], [_token_ids(_decoded(data, list[int], "token ids only"))]
    raise _wrong_prompt("is an empty array" if head == b"[]" else "is neither a text nor an array")


def _check_num_lists(data: bytes) -> None:
    """Before a million little lists are built only to be counted."""
    num_lists = data.count(b"[") - 1
    check_num_sequences(num_lists, 1)


def _decoded(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise _wrong_prompt(f"begins like {what}, but holds something else") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise json_error(error, data) from None


def _token_ids(items: list[int]) -> list[int]:
    """Ids that fit the wire; the vocabulary's own bounds are checked by who knows them."""
    if not items:
        raise _wrong_prompt("holds an empty array")
    for value in (min(items), max(items)):
        if not 0 <= value < 2**31:
            raise BadRequest(f"'prompt' holds the token id {value!s:.40}; ids are small, not negative.", param="prompt")
    return items


def _wrong_prompt(what: str) -> BadRequest:
    return BadRequest(
        f"'prompt' {what}; send a text, an array of texts, an array of token ids, or an array of such arrays.",
        param="prompt",
    )
