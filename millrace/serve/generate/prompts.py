"""Prompts to token ids. Long texts are tokenised in a thread, so that they do not stall other streams."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from millrace.errors import BadRequest, ContextOverflow
from millrace.params.keeping import Documents
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.messages import Conversation, KnownText, Message
from millrace.serve.state import FrontState
from millrace.text.answer_formats import ChatText
from millrace.text.document_spans import encode_with_documents
from millrace.text.fill_in_middle import fill_in_tokens
from millrace.text.reasoning.formats import is_opened_by
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.prompt import plain_messages, shorten_ids

LONG_TEXT_CHARS = 4096
"""Tokenising this much takes about 1 ms, which is as long as other streams should wait."""

_MESSAGE_CHARS = 64
"""Cost of rendering one message besides its text, in characters."""

_TAIL_CHARS = 256
"""Enough of a prompt's end to find the markers of reasoning there."""

_USES = {
    "embed": "It gives embeddings: POST /v1/embeddings.",
    "sparse": "It gives weights of tokens: POST /v1/sparse-vector, or /v1/rerank and /v1/score for pairs.",
    "multi": "It gives a vector per token: POST /v1/multi-vector, or /v1/rerank and /v1/score for pairs.",
    "classify": "It scores texts: POST /v1/classify, or /v1/rerank and /v1/score for pairs.",
    "tag": "It classifies the tokens of texts: POST /v1/classify.",
}
"""What models that write no text are for, by task."""

_JOINT_TOKENS = 8
"""Tokens before a joint that are decoded with those behind it, to see that it adds no space."""

_T = TypeVar("_T")


async def off_loop(state: FrontState, num_chars: int, work: Callable[[], _T]) -> _T:
    """Run short work here, long work in the text pool."""
    if num_chars <= LONG_TEXT_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)


def check_writes(state: FrontState) -> None:
    """Refuse text from a model that writes none."""
    if state.encoder is not None and not state.encoder.is_decoder:
        raise BadRequest(
            f"The model {state.model_name!r} reads texts and writes none. {_USES[state.encoder.task]}",
            param="model",
            code="unsupported_model",
        )


async def encode_texts(
    state: FrontState, texts: list[str], *, add_special: bool, may_cut: bool = False
) -> list[list[int]]:
    num_chars = sum(map(len, texts))
    if num_chars > LONG_TEXT_CHARS and not may_cut:
        for text in texts:
            await _refuse_too_long(state, text)
    encode = state.tokenizer.encode
    return await off_loop(state, num_chars, lambda: [encode(text, add_special=add_special) for text in texts])


async def fill_in_prompts(state: FrontState, prefixes: list[str], suffix: str) -> list[Prompt]:
    """Prompts of models that fill in the middle, whose answer belongs between prefix and suffix."""
    tokens = fill_in_tokens(state.tokenizer)
    if tokens is None:
        raise BadRequest(
            "'suffix' needs tokens to fill in the middle, which this model does not have; remove it.",
            param="suffix",
            code="unsupported_parameter",
        )
    *befores, after = await encode_texts(state, [*prefixes, suffix], add_special=False)
    start = state.tokenizer.encode("")
    return [Prompt(start + tokens.around(before, after), text) for before, text in zip(befores, prefixes, strict=True)]


async def encode_chat(state: FrontState, conversation: Conversation, *, may_cut: bool = False) -> list[int]:
    """The conversation rendered by the model's chat template. The template writes special tokens itself."""
    return (await _encode_chat(state, conversation, may_cut))[0]


async def _encode_chat(
    state: FrontState, conversation: Conversation, may_cut: bool
) -> tuple[list[int], str, Documents | None]:
    """The token ids, the rendered text, and where its documents are."""
    check_writes(state)
    conversation.check()
    conversation = with_own_system(state, conversation)
    num_chars = (len(conversation.messages) + len(conversation.tools)) * _MESSAGE_CHARS
    for message in conversation.messages:
        for text in message.texts:
            num_chars += len(text)
            if len(text) > LONG_TEXT_CHARS and not may_cut:
                await _refuse_too_long(state, text)

    def work() -> tuple[list[int], str, Documents | None]:
        messages, tools = template_input(state, conversation)
        text = state.template.render(
            messages,
            add_generation_prompt=conversation.opens_answer,
            continue_final_message=conversation.continue_final_message,
            tools=tools,
            **conversation.template_kwargs,
        )
        if conversation.documents:
            token_ids, documents = encode_with_documents(state.tokenizer, text, conversation.documents)
            return token_ids, text, documents
        return _encode_after(state.tokenizer, conversation.known, text), text, None

    return await off_loop(state, num_chars, work)


def with_own_system(state: FrontState, conversation: Conversation) -> Conversation:
    """With the system prompt that a client gave to the model, if the conversation has none."""
    messages = conversation.messages
    if state.made is None or not state.made.system or any(message.role == "system" for message in messages):
        return conversation
    return dataclasses.replace(conversation, messages=[Message("system", state.made.system), *messages])


