"""Translates the bodies of /api/chat into generations, and what /api/generate has in common with it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from millrace.errors import BadRequest, ContextOverflow
from millrace.params.defaults import SamplingDefaults
from millrace.params.grammar import Grammar
from millrace.params.keeping import Retain
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.open_chat import Chat, open_chat
from millrace.serve.generate.chat.reasoning import ReasoningWish
from millrace.serve.generate.chat.tools import NO_TOOLS, ToolUse, function_of, tool_use
from millrace.serve.generate.checks import (
    check_integers,
    check_logprobs,
    check_range,
    name_fields,
    refuse_unsupported,
)
from millrace.serve.generate.choosing.sampler_fields import SAMPLER_NAMES, sampler_options
from millrace.serve.generate.fields.retaining import DAY_S, IN_MEMORY_S
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.grammars import format_of, schema_format
from millrace.serve.generate.messages import Conversation, Message, PastCall
from millrace.serve.generate.prompts import without_oldest
from millrace.serve.generate.sampling import complete, deadline_of, sampling_params
from millrace.serve.http.ids import new_id
from millrace.serve.ollama.keep_alive import keep_alive_s
from millrace.serve.ollama.schemas import (
    MESSAGE_NOT_SUPPORTED,
    NOT_SUPPORTED,
    OPTIONS_NOT_SUPPORTED,
    OllamaChatRequest,
    OllamaCommon,
    OllamaMessage,
    OllamaOptions,
)
from millrace.serve.sessions.turns import continued, open_session, taking_turn
from millrace.serve.state import FrontState

OLLAMA_DEFAULTS = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9, source="Ollama")
"""Ollama's documented defaults, for models that recommend nothing."""
LATEST = ":latest"
Body = TypeVar("Body", bound=OllamaCommon)
_SAME_NAME = (*OLLAMA_DEFAULTS.fields(), "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
SAMPLING = {**{name: name for name in (*OLLAMA_DEFAULTS.fields(), "min_p")}, "repeat_penalty": "repetition_penalty"}
"""Options that `SamplingDefaults` has, with the names that it gives them."""
_OPTION_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in (*_SAME_NAME, *SAMPLER_NAMES, "num_predict", "num_keep")},
}
CHAT_NAMES = {**_OPTION_NAMES, "prompt": "messages"}
GENERATE_NAMES = {**_OPTION_NAMES, "prompt": "prompt"}


async def state_of_model(name: str, state: FrontState) -> FrontState:
    """The state of the model with this name, with or without `:latest`."""
    plain = name.removesuffix(LATEST)
    return await state.for_model(name if state.models.knows(name) or not state.models.knows(plain) else plain)


def check_body(body: OllamaCommon) -> None:
    refuse_unsupported(body, NOT_SUPPORTED, "")
    check_integers(body)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest(
            f"top_logprobs is {body.top_logprobs}, which needs 'logprobs' to be true; set it.", param="top_logprobs"
        )
    if body.options is not None:
        _check_supported(body.options)
    if body.shift and (body.options is None or (body.options.num_predict or 0) < 1):
        raise BadRequest(
            "'shift' is true, but this server never shifts a context: an answer ends where the context is full. Send"
            " false, or limit the answer with options.num_predict.",
            param="shift",
        )


def with_options(state: FrontState, body: Body) -> Body:
    """The request with the options of the model's maker that it leaves out."""
    if state.made is None or not state.made.options:
        return body
    own = body.options or OllamaOptions()
    kept = {name: value for name, value in state.made.options.items() if getattr(own, name) is None}
    return msgspec.structs.replace(body, options=msgspec.structs.replace(own, **kept))


def check_sampling(state: FrontState, body: OllamaCommon) -> None:
    """Check the options of a request that generates nothing as strictly as those of one that does."""
    try:
        ollama_params(state, body)
    except BadRequest as error:
        raise name_fields(error, _OPTION_NAMES) from None


