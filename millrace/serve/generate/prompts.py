"""Text to token ids: at once when it is short, in a thread when it is long, so that no prompt stalls other streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from millrace.errors import BadRequest, ContextOverflow
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.sampling import refuse_unsupported
from millrace.serve.openai.schemas import (
    MAX_MESSAGES,
    NOT_SUPPORTED_IN_MESSAGES,
    AssistantMessage,
    ContentPart,
    DeveloperMessage,
    FunctionMessage,
    Message,
    SystemMessage,
    TextPart,
    ToolMessage,
)
from millrace.serve.state import FrontState

LONG_TEXT_CHARS = 4096
"""Tokenising this much takes about a millisecond: the longest that other streams should wait."""

_MESSAGE_CHARS = 64
"""What rendering a message costs beside its text, in characters' worth."""

RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "documents")
_T = TypeVar("_T")


async def off_loop(state: FrontState, num_chars: int, work: Callable[[], _T]) -> _T:
    """Run `work` here when it is short, in the text pool when it is long."""
    if num_chars <= LONG_TEXT_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)


async def encode_texts(
    state: FrontState, texts: list[str], *, add_special: bool, max_tokens: int | None, may_cut: bool = False
) -> list[list[int]]:
    num_chars = sum(map(len, texts))
    if num_chars > LONG_TEXT_CHARS and not may_cut:
        for text in texts:
            await _refuse_hopeless(state, text, max_tokens)
    encode = state.tokenizer.encode
    return await off_loop(state, num_chars, lambda: [encode(text, add_special=add_special) for text in texts])


async def encode_chat(
    state: FrontState,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
    max_tokens: int | None,
    may_cut: bool = False,
) -> list[int]:
    """The conversation as the model's chat template writes it. The template itself begins the text as the model
    wants it, so no special tokens are added."""
    num_chars = len(messages) * _MESSAGE_CHARS
    for text in _texts_in(messages):
        num_chars += len(text)
        if len(text) > LONG_TEXT_CHARS and not may_cut:
            await _refuse_hopeless(state, text, max_tokens)

    def work() -> list[int]:
        text = state.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        return state.tokenizer.encode(text, add_special=False)

    return await off_loop(state, num_chars, work)


def cut_prompt(state: FrontState, token_ids: list[int], text: str | None, keep: int, max_tokens: int | None) -> Prompt:
    """The prompt's last `keep` tokens; for -1, as many as leave room for the output."""
    if keep == -1:
        ready = state.require_engine()
        keep = max(1, min(ready.max_context, ready.kv_tokens) - max(1, max_tokens or 1))
    dropped = max(0, len(token_ids) - keep)
    return Prompt(token_ids[dropped:], None if dropped else text, dropped)


def _texts_in(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)


async def _refuse_hopeless(state: FrontState, text: str, max_tokens: int | None) -> None:
    """Refuse a text that cannot fit whatever its tokens are, without spending seconds on tokenising it."""
    ready = state.require_engine()
    room = min(ready.max_context, ready.kv_tokens)
    if len(text) <= room:
        return
    if state.longest_token_bytes == 0:
        state.longest_token_bytes = await off_loop(state, LONG_TEXT_CHARS + 1, lambda: _longest_token(state))
    least = len(text) // state.longest_token_bytes
    if least > room:
        asked = f" and max_tokens asks for {max_tokens}" if max_tokens is not None else ""
        raise ContextOverflow(
            f"The prompt has at least {least} tokens ({len(text)} characters){asked}, but the context holds {room}."
            " Shorten the prompt.",
            param="prompt",
        )


def _longest_token(state: FrontState) -> int:
    tokenizer = state.tokenizer
    return max(1, max((len(tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size)), default=1))


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: plain dicts, whose content is a text or text parts."""
    if not messages:
        raise BadRequest("'messages' is empty; send at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(
            f"'messages' holds {len(messages)} messages; at most {MAX_MESSAGES} are allowed.", param="messages"
        )
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, at: str) -> dict[str, Any]:
    role = str(message.__struct_config__.tag)
    if isinstance(message, (ToolMessage, FunctionMessage)):
        raise BadRequest(
            f"'{at}.role' is '{role}', which is not supported yet; remove the message.",
            param=f"{at}.role",
            code="unsupported_parameter",
        )
    if isinstance(message, AssistantMessage):
        refuse_unsupported(message, NOT_SUPPORTED_IN_MESSAGES, f"{at}.")
    if message.content is None:
        raise BadRequest(f"'{at}.content' is null; send a text.", param=f"{at}.content")
    shown = "system" if isinstance(message, (DeveloperMessage, SystemMessage)) else role
    plain: dict[str, Any] = {"role": shown, "content": message.content}
    if not isinstance(message.content, str):
        plain["content"] = [_text_part(part, f"{at}.content[{i}]") for i, part in enumerate(message.content)]
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text_part(part: ContentPart, at: str) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    kind = part.__struct_config__.tag
    raise BadRequest(
        f"'{at}' is of type '{kind}', which is not supported yet; this server takes text only.",
        param=f"{at}.type",
        code="unsupported_parameter",
    )


def generation_prompt(add: bool | None, continue_final: bool | None) -> tuple[bool, bool]:
    """The two template switches, which exclude each other; the default follows from the one that was sent."""
    if continue_final and add:
        raise BadRequest(
            "'add_generation_prompt' and 'continue_final_message' are both true, but an answer either begins or"
            " continues; set one of them to false.",
            param="continue_final_message",
        )
    return (not continue_final if add is None else add), bool(continue_final)


def template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    for name in kwargs or {}:
        if name in RESERVED or not name.isidentifier():
            raise BadRequest(
                f"chat_template_kwargs sets {name[:80]!r}, which is reserved or not a name; remove it.",
                param="chat_template_kwargs",
            )
    return kwargs or {}
