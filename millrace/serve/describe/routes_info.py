"""Routes for health, metrics, documentation and the tokenizer."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.observe.merge import merge
from millrace.observe.metrics import CONTENT_TYPE
from millrace.serve.describe.openapi.document import openapi_document
from millrace.serve.generate.prompts import encode_chat, encode_texts
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.error_bodies import RETRY_AFTER_S
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.http.siblings import is_for_sibling
from millrace.serve.openai.answers import DetokenizeAnswer, Health, TokenizeAnswer, TokenizerInfo
from millrace.serve.openai.schemas import DetokenizeRequest, TokenizeRequest
from millrace.serve.openai.translate_messages import conversation_of
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import is_operator

_tokenize = BodyDecoder(TokenizeRequest)
_detokenize = BodyDecoder(DetokenizeRequest)


# ── health ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def health(request: web.Request) -> web.Response:
    """Liveness: the event loop runs."""
    return json_answer(request, Health("ok"))


async def ready(request: web.Request) -> web.Response:
    """Readiness: the models that are loaded at start have been, at least one model can answer, and the server is not
    draining."""
    state = request.app[STATE]
    reason = state.not_ready_because()
    several = len(state.models) > 1
    models: dict[str, str] | UnsetType = {model.name: model.status for model in state.models} if several else UNSET
    if reason is None:
        return json_answer(request, Health("ready", models=models))
    return json_answer(request, Health("not ready", reason, models), status=503, **{"Retry-After": str(RETRY_AFTER_S)})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.metrics.open_requests.set(len(state.jobs))
    state.metrics.open_streams.set(sum(job.is_streamed for job in state.jobs))
    names = request.query.get("names", "millrace")
    if names not in ("millrace", "vllm"):
        raise BadRequest(f"names is {names[:80]!r}; it must be one of millrace, vllm.", param="names")
    is_part = is_for_sibling(request)
    if is_part:
        body = state.metrics.own_part()
    else:
        body = await _all_metrics(state, vllm_names=names == "vllm", with_tenants=is_operator(request))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE, "Server": "millrace"})


async def _all_metrics(state: FrontState, *, vllm_names: bool, with_tenants: bool) -> bytes:
    """The counters of every front merged, and the engine's once."""
    metrics, siblings = state.metrics, state.siblings
    pages = {siblings.front_index: metrics.own_part(), **await siblings.get("/metrics")}
    metrics.fronts_up.set(len(pages))
    own = merge(pages) if siblings.num_fronts > 1 else pages[siblings.front_index]
    return own + metrics.engine_part(vllm_names=vllm_names, with_tenants=with_tenants)


# ── documentation ─────────────────────────────────────────────────────────────────────────────────────────────────────
async def openapi(request: web.Request) -> web.Response:
    return json_answer(request, await asyncio.to_thread(openapi_document))


# ── the tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────
async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _tokenize.decode(await read_body(request, state.body_limit_bytes))
    if body.model is not None:
        state = await state.for_model(body.model)
        await state.await_engine(body.model)
    limits = state.require_engine()
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        tokens = await _tokenize_chat(state, body)
    elif body.chat_template_kwargs:
        raise BadRequest(
            "'chat_template_kwargs' goes with 'messages'; a prompt has no template. Remove it.",
            param="chat_template_kwargs",
        )
    else:
        add_special = body.add_special_tokens is not False
        [tokens] = await encode_texts(state, [body.prompt or ""], add_special=add_special)
    return json_answer(request, TokenizeAnswer(len(tokens), limits.max_context, tokens))


async def _tokenize_chat(state: FrontState, body: TokenizeRequest) -> list[int]:
    if body.add_special_tokens:
        raise BadRequest(
            "'add_special_tokens' is true, but a chat template adds its own; remove it.", param="add_special_tokens"
        )
    conversation = conversation_of(
        body.messages or [], body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
    )
    return await encode_chat(state, conversation)


async def tokenizer_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_query(request, ("model",))
    state = await state.for_model(request.query.get("model") or state.model_name)
    tokenizer, ready = state.tokenizer, state.client.limits
    named = tokenizer.special_tokens
    return json_answer(
        request,
        TokenizerInfo(
            tokenizer_class="Tokenizer",
            vocab_size=tokenizer.vocab_size,
            model_max_length=ready.max_context if ready is not None else None,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            end_tokens={tokenizer.token_text(token_id): token_id for token_id in tokenizer.end_token_ids},
            special_tokens=named,
            chat_template=state.template.source or None,
        ),
    )


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _detokenize.decode(await read_body(request, state.body_limit_bytes))
    if body.model is not None:
        state = await state.for_model(body.model)
    size = state.tokenizer.vocab_size
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id < size:
            raise BadRequest(
                f"'tokens' contains {token_id!s:.40}; the vocabulary has ids 0 to {size - 1}.", param="tokens"
            )
    text = state.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens))
    return json_answer(request, DetokenizeAnswer(text))