def check_options(state: FrontState, options: OllamaOptions) -> None:
    """Check options that have no effect, those of an embedding, like those of a chat."""
    _check_supported(options)
    try:
        _params(state, options)
    except BadRequest as error:
        raise name_fields(error, _OPTION_NAMES) from None


def _check_supported(options: OllamaOptions) -> None:
    refuse_unsupported(options, OPTIONS_NOT_SUPPORTED, "options.")
    check_integers(options, "options.")


async def chat_generation(state: FrontState, body: OllamaChatRequest, received: float, owner: str) -> Generation:
    try:
        session = await open_session(state, body.session_id, owner)
        messages = _messages(body.messages or [])
        said = Conversation(messages, continue_final_message=messages[-1].role == "assistant")
        conversation = continued(session, said)
        generation = await _chat(state, body, conversation, received, _tools(body), may_drop=bool(body.truncate))
        return taking_turn(state, session, owner, conversation, generation)
    except BadRequest as error:
        raise name_fields(error, CHAT_NAMES) from None


async def _chat(
    state: FrontState,
    body: OllamaCommon,
    conversation: Conversation,
    received: float,
    use: ToolUse = NO_TOOLS,
    *,
    may_drop: bool = False,
) -> Generation:
    """`may_drop`: the oldest messages of a conversation that is too long."""
    messages = conversation.messages
    params = ollama_params(state, body)
    if may_drop:
        shown = dataclasses.replace(conversation, tools=use.shown)
        num_ctx = body.options.num_ctx if body.options is not None else None
        kept = await without_oldest(state, shown, max_tokens=params.max_tokens, max_context=num_ctx)
        conversation = dataclasses.replace(conversation, messages=kept)
    chat = await open_chat(state, conversation, params, use=use, wish=wish_of(body), grammar_field="format")
    prompt = dataclasses.replace(chat.prompt, num_dropped=len(messages) - len(conversation.messages))
    generation = await ollama_generation(state, body, dataclasses.replace(chat, prompt=prompt), "chatcmpl-", received)
    return dataclasses.replace(generation, reports_dropped=may_drop)


async def ollama_generation(
    state: FrontState, body: OllamaCommon, chat: Chat, id_prefix: str, received: float
) -> Generation:
    options = body.options or OllamaOptions()
    return Generation(
        prompts=[chat.prompt],
        params=await complete(state, _within_num_ctx(state, chat.params, len(chat.prompt.token_ids), options.num_ctx)),
        form=chat.form,
        answer_id=new_id(id_prefix),
        deadline=deadline_of(None, state.config, received),
        stream=body.stream is not False,
        logprobs=chat.params.logprobs,
        format_field=chat.grammar_field,
        retain=_kept(body) if chat.prompt.documents is None else None,
    )


def _kept(body: OllamaCommon) -> Retain | None:
    """What a conversation has computed stays as long as its model is asked to, or with a `context` for a while."""
    seconds = keep_alive_s(body.keep_alive)
    if seconds is None:
        seconds = IN_MEMORY_S if getattr(body, "context", None) else 0.0
    seconds = DAY_S if seconds < 0 else min(seconds, DAY_S)
    return Retain(max(seconds, 1.0), covers_answer=True) if seconds else None


def ollama_params(state: FrontState, body: OllamaCommon) -> SamplingParams:
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(state, body.options or OllamaOptions(), logprobs=num_logprobs, grammar=_grammar(body))


def _params(state: FrontState, options: OllamaOptions, **more: Any) -> SamplingParams:
    check_range("num_predict", options.num_predict, -2, 2**31 - 1)
    check_range("num_keep", options.num_keep, -1, 2**31 - 1)
    if options.num_predict == 0:
        raise BadRequest("num_predict is 0; ask for at least 1 token, or -1 for no limit.", param="options.num_predict")
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME_NAME}
    if options.seed == -1:
        fields["seed"] = None
    fields |= sampler_options(options)
    defaults = state.sampling_defaults if state.sampling_defaults.fields() else OLLAMA_DEFAULTS
    if fields["mirostat"]:  # As in Ollama, mirostat replaces the cuts, unless they are asked for.
        defaults = SamplingDefaults(temperature=defaults.temperature)
    return sampling_params(
        defaults,
        **fields,
        max_tokens=options.num_predict if options.num_predict is not None and options.num_predict > 0 else None,
        repetition_penalty=options.repeat_penalty,
        **more,
    )


