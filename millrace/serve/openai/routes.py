"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.generate.heartbeat import StreamForm
from millrace.serve.generate.respond import respond
from millrace.serve.http.error_bodies import error_body
from millrace.serve.http.event_stream import DONE
from millrace.serve.openai.translate_chat import prepare_chat
from millrace.serve.openai.translate_completions import prepare_completion


def stream_error(error: MillraceError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n" + DONE


STREAM = StreamForm(stream_error)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_chat, STREAM)


async def completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_completion, STREAM)
