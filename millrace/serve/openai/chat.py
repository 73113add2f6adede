"""POST /v1/chat/completions: its body translated into a `Generation`."""

from __future__ import annotations

from millrace.errors import BadRequest
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.prompts import (
    cut_prompt,
    encode_chat,
    generation_prompt,
    template_kwargs,
    template_messages,
)
from millrace.serve.generate.sampling import (
    check_fields,
    check_logprobs,
    check_model,
    check_num_sequences,
    check_truncation,
    deadline_of,
    name_fields,
    priority_of,
    salt_of,
    sampling_params,
)
from millrace.serve.http.ids import new_id
from millrace.serve.openai.schemas import ChatRequest
from millrace.serve.state import FrontState


async def chat_generation(state: FrontState, request: ChatRequest, received: float) -> Generation:
    check_model(request.model, state.model_name)
    check_fields(request)
    check_truncation(request.truncate_prompt_tokens)
    max_tokens, limit_name = _max_tokens(request)
    logprobs = _logprobs(request)
    try:
        params = sampling_params(
            request, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs
        )
    except BadRequest as error:
        raise name_fields(error, {"max_tokens": limit_name}) from None
    check_num_sequences(1, params.n)
    options = request.stream_options
    return Generation(
        prompts=[await _prompt(state, request, max_tokens)],
        params=params,
        answer_id=new_id("chatcmpl-"),
        deadline=deadline_of(request, state.config, received),
        n=params.n,
        num_sequences=params.n,
        priority=priority_of(request),
        cache_salt=salt_of(request),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        reports_dropped=request.truncate_prompt_tokens is not None,
    )


async def _prompt(state: FrontState, request: ChatRequest, max_tokens: int | None) -> Prompt:
    token_ids = await _prompt_ids(state, request, max_tokens)
    keep = request.truncate_prompt_tokens
    return Prompt(token_ids, None) if keep is None else cut_prompt(state, token_ids, None, keep, max_tokens)


async def _prompt_ids(state: FrontState, request: ChatRequest, max_tokens: int | None) -> list[int]:
    add, continue_final = generation_prompt(request.add_generation_prompt, request.continue_final_message)
    try:
        return await encode_chat(
            state,
            template_messages(request.messages),
            add_generation_prompt=add,
            continue_final_message=continue_final,
            template_kwargs=template_kwargs(request.chat_template_kwargs),
            max_tokens=max_tokens,
            may_cut=request.truncate_prompt_tokens is not None,
        )
    except BadRequest as error:
        raise name_fields(error, {"prompt": "messages"}) from None


def overflow_names(request: ChatRequest) -> dict[str, str]:
    """How an error about the engine's limits is named for this endpoint's clients."""
    return {"prompt": "messages", "max_tokens": _max_tokens(request)[1]}


def _max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The limit and the name it was sent under."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, send one.",
            param="max_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _logprobs(request: ChatRequest) -> int | None:
    if request.prompt_logprobs is not None:
        check_logprobs("prompt_logprobs", request.prompt_logprobs)
        if request.stream:
            raise BadRequest(
                "'prompt_logprobs' is not available with 'stream'; set stream to false.", param="prompt_logprobs"
            )
    check_logprobs("top_logprobs", request.top_logprobs)
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise BadRequest(
            f"top_logprobs is {request.top_logprobs}, which needs 'logprobs' to be true; set it.", param="top_logprobs"
        )
    return None
