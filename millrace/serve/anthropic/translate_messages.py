"""Anthropic's messages, whose content is blocks, as internal messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.errors import BadRequest
from millrace.serve.anthropic.schemas import AnthropicMessage
from millrace.serve.anthropic.schemas_blocks import (
    Block,
    ContentSource,
    DocumentBlock,
    PlainSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from millrace.serve.generate.messages import Message, PastCall
from millrace.text.document_spans import MarkedText

_ERROR = "Error: "


def messages_of(message: AnthropicMessage, at: str) -> list[Message]:
    """One message, or several: each tool result becomes a message of its own, before the rest of its message."""
    content = message.content
    if isinstance(content, str):
        return [Message(message.role, content)]
    if not content:
        raise BadRequest(f"'{at}' is an empty list; send a text.", param=at)
    if message.role == "system":
        return [Message("system", text_content(content, at), documents=_documents(content, at))]
    return _answer(content, at) if message.role == "assistant" else _request(content, at)


def referenced_tools(messages: Sequence[AnthropicMessage]) -> set[str]:
    """Names in the `tool_reference` blocks of tool results."""
    blocks = [block for message in messages if not isinstance(message.content, str) for block in message.content]
    results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    parts = [part for content in results if content and not isinstance(content, str) for part in content]
    return {part.tool_name for part in parts if isinstance(part, ToolReferenceBlock)}


def _request(blocks: list[Block], at: str) -> list[Message]:
    results, texts = [], []
    for index, block in enumerate(blocks):
        place = f"{at}[{index}]"
        if isinstance(block, ToolResultBlock):
            text = "" if not block.content else text_content(block.content, f"{place}.content")
            if block.is_error:
                text = _ERROR + (text if isinstance(text, str) else "\n".join(text))
            inner = block.content if isinstance(block.content, list) else []
            marked = _documents(inner, f"{place}.content")
            results.append(Message("tool", text, tool_call_id=block.tool_use_id, documents=marked))
        else:
            texts.append(_text(block, place))
    return [*results, *([Message("user", texts, documents=_documents(blocks, at))] if texts else [])]


def _documents(blocks: Sequence[Block | ToolReferenceBlock], at: str) -> tuple[MarkedText, ...]:
    """The texts of the blocks that may be reused wherever they stand."""
    return tuple(
        block.cache.marked(_text(block, f"{at}[{index}]"))
        for index, block in enumerate(blocks)
        if isinstance(block, DocumentBlock) and block.cache is not None
    )


def _answer(blocks: list[Block], at: str) -> list[Message]:
    texts, calls, reasoning = [], [], []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            calls.append(PastCall(block.id, block.name, block.input))
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif not isinstance(block, RedactedThinkingBlock):
            texts.append(_text(block, f"{at}[{index}]"))
    thought = "\n".join(reasoning) or None
    return [
        Message("assistant", texts or "", tool_calls=tuple(calls), reasoning=thought, documents=_documents(blocks, at))
    ]


def text_content(content: str | Sequence[Block | ToolReferenceBlock], at: str) -> str | list[str]:
    if isinstance(content, str):
        return content
    if not content:
        raise BadRequest(f"'{at}' is an empty list; send a text.", param=at)
    return [_text(block, f"{at}[{index}]") for index, block in enumerate(content)]


def _text(block: Block | ToolReferenceBlock, at: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([f"{block.title} ({block.source})", *(part.text for part in block.content)])
    if isinstance(block, DocumentBlock):
        return _document(block, f"{at}.source")
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} can be called now."
    raise _not_text(block, at)


def _document(block: DocumentBlock, at: str) -> str:
    source = block.source
    if isinstance(source, PlainSource):
        texts = [source.data]
    elif isinstance(source, ContentSource):
        content = text_content(source.content, f"{at}.content")
        texts = [content] if isinstance(content, str) else content
    else:
        raise _not_text(source, at)
    return "\n".join([*(text for text in (block.title, block.context) if text), *texts])


def _not_text(found: msgspec.Struct, at: str) -> BadRequest:
    return BadRequest(
        f"'{at}' is of type '{found.__struct_config__.tag}', which is not supported here; send text.",
        param=f"{at}.type",
        code="unsupported_parameter",
    )
