"""Ollama's API by translation: /api/chat and /api/generate become chat or completion requests, answers JSON lines."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Raw, UnsetType

from millrace.errors import BadRequest, ContextOverflow, MillraceError
from millrace.serve.describe.routes_info import json_answer
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice, escape_lines
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.job import Job
from millrace.serve.generate.logprobs import chat_logprobs
from millrace.serve.generate.sampling import (
    check_logprobs,
    check_model,
    check_range,
    name_fields,
    refuse_unsupported,
    sampling_params,
)
from millrace.serve.generate.work import Work
from millrace.serve.http.app_keys import STATE
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.error_bodies import ollama_error_body
from millrace.serve.http.event_stream import JSON_LINES
from millrace.serve.ollama.schemas import (
    MESSAGE_NOT_SUPPORTED,
    NOT_SUPPORTED,
    OPTIONS_NOT_SUPPORTED,
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatRequest,
    OllamaCommon,
    OllamaDetails,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaOptions,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
)
from millrace.serve.openai.answers import TokenLogprob, Usage, encode
from millrace.serve.openai.chat import chat_generation
from millrace.serve.openai.completions import completion_generation
from millrace.serve.openai.routes import answer
from millrace.serve.openai.schemas import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Message,
    SystemMessage,
    UserMessage,
)
from millrace.serve.openai.write_chat import PLACEHOLDER
from millrace.serve.state import FrontState
from millrace.serve.tenancy.gate import header_deadline
from millrace.version import __version__

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""As Ollama documents them."""
LATEST = ":latest"
_NANOSECONDS = 1e9


# ── translation ───────────────────────────────────────────────────────────────────────────────────────────────────────
def check_ollama_model(name: str, state: FrontState) -> None:
    check_model(name if name == state.model_name else name.removesuffix(LATEST), state.model_name)


def _check(body: OllamaCommon, state: FrontState) -> OllamaOptions:
    check_ollama_model(body.model, state)
    refuse_unsupported(body, NOT_SUPPORTED, "")
    if body.keep_alive is not None and str(body.keep_alive).rstrip("hms") in ("0", "0.0"):
        raise BadRequest(
            f"keep_alive is {body.keep_alive!r}, which asks to unload the model; this server keeps it loaded, remove"
            " it.",
            param="keep_alive",
            code="unsupported_parameter",
        )
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest(
            f"top_logprobs is {body.top_logprobs}, which needs 'logprobs' to be true; set it.", param="top_logprobs"
        )
    options = body.options or OllamaOptions()
    refuse_unsupported(options, OPTIONS_NOT_SUPPORTED, "options.")
    return options


def _sampling(body: OllamaCommon, options: OllamaOptions) -> dict[str, Any]:
    """The fields that chat and completion requests share."""
    check_range("num_predict", options.num_predict, -2, 2**31 - 1)
    if options.num_predict == 0:
        raise BadRequest("num_predict is 0; ask for at least 1 token, or -1 for no limit.", param="options.num_predict")
    wanted = {name: getattr(options, name) for name in DEFAULTS}
    return {
        "model": "",
        "stream": body.stream is not False,
        "max_tokens": options.num_predict if options.num_predict is not None and options.num_predict > 0 else None,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        **{name: DEFAULTS[name] if value is None else value for name, value in wanted.items()},
    }


def _check_idle(http: web.Request, body: OllamaCommon) -> None:
    """A request that generates nothing is held to the same rules."""
    header_deadline(http, 0.0)
    request = ChatRequest(messages=[], **_sampling(body, body.options or OllamaOptions()))
    try:
        sampling_params(request, max_tokens=request.max_tokens, logprobs=None, prompt_logprobs=None)
    except BadRequest as error:
        raise name_fields(error, _OPTION_NAMES) from None


_OPTION_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (*DEFAULTS, "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "num_predict")
    },
}


def _chat_messages(messages: list[OllamaMessage]) -> list[Message]:
    found: list[Message] = []
    kinds: dict[str, type[Message]] = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        refuse_unsupported(message, MESSAGE_NOT_SUPPORTED, f"{at}.")
        if message.role == "tool":
            raise BadRequest(
                f"'{at}.role' is 'tool', which is not supported yet; remove the message.",
                param=f"{at}.role",
                code="unsupported_parameter",
            )
        if message.content is None:
            raise BadRequest(f"'{at}.content' is missing; send a text.", param=f"{at}.content")
        found.append(kinds[message.role](content=message.content))
    return found


