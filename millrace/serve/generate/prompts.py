"""Prompts to token ids. Long texts are tokenised in a thread, so that they do not stall other streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from millrace.errors import BadRequest, ContextOverflow
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.messages import Conversation
from millrace.serve.state import FrontState

LONG_TEXT_CHARS = 4096
"""Tokenising this much takes about 1 ms, which is as long as other streams should wait."""

_MESSAGE_CHARS = 64
"""Cost of rendering one message besides its text, in characters."""

_T = TypeVar("_T")


async def off_loop(state: FrontState, num_chars: int, work: Callable[[], _T]) -> _T:
    """Run short work here, long work in the text pool."""
    if num_chars <= LONG_TEXT_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)


async def encode_texts(
    state: FrontState, texts: list[str], *, add_special: bool, max_tokens: int | None, may_cut: bool = False
) -> list[list[int]]:
    num_chars = sum(map(len, texts))
    if num_chars > LONG_TEXT_CHARS and not may_cut:
        for text in texts:
            await _refuse_too_long(state, text, max_tokens)
    encode = state.tokenizer.encode
    return await off_loop(state, num_chars, lambda: [encode(text, add_special=add_special) for text in texts])


async def encode_chat(
    state: FrontState, conversation: Conversation, *, max_tokens: int | None, may_cut: bool = False
) -> list[int]:
    """The conversation rendered by the model's chat template. The template writes special tokens itself."""
    conversation.check()
    num_chars = len(conversation.messages) * _MESSAGE_CHARS
    for message in conversation.messages:
        for text in message.texts:
            num_chars += len(text)
            if len(text) > LONG_TEXT_CHARS and not may_cut:
                await _refuse_too_long(state, text, max_tokens)

    def work() -> list[int]:
        text = state.template.render(
            [message.for_template() for message in conversation.messages],
            add_generation_prompt=conversation.opens_answer,
            continue_final_message=conversation.continue_final_message,
            **conversation.template_kwargs,
        )
        return state.tokenizer.encode(text, add_special=False)

    return await off_loop(state, num_chars, work)


async def chat_prompt(
    state: FrontState, conversation: Conversation, *, max_tokens: int | None, keep: int | None = None
) -> Prompt:
    """`keep`: cut the prompt to its last tokens, as in `cut_prompt`."""
    token_ids = await encode_chat(state, conversation, max_tokens=max_tokens, may_cut=keep is not None)
    return Prompt(token_ids, None) if keep is None else cut_prompt(state, token_ids, None, keep, max_tokens)


def check_truncation(keep: int | None) -> None:
    if keep is not None and (keep < -1 or keep == 0):
        raise BadRequest(
            f"truncate_prompt_tokens is {keep}; send how many tokens to keep, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )


def cut_prompt(state: FrontState, token_ids: list[int], text: str | None, keep: int, max_tokens: int | None) -> Prompt:
    """The last `keep` tokens of the prompt; -1 keeps as many as leave room for the output."""
    if keep == -1:
        ready = state.require_engine()
        keep = max(1, min(ready.max_context, ready.kv_tokens) - max(1, max_tokens or 1))
    dropped = max(0, len(token_ids) - keep)
    return Prompt(token_ids[dropped:], None if dropped else text, dropped)


async def _refuse_too_long(state: FrontState, text: str, max_tokens: int | None) -> None:
    """Refuse a text that is too long for any tokenisation, without tokenising it."""
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
