"""POST /v1/chat/completions: its body translated into work."""

from __future__ import annotations

from functools import partial

import msgspec

from millrace.errors import BadRequest
from millrace.params.defaults import NEUTRAL_DEFAULTS
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.open_chat import Chat, open_chat
from millrace.serve.generate.chat.reasoning import ReasoningWish
from millrace.serve.generate.chat.verbosity import verbosity_kwargs
from millrace.serve.generate.checks import check_logprobs, check_num_sequences, name_fields
from millrace.serve.generate.choosing.beam_fields import beam_params
from millrace.serve.generate.fields.documents import documents_note
from millrace.serve.generate.fields.priority import priority_of
from millrace.serve.generate.fields.retaining import retention_of
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.messages import Conversation
from millrace.serve.generate.prompts import check_truncation, encode_texts
from millrace.serve.generate.sampling import complete, deadline_of, salt_of, sampling_params
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id, warnings
from millrace.serve.openai.formats import format_wanted
from millrace.serve.openai.kept.stored_chat import StoringWriter, storing
from millrace.serve.openai.schemas import ChatRequest
from millrace.serve.openai.translate_messages import conversation_of
from millrace.serve.openai.translate_shared import check_fields, sequences_of, shared_sampling, usage_options
from millrace.serve.openai.translate_tools import tools_of, uses_functions
from millrace.serve.openai.write_chat import ChatWriter
from millrace.serve.sessions.turns import continued, keeping_turn, open_session, taking_turn
from millrace.serve.state import FrontState

_decoder = BodyDecoder(ChatRequest)


async def prepare_chat(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    session = await open_session(state, request.session_id, owner)
    conversation = continued(session, _conversation(state, request))
    generation = await _generation(state, request, conversation, received)
    generation = taking_turn(state, session, owner, conversation, generation)
    limit_names = {"prompt": "messages", "max_tokens": _max_tokens(request)[1]}
    kind = StoringWriter if request.store else ChatWriter
    writer = partial(kind, limit_names=limit_names, uses_functions=uses_functions(request))
    work = Work(state, generation, writer, headers=warnings([documents_note(generation)]))
    return keeping_turn(storing(state, request, work, owner) if request.store else work)


async def _generation(
    state: FrontState, request: ChatRequest, conversation: Conversation, received: float
) -> Generation:
    check_fields(request)
    check_truncation(request.truncate_prompt_tokens)
    max_tokens, limit_name = _max_tokens(request)
    logprobs = _logprobs(request)
    wanted = format_wanted(request)
    n = 1 if request.n is None else request.n
    beams = beam_params(request, n, request.best_of, request.self_consistency)
    per_prompt = n if beams is not None else sequences_of(request, n)
    try:
        params = sampling_params(
            state.sampling_defaults if beams is None else NEUTRAL_DEFAULTS,
            **shared_sampling(request),
            max_tokens=max_tokens,
            n=request.n,
            # best_of ranks by the log-probability of the tokens that were chosen.
            logprobs=0 if per_prompt > n and logprobs is None else logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=wanted.grammar if wanted is not None else None,
        )
    except BadRequest as error:
        raise name_fields(error, {"max_tokens": limit_name}) from None
    check_num_sequences(1, per_prompt)
    include_usage, continuous_usage = usage_options(request)
    chat = await _chat(state, request, conversation, params, wanted.field if wanted is not None else "")
    if beams is not None and chat.prompt.documents is not None:
        raise BadRequest("Beams are not searched after parts that are marked as documents.", param="cache")
    return Generation(
        prompts=[chat.prompt],
        params=await complete(state, await _predicted(state, request, chat.params)),
        form=chat.form,
        answer_id=new_id("chatcmpl-"),
        deadline=deadline_of(request.timeout, state.config, received),
        n=params.n,
        num_sequences=per_prompt,
        vote=request.self_consistency,
        beams=beams,
        asked_priority=priority_of(request.priority, request.service_tier),
        cache_salt=salt_of(request.cache_salt),
        retain=retention_of(request.prompt_cache_key, request.prompt_cache_retention),
        stream=bool(request.stream),
        holds_end=bool(request.store),
        writes_details=bool(request.store),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        reports_dropped=request.truncate_prompt_tokens is not None,
        format_field=chat.grammar_field,
    )


def _conversation(state: FrontState, request: ChatRequest) -> Conversation:
    return conversation_of(
        request.messages,
        request.add_generation_prompt,
        request.continue_final_message,
        verbosity_kwargs(state, request.verbosity, "verbosity") | (request.chat_template_kwargs or {}),
    )


async def _chat(
    state: FrontState, request: ChatRequest, conversation: Conversation, params: SamplingParams, grammar_field: str
) -> Chat:
    use, keep = tools_of(request), request.truncate_prompt_tokens
    budget = request.thinking_token_budget
    field = "reasoning_effort" if budget is None else "thinking_token_budget"
    wish = ReasoningWish(effort=request.reasoning_effort, max_tokens=budget, field=field)
    try:
        return await open_chat(state, conversation, params, use=use, wish=wish, keep=keep, grammar_field=grammar_field)
    except BadRequest as error:
        raise name_fields(error, {"prompt": "messages"}) from None


async def _predicted(state: FrontState, request: ChatRequest, params: SamplingParams) -> SamplingParams:
    """The parameters with the tokens of `prediction`, as many as an answer can have."""
    if request.prediction is None:
        return params
    content = request.prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    [token_ids] = await encode_texts(state, [text], add_special=False, may_cut=True)
    return msgspec.structs.replace(params, prediction=tuple(token_ids[: state.require_engine().max_context]))


def _max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The limit and the name of the field that set it."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they are the same limit, send one of them.",
            param="max_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _logprobs(request: ChatRequest) -> int | None:
    if request.prompt_logprobs is not None:
        check_logprobs("prompt_logprobs", request.prompt_logprobs)
    check_logprobs("top_logprobs", request.top_logprobs)
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise BadRequest(
            f"top_logprobs is {request.top_logprobs}, which requires 'logprobs' to be true.", param="top_logprobs"
        )
    return None
