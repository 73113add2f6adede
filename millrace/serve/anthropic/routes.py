"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from millrace.serve.anthropic.translate import count_input_tokens, prepare_message
from millrace.serve.anthropic.write import ping, stream_error
from millrace.serve.generate.heartbeat import StreamForm
from millrace.serve.generate.respond import respond
from millrace.serve.http.body import read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.state import STATE

STREAM = StreamForm(stream_error, ping, ping_follows_preamble=True)
PATHS = "/v1/messages"
"""Prefix of the paths whose errors have Anthropic's shape."""


async def messages(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_message, STREAM)


async def count_tokens(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_answer(request, await count_input_tokens(state, await read_body(request, state.body_limit_bytes)))
