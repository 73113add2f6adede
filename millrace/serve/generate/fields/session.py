"""Turns of sessions: how a request names its session, and what a generation knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from msgspec import Raw

from millrace.errors import BadRequest
from millrace.link.messages import Finish, TokenLogprobs
from millrace.serve.generate.messages import Message
from millrace.serve.generate.resuming.marks import TokenSink

SESSION_HEADER = "X-Millrace-Session"
"""Names a session where a client cannot add the field `session_id`. Not X-Session-Id: agents send ids of their own."""
TURN_HEADER = "X-Session-Turn"
"""Of an answer: where the tokens of its prompt came from."""


def with_session(request: web.Request, data: bytes) -> bytes:
    """The body with the session that the header names."""
    name = request.headers.get(SESSION_HEADER)
    if name is None:
        return data
    try:
        body = msgspec.json.decode(data, type=dict[str, Raw])
    except msgspec.DecodeError:
        return data  # The dialect refuses it.
    encoded = msgspec.json.encode(name)
    if body.get("session_id", Raw(encoded)) not in (Raw(encoded), Raw(b"null")):
        raise BadRequest(f"The header {SESSION_HEADER} and 'session_id' differ; send one of them.", param="session_id")
    return msgspec.json.encode({**body, "session_id": Raw(encoded)})


@dataclass(slots=True)
class Turn:
    session_id: str
    owner: str
    number: int
    """Turns that the session had before this one."""
    messages: list[Message]
    """Of the whole conversation, the new ones included."""
    num_known: int = 0
    """Tokens that earlier turns have computed."""
    continues_answer: bool = False
    """The answer goes on with the last message."""
    output_ids: list[int] = field(default_factory=list)
    """Of the answer, so far."""


class TurnSink:
    """Notes the tokens of a turn's answer on their way to its choice."""

    def __init__(self, turn: Turn, choice: TokenSink) -> None:
        self._ids = turn.output_ids
        self._choice = choice

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._ids.append(token_id)
        self._choice.on_token(token_id, logprobs)

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self._choice.on_prompt_logprobs(logprobs)

    def on_finish(self, finish: Finish) -> None:
        self._choice.on_finish(finish)