def _grammar(body: OllamaCommon) -> Grammar | None:
    sent = b"null" if isinstance(body.format, UnsetType) else bytes(body.format).strip()
    if sent in (b"null", b'""'):
        return None
    if sent == b'"json"':
        return format_of("format", "json_object").grammar
    if sent.startswith(b"{"):
        return schema_format("format", Raw(sent)).grammar
    raise BadRequest("'format' is neither \"json\" nor a JSON schema; send one of them.", param="format")


def wish_of(body: OllamaCommon) -> ReasoningWish:
    think = body.think
    if isinstance(think, str):
        return ReasoningWish(is_on=True, effort=think, field="think")
    return ReasoningWish(is_on=think, field="think")


def _tools(body: OllamaChatRequest) -> ToolUse:
    functions = []
    for index, tool in enumerate(body.tools or ()):
        spec, param = tool.function, f"tools[{index}].function"
        functions.append(
            function_of(spec.name, spec.description, spec.parameters, is_strict=bool(spec.strict), param=param)
        )
    return tool_use(functions, None, None, parallel=None)


def _messages(messages: list[OllamaMessage]) -> list[Message]:
    """Calls have no ids in Ollama's API: results belong to the calls before them by function name, else by order."""
    found: list[Message] = []
    open_calls: list[PastCall] = []
    for index, message in enumerate(messages):
        translated = _message(message, f"messages[{index}]", f"call_{index}_")
        if translated.role == "tool" and translated.tool_call_id is None:
            named = [call for call in open_calls if translated.name in (None, call.name)]
            if named:
                open_calls.remove(named[0])
                translated = dataclasses.replace(translated, tool_call_id=named[0].id, name=named[0].name)
        open_calls += translated.tool_calls
        found.append(translated)
    return found


def _message(message: OllamaMessage, at: str, call_prefix: str) -> Message:
    refuse_unsupported(message, MESSAGE_NOT_SUPPORTED, f"{at}.")
    calls = tuple(
        PastCall(call.id or f"{call_prefix}{number}", call.function.name, call.function.arguments)
        for number, call in enumerate(message.tool_calls or ())
    )
    if message.content is None and not calls:
        raise BadRequest(f"'{at}.content' is required.", param=f"{at}.content")
    return Message(
        message.role,
        message.content or "",
        message.tool_name or message.name,
        calls,
        message.tool_call_id,
        message.thinking or None,
        () if message.cache is None or not message.content else (message.cache.marked(message.content),),
    )


def check_num_ctx(num_ctx: int | None, max_context: int) -> None:
    if num_ctx is not None and not 1 <= num_ctx <= max_context:
        raise BadRequest(
            f"num_ctx is {num_ctx}; it must be between 1 and {max_context}, the model's context.",
            param="options.num_ctx",
        )


def _within_num_ctx(state: FrontState, params: SamplingParams, num_prompt: int, num_ctx: int | None) -> SamplingParams:
    """`num_ctx` limits the context of this request. A prompt that does not fit is refused, never cut."""
    if num_ctx is None:
        return params
    ready = state.require_engine()
    check_num_ctx(num_ctx, ready.max_context)
    asked = params.max_tokens
    if num_prompt + (asked or 1) > num_ctx:
        wanted = f" and num_predict asks for {asked}" if asked else ""
        raise ContextOverflow(
            f"The prompt has {num_prompt} tokens{wanted}, but num_ctx is {num_ctx}. Shorten the prompt"
            f"{', lower num_predict' if asked else ''} or raise num_ctx.",
            param="options.num_ctx",
        )
    room = min(num_ctx, ready.kv_tokens) - num_prompt
    return msgspec.structs.replace(params, max_tokens=asked or max(1, room))
