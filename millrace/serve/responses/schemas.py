"""Requests and answers of /v1/responses. Requests are strict: an unknown field is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.params.sampling import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from millrace.serve.generate.chat.reasoning import Effort
from millrace.serve.generate.chat.verbosity import Verbosity
from millrace.serve.generate.choosing.sampler_fields import SamplerFields
from millrace.serve.generate.fields.documents import DocumentCache
from millrace.serve.generate.fields.priority import PriorityClass, ServiceTier
from millrace.serve.http.schema import Refused, Strict, described, unsupported
from millrace.serve.responses.schemas_items import OutputItem, schema_of_input
from millrace.serve.responses.schemas_tools import ResponseTool, ResponseToolChoice, UsedTool
from millrace.serve.stored.batch_store import OutputTokensDetails

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


# ── input ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class InputTextPart(Strict, kw_only=True, tag_field="type", tag="input_text"):
    """A piece of text."""

    text: str
    cache: Annotated[DocumentCache | None, described("Reuse the part wherever it stood before, see /docs/kv.md.")] = (
        None
    )
    prompt_cache_breakpoint: Annotated[
        Raw | UnsetType, described("Accepted, without effect: equal prompt prefixes are always reused.")
    ] = UNSET


class OutputTextPart(Strict, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET
    logprobs: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class InputImagePart(msgspec.Struct, tag_field="type", tag="input_image"):
    """Not supported yet: this server takes text only."""


class InputFilePart(msgspec.Struct, tag_field="type", tag="input_file"):
    """Not supported yet: this server takes text only."""


class InputAudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Not supported yet: this server takes text only."""


class RefusalPart(Strict, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer: text like any other."""

    refusal: str


ResponsePart = InputTextPart | OutputTextPart | InputImagePart | InputFilePart | InputAudioPart | RefusalPart


class ResponseInputMessage(Strict, kw_only=True):
    """One message of the input."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponsePart]
    type: Literal["message"] = "message"
    id: Annotated[str | None, described("Accepted; items get new ids.")] = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, described("Accepted.")] = None
    phase: Annotated[
        Literal["commentary", "final_answer"] | None, described("Accepted, without effect: a label of the message.")
    ] = None


_ITEMS_SCHEMA: dict[str, Any] = {
    "type": "array", "maxItems": 20, "items": {"$ref": "#/components/schemas/ResponseInputMessage"}
}  # fmt: skip


class TextFormat(Strict, kw_only=True, tag_field="type", tag="text"):
    """Free text, as without a format."""


class JsonObjectFormat(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    name: Annotated[str, described("A label; no effect on generation.")]
    schema: Annotated[
        Raw,
        described("The schema. Properties are written in its order, separated by `, ` and `: `.", type="object"),
    ]
    description: Annotated[str | None, described("A label; no effect on generation.")] = None
    strict: Annotated[bool | None, described("The answer always follows the schema, whatever this says.")] = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ResponseText(Strict, kw_only=True):
    format: Annotated[ResponseFormat | None, described("Hold the answer to a form.")] = None
    verbosity: Annotated[
        Verbosity | None, described("Passed to the chat template; refused if the template does not read it.")
    ] = None


class ResponseStreamOptions(Strict, kw_only=True):
    include_obfuscation: Annotated[Refused, unsupported("null and false are accepted.")] = UNSET


class ResponseReasoning(Strict, kw_only=True):
    effort: Annotated[Effort | None, described("`none` turns reasoning off.")] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, described("Accepted: the reasoning itself is returned.")
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, described("The older name of `summary`.")
    ] = None


class ConversationId(Strict, kw_only=True):
    id: str


