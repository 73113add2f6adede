"""`context_management`: clears old tool results and old reasoning from a conversation, as the request asks.

The client keeps its conversation as it is; the answer says what the model did not see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from millrace.errors import BadRequest
from millrace.serve.anthropic.schemas import (
    AppliedEdit,
    ClearedThinking,
    ClearedToolUses,
    ClearThinking,
    ClearToolUses,
    CompactEdit,
    ContextManagement,
    ContextTrigger,
)
from millrace.serve.generate.messages import Message

Count = Callable[[list[Message]], Awaitable[int]]
"""Tokens of a prompt with these messages."""
CLEARED = "[This result was removed to save space.]"
DEFAULT_TRIGGER_TOKENS = 100_000
DEFAULT_KEPT_USES = 3
DEFAULT_KEPT_TURNS = 1
"""Anthropic's defaults."""


def check_edits(management: ContextManagement | None) -> None:
    at = "context_management.edits"
    edits = (management.edits if management is not None else None) or []
    for index, edit in enumerate(edits):
        if isinstance(edit, CompactEdit):
            raise BadRequest(
                f"'{at}[{index}]' is of type 'compact_20260112', which is not supported here; send"
                " clear_tool_uses_20250919 or clear_thinking_20251015.",
                param=f"{at}[{index}].type",
                code="unsupported_parameter",
            )
        if isinstance(edit, ClearThinking) and index:
            raise BadRequest(f"'{at}' has clear_thinking_20251015 after another edit; send it first.", param=at)
        if any(type(other) is type(edit) for other in edits[:index]):
            raise BadRequest(f"'{at}' has two edits of the same type; send one of each.", param=at)
        _check_values(edit, f"{at}[{index}]")


def _check_values(edit: ClearThinking | ClearToolUses, at: str) -> None:
    if isinstance(edit, ClearThinking):
        kept = edit.keep
        if kept is None or isinstance(kept, str):
            return
        if (kept.type == "thinking_turns") != (kept.value is not None) or (kept.value is not None and kept.value < 1):
            raise BadRequest(
                f"'{at}.keep' needs a 'value' of at least 1 with the type thinking_turns, and none with the type all.",
                param=f"{at}.keep",
            )
        return
    for name, number in (("trigger", edit.trigger), ("keep", edit.keep), ("clear_at_least", edit.clear_at_least)):
        if number is not None and number.value < 0:
            raise BadRequest(
                f"'{at}.{name}.value' is {number.value}; it must not be negative.", param=f"{at}.{name}.value"
            )


async def edited(
    messages: list[Message], management: ContextManagement, count: Count
) -> tuple[list[Message], list[AppliedEdit]]:
    applied: list[AppliedEdit] = []
    done: AppliedEdit | None
    for edit in management.edits or ():
        if isinstance(edit, ClearThinking):
            messages, done = await _clear_thinking(messages, edit, count)
        elif isinstance(edit, ClearToolUses):
            messages, done = await _clear_tool_uses(messages, edit, count)
        else:
            continue
        applied += [] if done is None else [done]
    return messages, applied


async def _clear_thinking(
    messages: list[Message], edit: ClearThinking, count: Count
) -> tuple[list[Message], ClearedThinking | None]:
    """A turn is what the assistant says between two messages of the user, with the calls that it makes."""
    kept = edit.keep
    if kept == "all" or (kept is not None and not isinstance(kept, str) and kept.type == "all"):
        return messages, None
    turns: list[list[int]] = [[]]
    for index, message in enumerate(messages):
        if message.role == "user":
            turns.append([])
        elif message.reasoning is not None:
            turns[-1].append(index)
    thinking = [turn for turn in turns if turn]
    num_kept = DEFAULT_KEPT_TURNS if kept is None or isinstance(kept, str) else kept.value or DEFAULT_KEPT_TURNS
    old = thinking[:-num_kept]
    if not old:
        return messages, None
    shorter = list(messages)
    for index in (index for turn in old for index in turn):
        shorter[index] = dataclasses.replace(shorter[index], reasoning=None)
    num_tokens = await count(messages) - await count(shorter)
    return shorter, ClearedThinking(max(0, num_tokens), len(old))


async def _clear_tool_uses(
    messages: list[Message], edit: ClearToolUses, count: Count
) -> tuple[list[Message], ClearedToolUses | None]:
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    results = [index for index, message in enumerate(messages) if message.role == "tool"]
    trigger = edit.trigger or ContextTrigger(type="input_tokens", value=DEFAULT_TRIGGER_TOKENS)
    before = await count(messages)
    if (before if trigger.type == "input_tokens" else len(names)) <= trigger.value:
        return messages, None
    num_kept = edit.keep.value if edit.keep is not None else DEFAULT_KEPT_USES
    old = {
        index: messages[index].tool_call_id or ""
        for index in results[: max(0, len(results) - num_kept)]
        if names.get(messages[index].tool_call_id or "") not in (edit.exclude_tools or ())
    }
    if not old:
        return messages, None
    shorter = [
        dataclasses.replace(message, content=CLEARED)
        if index in old
        else _without_inputs(message, edit, set(old.values()))
        for index, message in enumerate(messages)
    ]
    num_tokens = before - await count(shorter)
    if edit.clear_at_least is not None and num_tokens < edit.clear_at_least.value:
        return messages, None
    return shorter, ClearedToolUses(max(0, num_tokens), len(old))


def _without_inputs(message: Message, edit: ClearToolUses, cleared_ids: set[str]) -> Message:
    which = edit.clear_tool_inputs
    if not which or not message.tool_calls:
        return message
    calls = [
        dataclasses.replace(call, arguments={})
        if call.id in cleared_ids and (which is True or call.name in which)
        else call
        for call in message.tool_calls
    ]
    return dataclasses.replace(message, tool_calls=tuple(calls))