async def _chat(state: FrontState, body: OllamaCommon, messages: list[Message], received: float) -> Generation:
    fields = {**_sampling(body, body.options or OllamaOptions()), "model": state.model_name}
    request = ChatRequest(
        messages=messages,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        continue_final_message=isinstance(messages[-1], AssistantMessage),
        **fields,
    )
    return await chat_generation(state, request, received)


async def _completion(state: FrontState, body: OllamaGenerateRequest, received: float) -> Generation:
    text = f"{body.system}\n{body.prompt}" if body.system else body.prompt
    fields = {**_sampling(body, body.options or OllamaOptions()), "model": state.model_name}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = CompletionRequest(prompt=Raw(msgspec.json.encode(text)), logprobs=logprobs, **fields)
    generation = await completion_generation(state, request, received)
    if request.max_tokens is None:  # Ollama has no limit where OpenAI's completions have 16.
        generation = dataclasses.replace(generation, params=dataclasses.replace(generation.params, max_tokens=None))
    return generation


async def _generate(state: FrontState, body: OllamaGenerateRequest, received: float) -> Generation:
    if body.raw:
        return await _completion(state, body, received)
    messages: list[Message] = [SystemMessage(content=body.system)] if body.system else []
    try:
        return await _chat(state, body, [*messages, UserMessage(content=body.prompt or "")], received)
    except BadRequest as error:
        if error.code != "no_chat_template":
            raise
        return await _completion(state, body, received)


def _within_num_ctx(state: FrontState, generation: Generation, options: OllamaOptions) -> Generation:
    """`num_ctx` as a limit of this request alone; like every limit it refuses, it does not cut."""
    if options.num_ctx is None:
        return generation
    most = state.require_engine().max_context
    if not 1 <= options.num_ctx <= most:
        raise BadRequest(
            f"num_ctx is {options.num_ctx}; the served model's context is {most}, send at most that.",
            param="options.num_ctx",
        )
    num_prompt, asked = len(generation.prompts[0].token_ids), generation.params.max_tokens
    if num_prompt + (asked or 1) > options.num_ctx:
        raise ContextOverflow(
            f"The prompt has {num_prompt} tokens and num_predict asks for {asked or 1}, but num_ctx is"
            f" {options.num_ctx}. Shorten the prompt, lower num_predict or raise num_ctx.",
            param="options.num_ctx",
        )
    params = dataclasses.replace(generation.params, max_tokens=asked or options.num_ctx - num_prompt)
    return dataclasses.replace(generation, params=params)


# ── routes that generate ──────────────────────────────────────────────────────────────────────────────────────────────
_chat_body = BodyDecoder(OllamaChatRequest)
_generate_body = BodyDecoder(OllamaGenerateRequest)
_show_body = BodyDecoder(OllamaShowRequest)