class _ResponseInput(SamplerFields, kw_only=True):
    model: Annotated[str | None, described("Name of the served model; may be left out.")] = None
    input: Annotated[Raw, described("A text, or a list of items.", **schema_of_input())]
    instructions: Annotated[str | None, described("A system message before all others.")] = None
    previous_response_id: Annotated[str | None, described("Continue the conversation of a stored response.")] = None
    text: ResponseText | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        described("auto: drop the oldest messages that do not fit, and report how many; default: refuse."),
    ] = None
    tools: Annotated[
        list[ResponseTool] | None,
        described(
            "Functions that the model may call, also in namespaces. Tools that OpenAI's servers run are left out."
        ),
    ] = None
    tool_choice: Annotated[
        ResponseToolChoice | None,
        described("`auto` (default), `none`, `required`, or the function to call; `allowed_tools` narrows the list."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("The answer may have several calls; default true.")] = None
    reasoning: Annotated[ResponseReasoning | None, described("How much the model reasons.")] = None
    conversation: Annotated[
        str | ConversationId | None, described("Continue a stored conversation, and add this turn to it.")
    ] = None


class InputTokensRequest(_ResponseInput, kw_only=True):
    """The body of POST /v1/responses/input_tokens. Sampler options have no effect on the count."""


class ResponsesRequest(_ResponseInput, kw_only=True):
    """The body of POST /v1/responses."""

    stream: Annotated[bool | None, described("Stream typed events as tokens are generated.")] = None
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[bool | None, described("Store the response for 30 days; default true.")] = None
    background: Annotated[
        bool | None, described("Generate in the background; with `stream`, events can be read again later.")
    ] = None
    max_output_tokens: Annotated[
        int | None, described("Maximum number of output tokens; default: up to the end of the context.", minimum=1)
    ] = None
    temperature: Annotated[
        float | None, described("0 is greedy; default: the model's recommendation, else 1.", minimum=0, maximum=100)
    ] = None
    top_p: Annotated[
        float | None,
        described("Nucleus sampling; default: the model's recommendation, else 1.", exclusiveMinimum=0, maximum=1),
    ] = None
    top_logprobs: Annotated[
        int | None, described(f"Log-probabilities; needs `include` {LOGPROBS}.", minimum=0, maximum=MAX_LOGPROBS)
    ] = None
    include: Annotated[list[str] | None, described(f"{LOGPROBS}; {ENCRYPTED_REASONING} is accepted.")] = None
    metadata: Annotated[dict[str, str] | None, described("Labels, returned with the response.")] = None
    client_metadata: Annotated[
        dict[str, Any] | None, described("Labels, returned with the response and written to the audit log.")
    ] = None
    user: Annotated[str | None, described("A label; no effect on generation.")] = None
    safety_identifier: Annotated[str | None, described("A label; no effect on generation.")] = None
    prompt_cache_key: Annotated[str | None, described("Names the handle of `prompt_cache_retention`.")] = None
    session_id: Annotated[
        str | None, described("Continue this session: the input is what is new; its own messages come before them.")
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        described("Keep the prompt cached for ten minutes, or 24 hours, as far as the quota allows."),
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, described("Accepted, without effect: equal prompt prefixes are always reused.")
    ] = None
    service_tier: Annotated[
        ServiceTier | None, described("`flex` is the priority `batch`, `priority` is `interactive`; see `priority`.")
    ] = None
    max_tool_calls: Annotated[
        int | None, described("Accepted: it limits built-in tools, of which this server has none.", minimum=1)
    ] = None
    context_management: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    prompt: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    moderation: Annotated[Refused, unsupported("null is accepted.")] = UNSET

    presence_penalty: Annotated[float | None, described("Applies to output tokens.", minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, described("Applies to output tokens.", minimum=-2, maximum=2)] = None
    seed: Annotated[int | None, described("The same seed, prompt and parameters give the same text.")] = None
    stop: Annotated[str | list[str] | None, described("Stop strings: generation ends before them.")] = None
    top_k: Annotated[int | None, described("Sample from the k likeliest tokens; 0 or -1 = all.", minimum=-1)] = None
    min_p: Annotated[
        float | None,
        described("Drop tokens below this fraction of the likeliest one's probability.", minimum=0, maximum=1),
    ] = None
    repetition_penalty: Annotated[
        float | None, described("Applies to prompt and output tokens; 1 = off.", minimum=0.01, maximum=100)
    ] = None
    ignore_eos: Annotated[bool | None, described("Ignore the model's end tokens.")] = None
    min_tokens: Annotated[int | None, described("No end token before this many output tokens.", minimum=0)] = None
    stop_token_ids: Annotated[
        list[int] | None, described("Generation ends at these token ids.", maxItems=MAX_STOP_TOKEN_IDS)
    ] = None
    include_stop_str_in_output: Annotated[bool | None, described("Include the stop string in the answer.")] = None
    skip_special_tokens: Annotated[bool | None, described("Omit special tokens from the text; default true.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("Variables for the chat template.")] = None
    priority: Annotated[
        PriorityClass | int | None, described("Priority class: 0 interactive, 1 standard (default), 2 batch.")
    ] = None
    cache_salt: Annotated[
        str | None, described("Cached prefixes are shared only between requests with the same salt.", maxLength=1024)
    ] = None
    timeout: Annotated[
        float | None, described("Seconds until the request is ended with an error.", exclusiveMinimum=0)
    ] = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "prompt": (),
    "moderation": (),
}
STREAM_OPTIONS_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class InputItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[Raw]
    first_id: str
    last_id: str
    has_more: bool


class ResponseInputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int
    document_tokens: int | UnsetType = UNSET
    """Where parts are marked as documents: input tokens whose KV was taken from another place, approximately."""


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class UsedReasoning(msgspec.Struct):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(msgspec.Struct):
    format: ResponseFormat


ResponseStatus = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response, in any state."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: UsedReasoning = msgspec.field(default_factory=UsedReasoning)
    safety_identifier: str | None
    service_tier: Literal["default", "flex", "priority"] = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: ResponseToolChoice = "auto"
    tools: list[UsedTool] = []
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"] = "disabled"
    truncated_input_items: int | UnsetType = UNSET
    """Messages that `truncation` dropped from the beginning."""
    conversation: ConversationId | None = None
    usage: ResponseUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET
    metadata: dict[str, str]
    client_metadata: dict[str, Any] | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ConversationRequest(Strict, kw_only=True):
    """The body of POST /v1/conversations."""

    items: Annotated[Raw | UnsetType, described("The first messages, at most 20.", **_ITEMS_SCHEMA)] = UNSET
    metadata: Annotated[dict[str, str] | None, described("Labels.")] = None


class ConversationUpdate(Strict, kw_only=True):
    """The body of POST /v1/conversations/{conversation_id}."""

    metadata: Annotated[dict[str, str] | None, described("Labels; they replace the old ones.")]


class ConversationItemsRequest(Strict, kw_only=True):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[Raw, described("Messages to add, 1 to 20.", **_ITEMS_SCHEMA, minItems=1)]


class ConversationAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class InputTokensAnswer(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(msgspec.Struct):
    """One event of a stream; its other fields depend on `type`."""

    type: str
    sequence_number: int
