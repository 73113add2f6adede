"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from aiohttp import web

from millrace.serve.generate.respond import respond
from millrace.serve.openai.translate_chat import prepare_chat
from millrace.serve.openai.translate_completions import prepare_completion


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_completion)
