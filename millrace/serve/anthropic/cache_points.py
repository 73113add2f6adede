"""`cache_control`: the prompt up to the last block that has it stays cached for five minutes or an hour."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Raw, UnsetType

from millrace.errors import BadRequest
from millrace.params.keeping import Retain
from millrace.serve.anthropic.schemas import CountTokensRequest
from millrace.serve.anthropic.translate_messages import messages_of
from millrace.serve.generate.messages import Conversation, Message
from millrace.serve.generate.prompts import encode_chat
from millrace.serve.state import FrontState

_SECONDS = {"5m": 300.0, "1h": 3600.0}
_OTHER_TEXT = "\u2042"


class _CacheControl(msgspec.Struct):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    ttl_s: float
    message: int | None
    """Index of the message whose end it marks; None: before the first message."""


async def retention_of(
    state: FrontState,
    body: CountTokensRequest,
    conversation: Conversation,
    rendered: Callable[[Conversation], Conversation],
    token_ids: list[int],
) -> Retain | None:
    """`rendered`: the conversation with everything that the chat template reads. `token_ids`: of the whole prompt."""
    point = _last_point(body)
    if point is None:
        return None
    if point.message is not None and point.message == len(body.messages) - 1:
        return Retain(point.ttl_s, num_tokens=len(token_ids))
    kept = [message for message in conversation.messages if message.role == "system"] if body.system else []
    if point.message is not None:
        kept = conversation.messages[: len(kept) + _num_messages(body, point.message)]
    # What comes next differs from the first character on, so the common tokens end where the marked block does.
    other = dataclasses.replace(conversation, messages=[*kept, Message("user", _OTHER_TEXT)])
    other = dataclasses.replace(other, continue_final_message=False)
    try:
        shown = await encode_chat(state, rendered(other), may_cut=True)
    except BadRequest:  # The template takes no such conversation.
        return Retain(point.ttl_s, num_tokens=len(token_ids))
    common = next((at for at, pair in enumerate(zip(shown, token_ids, strict=False)) if pair[0] != pair[1]), None)
    return Retain(point.ttl_s, num_tokens=min(len(shown), len(token_ids)) if common is None else max(1, common))


def _num_messages(body: CountTokensRequest, last: int) -> int:
    """Internal messages of the body's, up to the index `last`."""
    return sum(len(messages_of(message, "messages")) for message in body.messages[: last + 1])


def _last_point(body: CountTokensRequest) -> _Point | None:
    if not isinstance(body.cache_control, UnsetType):
        return _point(body.cache_control, "cache_control", len(body.messages) - 1)
    for index in reversed(range(len(body.messages))):
        content = body.messages[index].content
        for block in () if isinstance(content, str) else reversed(content):
            found = _point(getattr(block, "cache_control", msgspec.UNSET), f"messages[{index}].content", index)
            if found is not None:
                return found
    marked = [*(body.tools or ()), *(body.system if isinstance(body.system, list) else ())]
    for part in reversed(marked):
        found = _point(getattr(part, "cache_control", msgspec.UNSET), "system", None)
        if found is not None:
            return found
    return None


def _point(control: Raw | UnsetType, param: str, message: int | None) -> _Point | None:
    if isinstance(control, UnsetType) or bytes(control) == b"null":
        return None
    try:
        asked = msgspec.json.decode(control, type=_CacheControl)
    except msgspec.ValidationError as error:
        raise BadRequest(f"'cache_control' in {param} is invalid: {error}.", param="cache_control") from None
    return _Point(_SECONDS[asked.ttl], message)
