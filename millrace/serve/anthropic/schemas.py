"""Requests and answers of Anthropic's API. Requests are strict: an unknown field is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.http.error_bodies import ErrorBody
from millrace.serve.http.schema import Refused, Strict, described, unsupported

CacheControl = Annotated[
    Raw | UnsetType, described("Accepted, without effect: equal prompt prefixes are always reused.")
]


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class TextBlock(Strict, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: CacheControl = UNSET
    citations: Annotated[Raw | UnsetType, described("Accepted, without effect: labels of the text.")] = UNSET


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Not supported yet."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Not supported yet."""


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """Not supported yet."""


class ToolUseBlock(Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: Annotated[dict[str, Any], described("The arguments.")]
    cache_control: CacheControl = UNSET
    caller: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class ToolResultBlock(Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call, in a message of the user."""

    tool_use_id: str
    content: Annotated[str | list[TextBlock] | None, described("A text, or text blocks.")] = None
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


class AnthropicMessage(Strict, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Strict, kw_only=True):
    """A tool that the model may call. Tools that Anthropic's servers run are refused."""

    name: str
    input_schema: Annotated[dict[str, Any], described("JSON schema of the arguments.")]
    description: str | None = None
    type: Annotated[Literal["custom"] | None, described("Only `custom`.")] = None
    strict: Annotated[bool | None, described("Hold the arguments to the schema.")] = None
    cache_control: CacheControl = UNSET
    input_examples: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET
    eager_input_streaming: Annotated[bool | None, described("Accepted: arguments are always streamed.")] = None
    defer_loading: Annotated[Literal[False] | None, described("Only false.")] = None
    allowed_callers: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class AnthropicToolChoice(Strict, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, described("The tool to call, with the type `tool`.")] = None
    disable_parallel_tool_use: Annotated[bool | None, described("At most one call.")] = None


class Thinking(Strict, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[
        int | None, described("Most tokens of reasoning; then the answer is begun.", minimum=0)
    ] = None
    display: Annotated[Literal["summarized"] | None, described("Accepted: reasoning is always shown.")] = None


class AnthropicMetadata(Strict, kw_only=True):
    user_id: Annotated[str | None, described("A label; no effect on generation.")] = None


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    schema: Annotated[
        Raw,
        described("The schema. Properties are written in its order, separated by `, ` and `: `.", type="object"),
    ]


class OutputConfig(Strict, kw_only=True):
    format: Annotated[JsonSchemaFormat | None, described("Hold the answer to a JSON schema.")] = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        described("How much a model that reasons should reason."),
    ] = None


class CountTokensRequest(Strict, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: Annotated[
        str | None, described("Name of the served model, as in `/v1/models`; default: the first model.")
    ] = None
    messages: Annotated[
        list[AnthropicMessage],
        described("The conversation; a final assistant message is continued.", minItems=1),
    ]
    system: Annotated[str | list[Block] | None, described("System prompt.")] = None
    cache_control: CacheControl = UNSET
    thinking: Annotated[Thinking | None, described("Whether the model reasons, and for how many tokens.")] = None
    tools: Annotated[list[AnthropicTool] | None, described("Tools that the model may call.")] = None
    tool_choice: Annotated[
        AnthropicToolChoice | None, described("`auto` (default), `any`, `tool` with a name, or `none`.")
    ] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonSchemaFormat | None, described("The older name of `output_config.format`.")] = None
    speed: Annotated[Refused, unsupported('null and "standard" are accepted.')] = UNSET
    user_profile_id: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    workspace_id: Annotated[Refused, unsupported("null is accepted.")] = UNSET


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, described("Maximum number of output tokens.", minimum=1)]
    stop_sequences: Annotated[list[str] | None, described("Stop strings: generation ends before them.")] = None
    stream: Annotated[bool | None, described("Stream typed events as tokens are generated.")] = None
    temperature: Annotated[
        float | None, described("0 is greedy; default: the model's recommendation, else 1.", minimum=0, maximum=1)
    ] = None
    top_p: Annotated[float | None, described("Nucleus sampling.", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, described("Sample from the k likeliest tokens; 0 = all.", minimum=0)] = None
    metadata: Annotated[AnthropicMetadata | None, described("Labels; no effect on generation.")] = None
    service_tier: Annotated[Refused, unsupported('null, "auto" and "standard_only" are accepted.')] = UNSET
    container: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    context_management: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    mcp_servers: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    diagnostics: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    inference_geo: Annotated[Refused, unsupported("null is accepted.")] = UNSET


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "diagnostics": (),
    "inference_geo": (),
}


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class OutputTextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class OutputToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    """The arguments. If the stop reason is `max_tokens`, as many of them as were complete."""


class OutputThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


OutputBlock = OutputTextBlock | OutputToolUseBlock | OutputThinkingBlock


class AnthropicUsage(msgspec.Struct):
    input_tokens: int
    """Prompt tokens that were computed, without those from the prefix cache."""
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(msgspec.Struct):
    """A whole message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageEvent(msgspec.Struct):
    """One event of a streamed message; its other fields depend on `type`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class CountTokensAnswer(msgspec.Struct):
    input_tokens: int


class AnthropicErrorAnswer(msgspec.Struct):
    """Errors of /v1/messages: Anthropic's format, with OpenAI's fields added."""

    type: Literal["error"]
    error: ErrorBody
