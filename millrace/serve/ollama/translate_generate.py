"""Translates the bodies of /api/generate into generations."""

from __future__ import annotations

import dataclasses

import msgspec

from millrace.errors import BadRequest
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.open_chat import Chat, open_prompt
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.messages import Conversation, Message
from millrace.serve.generate.prompts import encode_texts, fill_in_prompts, off_loop, template_input, with_reasoning
from millrace.serve.ollama.go_template import GoTemplate
from millrace.serve.ollama.schemas import OllamaGenerateRequest
from millrace.serve.ollama.translate import GENERATE_NAMES, ollama_generation, ollama_params, wish_of
from millrace.serve.state import FrontState

DEFAULT_NUM_KEEP = 4
"""Ollama's own default."""
_PAST = "qxqPASTqxq"
"""Stands for an earlier answer: text that templates do not change."""


async def text_generation(state: FrontState, body: OllamaGenerateRequest, received: float) -> Generation:
    """Through a template, unless the body asks for `raw` or the model has no template."""
    try:
        _check(state, body)
        if state.made is not None and not (body.system or body.raw or body.context or body.suffix):
            body = msgspec.structs.replace(body, system=state.made.system or None)
        params = ollama_params(state, body)
        chat = await _chat(state, body, params)
        prompt = _cut(state, body, chat.prompt, params.max_tokens) if body.truncate else chat.prompt
        prefix = "cmpl-" if body.raw or body.suffix else "chatcmpl-"
        generation = await ollama_generation(state, body, dataclasses.replace(chat, prompt=prompt), prefix, received)
        return dataclasses.replace(generation, return_token_ids=not body.raw, reports_dropped=bool(body.truncate))
    except BadRequest as error:
        raise name_fields(error, GENERATE_NAMES) from None


def _check(state: FrontState, body: OllamaGenerateRequest) -> None:
    for name, is_set in (
        ("template", bool(body.template)),
        ("context", bool(body.context)),
        ("think", wish_of(body).wants_reasoning),
    ):
        if body.raw and is_set:
            raise BadRequest(f"'{name}' cannot be combined with 'raw'; remove one of them.", param=name)
    if body.context and body.suffix and not body.template:
        raise BadRequest("'context' cannot be combined with 'suffix'; remove one of them.", param="context")
    vocab_size = state.require_engine().vocab_size
    for token_id in body.context or ():
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"'context' holds the token id {token_id!s:.40}, but this model's ids are between 0 and"
                f" {vocab_size - 1}; send the context of an earlier reply of this model.",
                param="context",
            )


async def _chat(state: FrontState, body: OllamaGenerateRequest, params: SamplingParams) -> Chat:
    if body.template:
        before, after = _filled_in(body, body.template)
        return await _templated(state, body, params, after + before if body.context else before, add_special=True)
    if body.suffix:
        [prompt] = await fill_in_prompts(state, [body.prompt or ""], body.suffix)
        return Chat(prompt, params, None, "format")
    if not body.raw:
        try:
            text = await off_loop(state, len(body.prompt or ""), lambda: _rendered(state, body))
            return await _templated(state, body, params, text, add_special=False)
        except BadRequest as error:
            if error.code != "no_chat_template":
                raise
    text = f"{body.system}\n{body.prompt}" if body.system else body.prompt or ""
    return Chat(await _prompt(state, body, params, text, add_special=True), params, None, "format")


async def _templated(
    state: FrontState, body: OllamaGenerateRequest, params: SamplingParams, text: str, *, add_special: bool
) -> Chat:
    prompt = with_reasoning(state, await _prompt(state, body, params, text, add_special=add_special), text)
    return open_prompt(state, prompt, params, wish=wish_of(body), grammar_field="format")


async def _prompt(
    state: FrontState, body: OllamaGenerateRequest, params: SamplingParams, text: str, *, add_special: bool
) -> Prompt:
    """The conversation so far, and the text after it."""
    past = body.context or []
    [token_ids] = await encode_texts(
        state,
        [text],
        add_special=add_special and not past,
        may_cut=bool(body.truncate),
    )
    if not token_ids:
        raise BadRequest("'prompt' has no tokens; send at least one character.", param="prompt")
    return Prompt(past + token_ids, text)


def _filled_in(body: OllamaGenerateRequest, source: str) -> tuple[str, str]:
    """The request's own template: its text before and after the answer."""
    template = GoTemplate(source)
    for name, value in (("Prompt", body.prompt), ("System", body.system), ("Suffix", body.suffix)):
        if value and name not in template.names:
            raise BadRequest(
                f"'template' does not use .{name}, so '{name.lower()}' would have no effect; add it, or remove"
                f" '{name.lower()}'.",
                param="template",
            )
    return template.render({"System": body.system or "", "Prompt": body.prompt or "", "Suffix": body.suffix or ""})


def _rendered(state: FrontState, body: OllamaGenerateRequest) -> str:
    """The prompt by the model's chat template; with a context, what follows the answer that ends the context."""
    past = [Message("user", _PAST.lower()), Message("assistant", _PAST)] if body.context else []
    system = [Message("system", body.system)] if body.system else []
    conversation = Conversation([*past, *system, Message("user", body.prompt or "")])
    messages, _ = template_input(state, conversation)
    text = state.template.render(messages, add_generation_prompt=True, **wish_of(body).template_kwargs())
    if not past:
        return text
    _, found, rest = text.partition(_PAST)
    if not found:
        raise BadRequest(
            "This model's chat template does not show earlier answers, so it cannot continue a 'context'; send the"
            " conversation to /api/chat.",
            param="context",
            code="unsupported_parameter",
        )
    return rest


def _cut(state: FrontState, body: OllamaGenerateRequest, prompt: Prompt, max_tokens: int | None) -> Prompt:
    """A prompt that is too long loses tokens after its first `num_keep`, as many as leave room for the answer."""
    ready, options = state.require_engine(), body.options
    num_ctx = options.num_ctx if options is not None and options.num_ctx is not None else ready.max_context
    room = min(num_ctx, ready.max_context, ready.kv_tokens) - (max_tokens or 1)
    num_excess = len(prompt.token_ids) - room
    if num_excess <= 0 or room < 1:
        return prompt
    asked = options.num_keep if options is not None and options.num_keep is not None else DEFAULT_NUM_KEEP
    num_keep = room - 1 if asked < 0 else min(asked, room - 1)
    token_ids = prompt.token_ids[:num_keep] + prompt.token_ids[num_keep + num_excess :]
    return dataclasses.replace(prompt, token_ids=token_ids, text=None, num_dropped=num_excess)
