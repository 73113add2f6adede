"""Requests and answers of Anthropic's API. Requests are strict: an unknown field is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.anthropic.schemas_blocks import Block, CacheControl
from millrace.serve.http.error_bodies import ErrorBody
from millrace.serve.http.schema import Refused, Strict, described, unsupported


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class AnthropicMessage(Strict, kw_only=True):
    role: Literal["user", "assistant", "system"]
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
    defer_loading: Annotated[
        bool | None, described("The model sees the tool once a `tool_reference` in the conversation names it.")
    ] = None
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
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        described("`omitted`: thinking blocks are empty; otherwise they hold the whole reasoning."),
    ] = None


class AnthropicMetadata(Strict, kw_only=True):
    user_id: Annotated[str | None, described("A label; no effect on generation.")] = None


class JsonSchemaFormat(Strict, kw_only=True):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    schema: Annotated[
        Raw,
        described("The schema. Properties are written in its order, separated by `, ` and `: `.", type="object"),
    ]


class OutputConfig(Strict, kw_only=True):
    format: Annotated[JsonSchemaFormat | None, described("Hold the answer to a JSON schema.")] = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        described(
            "How much a model that reasons should reason; any model takes it. `X-Millrace-Warning` says what it did."
        ),
    ] = None


class NumTokens(Strict, kw_only=True):
    type: Literal["input_tokens"]
    value: Annotated[int, described("Tokens of the prompt.", minimum=0)]


class NumToolUses(Strict, kw_only=True):
    type: Literal["tool_uses"]
    value: Annotated[int, described("Calls of tools.", minimum=0)]


class ContextTrigger(Strict, kw_only=True):
    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, described("The edit is applied to prompts with more than this.", minimum=0)]


class KeptThinking(Strict, kw_only=True):
    type: Literal["thinking_turns", "all"]
    value: Annotated[int | None, described("Turns, with the type `thinking_turns`.", minimum=1)] = None


class ClearToolUses(Strict, kw_only=True, tag_field="type", tag="clear_tool_uses_20250919"):
    """Replace the oldest tool results by a short text."""

    trigger: Annotated[ContextTrigger | None, described("When; default: above 100,000 input tokens.")] = None
    keep: Annotated[NumToolUses | None, described("The latest results, which stay; default 3.")] = None
    clear_at_least: Annotated[
        NumTokens | None, described("Leave everything as it is unless this many tokens are saved.")
    ] = None
    exclude_tools: Annotated[list[str] | None, described("Tools whose results stay.")] = None
    clear_tool_inputs: Annotated[
        bool | list[str] | None, described("Clear the arguments of these calls too: of all tools, or of the named.")
    ] = None


class ClearThinking(Strict, kw_only=True, tag_field="type", tag="clear_thinking_20251015"):
    """Leave out the reasoning of earlier turns. Many chat templates do so anyway."""

    keep: Annotated[
        KeptThinking | Literal["all"] | None, described("The latest turns with reasoning, which stay; default 1.")
    ] = None


class CompactEdit(msgspec.Struct, tag_field="type", tag="compact_20260112"):
    """Not supported: the server does not summarise conversations."""


class ContextManagement(Strict, kw_only=True):
    edits: Annotated[
        list[ClearToolUses | ClearThinking | CompactEdit] | None, described("Edits, in order; each at most once.")
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
    context_management: Annotated[
        ContextManagement | None,
        described("Clear old tool results or old reasoning from the prompt; the answer says what was cleared."),
    ] = None
    speed: Annotated[Refused, unsupported('null and "standard" are accepted.')] = UNSET
    mcp_servers: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    compaction: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    user_profile_id: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    workspace_id: Annotated[Refused, unsupported("null is accepted.")] = UNSET


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, described("Maximum number of output tokens.", minimum=1)]
    stop_sequences: Annotated[list[str] | None, described("Stop strings: generation ends before them.")] = None
    session_id: Annotated[
        str | None, described("Continue this session: the messages are the new ones; its own come before them.")
    ] = None
    stream: Annotated[bool | None, described("Stream typed events as tokens are generated.")] = None
    temperature: Annotated[
        float | None, described("0 is greedy; default: the model's recommendation, else 1.", minimum=0, maximum=1)
    ] = None
    top_p: Annotated[float | None, described("Nucleus sampling.", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, described("Sample from the k likeliest tokens; 0 = all.", minimum=0)] = None
    metadata: Annotated[AnthropicMetadata | None, described("Labels; no effect on generation.")] = None
    service_tier: Annotated[Refused, unsupported('null, "auto" and "standard_only" are accepted.')] = UNSET
    container: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    diagnostics: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    inference_geo: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    thread: Annotated[Refused, unsupported("null is accepted; `anthropic` then sends the whole conversation.")] = UNSET
    fallbacks: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    fallback_credit_token: Annotated[Refused, unsupported("null is accepted.")] = UNSET


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
    "diagnostics": (),
    "inference_geo": (),
    "thread": (),
    "compaction": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
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
    """Prompt tokens that were computed, without those that `cache_control` keeps cached."""
    cache_read_input_tokens: int
    """Prompt tokens found in the prefix cache."""
    cache_creation_input_tokens: int
    """Prompt tokens that were computed and stay cached as `cache_control` asks."""
    output_tokens: int
    document_input_tokens: int | UnsetType = UNSET
    """Where document blocks have `cache`: input tokens that were not computed but reused from another place."""


class ClearedToolUses(msgspec.Struct, tag_field="type", tag="clear_tool_uses_20250919"):
    cleared_input_tokens: int
    cleared_tool_uses: int


class ClearedThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015"):
    cleared_input_tokens: int
    cleared_thinking_turns: int


AppliedEdit = ClearedToolUses | ClearedThinking


class ContextManagementAnswer(msgspec.Struct):
    applied_edits: list[AppliedEdit]


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
    context_management: ContextManagementAnswer | UnsetType = UNSET
    """If the request has it: the edits that changed the prompt."""


class MessageEvent(msgspec.Struct):
    """One event of a streamed message; its other fields depend on `type`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class CountTokensContext(msgspec.Struct):
    original_input_tokens: int
    """Before the edits."""


class CountTokensAnswer(msgspec.Struct):
    input_tokens: int
    context_management: CountTokensContext | UnsetType = UNSET


class ErrorDetails(msgspec.Struct):
    """By which `anthropic` knows that it must send the whole conversation."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class AnthropicErrorBody(ErrorBody):
    details: ErrorDetails | UnsetType = UNSET
    """If the request asks for a `thread`."""


class AnthropicErrorAnswer(msgspec.Struct):
    """Errors of /v1/messages: Anthropic's format, with OpenAI's fields added."""

    type: Literal["error"]
    error: AnthropicErrorBody
