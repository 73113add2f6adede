"""Blocks of Anthropic's messages, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.generate.fields.documents import DocumentCache
from millrace.serve.http.schema import Strict, described

CacheControl = Annotated[
    Raw | UnsetType,
    described("Keep the prompt up to here cached for 5 minutes, or 1 hour (`ttl`), as far as the quota allows."),
]


class TextBlock(Strict, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: CacheControl = UNSET
    citations: Annotated[Raw | UnsetType, described("Accepted, without effect: labels of the text.")] = UNSET


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Not supported yet."""


class PlainSource(Strict, kw_only=True, tag_field="type", tag="text"):
    data: Annotated[str, described("The document's text.")]
    media_type: Literal["text/plain"]


class ContentSource(Strict, kw_only=True, tag_field="type", tag="content"):
    content: Annotated[str | list[TextBlock | ImageBlock], described("A text, or text blocks.")]


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """Not supported: files are not read."""


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """Not supported: nothing is fetched."""


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    """Not supported: files are not read."""


class Citations(Strict, kw_only=True):
    enabled: Annotated[Literal[False] | None, described("Only false: answers have no citations.")] = None


class DocumentBlock(Strict, kw_only=True, tag_field="type", tag="document"):
    """A document that is text; the model sees its title, its context and its text."""

    source: PlainSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: Annotated[str | None, described("What is to be known about the document.")] = None
    citations: Citations | None = None
    cache: Annotated[
        DocumentCache | None, described("Reuse the document wherever it stood before; the answer is then approximate.")
    ] = None
    cache_control: CacheControl = UNSET


class ResultText(Strict, kw_only=True):
    """A piece of the text of a search result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = UNSET
    citations: Annotated[Raw | UnsetType, described("Accepted, without effect: labels of the text.")] = UNSET


class SearchResultBlock(Strict, kw_only=True, tag_field="type", tag="search_result"):
    """A search result; the model sees its title, its source and its text."""

    source: Annotated[str, described("Where it is from, such as a URL.")]
    title: str
    content: list[ResultText]
    citations: Citations | None = None
    cache_control: CacheControl = UNSET


class ToolUseBlock(Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: Annotated[dict[str, Any], described("The arguments.")]
    cache_control: CacheControl = UNSET
    caller: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class ToolReferenceBlock(Strict, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool with `defer_loading` that the model may call from here on."""

    tool_name: str
    cache_control: CacheControl = UNSET


class ToolResultBlock(Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call, in a message of the user."""

    tool_use_id: str
    content: Annotated[
        str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] | None,
        described("A text, or blocks of text and references to tools."),
    ] = None
    is_error: Annotated[bool | None, described("The call failed; the model is told so.")] = None
    cache_control: CacheControl = UNSET


class ThinkingBlock(Strict, kw_only=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer; the chat template decides whether the model sees it."""

    thinking: str
    signature: Annotated[str, described("Accepted, without effect.")] = ""


class RedactedThinkingBlock(Strict, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Accepted and left out: only the server that made it could read it."""

    data: str


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)