async def chat_prompt(
    state: FrontState, conversation: Conversation, *, max_tokens: int | None, keep: int | None = None
) -> Prompt:
    """`keep`: cut the prompt to its last tokens, as in `cut_prompt`."""
    token_ids, text, documents = await _encode_chat(state, conversation, keep is not None)
    if documents is not None and (keep is not None or conversation.known is not None):
        raise BadRequest(
            "Parts that are marked as documents cannot be combined with truncate_prompt_tokens or a session; remove"
            " 'cache' from them.",
            param="cache",
        )
    prompt = Prompt(token_ids, None) if keep is None else cut_prompt(state, token_ids, None, keep, max_tokens)
    if documents is not None:
        prompt = dataclasses.replace(prompt, documents=documents)
    if conversation.known is not None:
        prompt = dataclasses.replace(prompt, rendered=text)
    return with_reasoning(state, prompt, text)


def _encode_after(tokenizer: Tokenizer, known: KnownText | None, text: str) -> list[int]:
    """Token ids of a text. Where it begins with a known text, its ids are kept, if those of the rest mean the same
    behind them."""
    if known is None or not known.token_ids or not text.startswith(known.text):
        return tokenizer.encode(text, add_special=False)
    rest = text[len(known.text) :]
    further, last = tokenizer.encode(rest, add_special=False), known.token_ids[-_JOINT_TOKENS:]
    before = tokenizer.decode(last, skip_special=False)
    if tokenizer.decode([*last, *further], skip_special=False) == before + rest:
        return [*known.token_ids, *further]
    return tokenizer.encode(text, add_special=False)


def with_reasoning(state: ChatText, prompt: Prompt, text: str) -> Prompt:
    """Notes whether the end of the prompt's text opens or closes the model's reasoning."""
    reasoning = state.formats.reasoning
    if reasoning is None:
        return prompt
    tail = text[-_TAIL_CHARS:]
    return dataclasses.replace(
        prompt, opens_reasoning=is_opened_by(reasoning, tail), closes_reasoning=tail.rstrip().endswith(reasoning.end)
    )


def template_input(
    state: ChatText, conversation: Conversation
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the model's chat template reads them. A template without tools sees them as text."""
    spec, template = state.formats.tools, state.template
    called = {call.id: call.name for message in conversation.messages for call in message.tool_calls}
    messages = []
    for message in conversation.messages:
        if message.role == "tool" and message.name is None and message.tool_call_id in called:
            message = dataclasses.replace(message, name=called[message.tool_call_id])
        messages.append(message.for_template())
    uses_tools = conversation.tools or any(
        message.role == "tool" or message.tool_calls for message in conversation.messages
    )
    if not uses_tools:
        return messages, None
    if not template.takes_tools:
        return plain_messages(messages, conversation.tools, spec, takes_system=template.takes_system), None
    if spec.short_ids:
        shorten_ids(messages)
    return messages, [function.for_template() for function in conversation.tools] or None


async def without_oldest(
    state: FrontState, conversation: Conversation, *, max_tokens: int | None, max_context: int | None = None
) -> list[Message]:
    """The messages without the oldest, as few as let the rest fit. System messages and the last message stay; if those
    do not fit, the request is refused as usual. The results of a call go with it."""
    ready = state.require_engine()
    room = min(ready.max_context, ready.kv_tokens, max_context or ready.max_context) - (max_tokens or 1)
    messages = conversation.messages
    droppable = [index for index, message in enumerate(messages[:-1]) if message.role != "system"]

    def left(num_dropped: int) -> list[Message]:
        while num_dropped < len(droppable) and messages[droppable[num_dropped]].role == "tool":
            num_dropped += 1
        gone = set(droppable[:num_dropped])
        return [message for index, message in enumerate(messages) if index not in gone]

    async def fits(num_dropped: int) -> bool:
        shorter = dataclasses.replace(conversation, messages=left(num_dropped))
        return len(await encode_chat(state, shorter, may_cut=True)) <= room

    if await fits(0):
        return messages
    low, high = 1, len(droppable)
    while low < high:  # the smallest number whose rest fits, or all
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle + 1, high)
    return left(low)


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


async def _refuse_too_long(state: FrontState, text: str) -> None:
    """Refuse a text that is too long for any tokenisation, without tokenising it."""
    ready = state.require_engine()
    room = min(ready.max_context, ready.kv_tokens)
    if len(text) <= room:
        return
    if state.longest_token_bytes == 0:
        state.longest_token_bytes = await off_loop(state, LONG_TEXT_CHARS + 1, lambda: _longest_token(state))
    least = len(text) // state.longest_token_bytes
    if least > room:
        raise ContextOverflow(
            f"The prompt has at least {least} tokens ({len(text)} characters), but the context holds {room}."
            " Shorten the prompt.",
            param="prompt",
        )


def _longest_token(state: FrontState) -> int:
    tokenizer = state.tokenizer
    return max(1, max((len(tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size)), default=1))