async def chat(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _chat_body.decode(await read_body(request, state.body_limit_bytes))
    _check(body, state)
    if not body.messages:
        _check_idle(request, body)
        return json_answer(request, _loaded(state, OllamaAnswerMessage("assistant", ""), UNSET))
    messages = _chat_messages(body.messages)
    return await _respond(request, body, lambda: _chat(state, body, messages, received), received, is_chat=True)


async def generate(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _generate_body.decode(await read_body(request, state.body_limit_bytes))
    _check(body, state)
    if not body.prompt:
        _check_idle(request, body)
        return json_answer(request, _loaded(state, UNSET, ""))
    return await _respond(request, body, lambda: _generate(state, body, received), received, is_chat=False)


async def _respond(
    request: web.Request,
    body: OllamaCommon,
    translate: Callable[[], Awaitable[Generation]],
    received: float,
    *,
    is_chat: bool,
) -> web.StreamResponse:
    state = request.app[STATE]
    await state.await_engine()
    names = {**_OPTION_NAMES, "prompt": "messages" if is_chat else "prompt"}
    try:
        generation = _within_num_ctx(state, await translate(), body.options or OllamaOptions())
    except BadRequest as error:
        raise name_fields(error, names) from None
    work = Work(generation, partial(OllamaShape, names=names, is_chat=is_chat))
    return await answer(state, request, work, received, media_type=JSON_LINES)


def _loaded(state: FrontState, message: OllamaAnswerMessage | UnsetType, response: str | UnsetType) -> OllamaAnswer:
    """What Ollama says to a request without a prompt, which asks it to load the model."""
    return OllamaAnswer(state.model_name, _now(), message, response, done=True, done_reason="load")


# ── routes that tell ──────────────────────────────────────────────────────────────────────────────────────────────────
async def tags(request: web.Request) -> web.Response:
    return json_answer(request, OllamaModels([_model(request.app[STATE])]))


async def loaded(request: web.Request) -> web.Response:
    state = request.app[STATE]
    ready = state.client.ready
    if ready is None:
        return json_answer(request, OllamaModels([]))
    on_gpu = ready.device.startswith("cuda")
    model = _model(state)
    model.context_length, model.size_vram = ready.max_context, model.size if on_gpu else 0
    model.expires_at = "9999-12-31T23:59:59Z"
    return json_answer(request, OllamaModels([model]))


async def show(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _show_body.decode(await read_body(request, state.body_limit_bytes))
    name = body.model if body.model is not None else body.name
    if name is None:
        raise BadRequest("'model' is missing; it is required, add it.", param="model", code="missing_field")
    check_ollama_model(name, state)
    model, ready = _model(state), state.client.ready
    info: dict[str, str | int | float | bool | None] = {"general.architecture": model.details.family}
    if ready is not None:
        info[f"{model.details.family}.context_length"] = ready.max_context
        info[f"{model.details.family}.vocab_size"] = ready.vocab_size
    return json_answer(
        request,
        OllamaShowAnswer(
            f"FROM {state.model_name}\n", "", state.template.source, model.details, info, ["completion"], _at(state)
        ),
    )


async def version(request: web.Request) -> web.Response:
    return json_answer(request, OllamaVersion(__version__))


def _model(state: FrontState) -> OllamaModel:
    ready = state.client.ready
    size = ready.memory_plan.get("weights", 0) if ready is not None else 0
    digest = hashlib.sha256((ready.fingerprint if ready is not None else "").encode()).hexdigest()
    family = str(state.model_facts.get("family", "unknown"))
    kind, dtype = str(state.model_facts.get("format", "unknown")), ready.dtype if ready is not None else ""
    details = OllamaDetails("", kind, family, [family], "", dtype)
    return OllamaModel(state.model_name, state.model_name, _at(state), size, digest, details)


def _at(state: FrontState) -> str:
    return datetime.fromtimestamp(state.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class OllamaShape:
    """How /api/chat and /api/generate write their answers: one JSON object a line."""

    def __init__(self, job: Job, names: dict[str, str], is_chat: bool) -> None:
        self.limit_names = names
        self._job = job
        self._is_chat = is_chat

    def _line(self, text: str, **fields: Any) -> OllamaAnswer:
        said: dict[str, Any] = (
            {"message": OllamaAnswerMessage("assistant", text)} if self._is_chat else {"response": text}
        )
        return OllamaAnswer(self._job.state.model_name, _now(), **said, **fields)

    def _logprobs(self, entries: Any) -> list[TokenLogprob] | UnsetType:
        num_top = self._job.generation.logprobs
        if num_top is None:
            return UNSET
        return chat_logprobs(self._job.state.tokenizer, entries, num_top).content

    def _last(self, text: str, usage: Usage, **fields: Any) -> OllamaAnswer:
        choice = self._job.choices[0]
        finish = choice.finish
        total_s = finish.total_s if finish is not None else 0.0
        first_s = finish.first_token_s if finish is not None else 0.0
        queued_s = finish.queued_s if finish is not None else 0.0
        return self._line(
            text,
            done=True,
            done_reason=choice.finish_word,
            total_duration=round(total_s * _NANOSECONDS),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=round(max(0.0, first_s - queued_s) * _NANOSECONDS),
            eval_count=usage.completion_tokens,
            eval_duration=round(max(0.0, total_s - first_s) * _NANOSECONDS),
            **fields,
        )

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        return b""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = encode(self._line(PLACEHOLDER)).partition(encode(PLACEHOLDER))
        return before, after + b"\n"

    def prompt_chunk(self, choice: DetailedChoice) -> bytes:
        return b""

    def chunk(self, choice: DetailedChoice, text: str) -> bytes:
        _, entries = choice.take_pending()
        return escape_lines(encode(self._line(text, logprobs=self._logprobs(entries)))) + b"\n"

    def finish_frame(self, choice: Choice) -> bytes:
        return b""

    def end_frames(self, usage: Usage) -> bytes:
        return encode(self._last("", usage)) + b"\n"

    def error_frames(self, error: MillraceError) -> bytes:
        return ollama_error_body(error) + b"\n"

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        choice = choices[0]
        return encode(self._last(choice.answer_text, usage, logprobs=self._logprobs(choice.logprobs)))
