"""Bodies that clients send, as strict structs: an unknown field or a wrong type is an error.

Every parameter of OpenAI's reference is a field here. Unsupported ones are typed `Refused` and listed in
`NOT_SUPPORTED` with the values that have no effect and are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Raw, UnsetType

from millrace.params.sampling import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from millrace.serve.generate.chat.reasoning import Effort
from millrace.serve.generate.chat.verbosity import Verbosity
from millrace.serve.generate.choosing.beam_fields import SelfConsistency
from millrace.serve.generate.fields.documents import DocumentCache
from millrace.serve.generate.fields.priority import PriorityClass, ServiceTier
from millrace.serve.http.inputs import input_schema
from millrace.serve.http.schema import Refused, Strict, described, unsupported
from millrace.serve.openai.formats import Formatted
from millrace.serve.openai.schemas_tools import (
    CalledFunction,
    FunctionName,
    FunctionSpec,
    MessageCall,
    OfLitellm,
    ToolChoice,
    ToolSpec,
)

# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────
CacheBreakpoint = Annotated[
    Raw | UnsetType, described("Accepted: equal prompt prefixes are always reused, wherever they end.")
]


class TextPart(Strict, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache: Annotated[DocumentCache | None, described("Reuse the part wherever it stood before, see /docs/kv.md.")] = (
        None
    )
    prompt_cache_breakpoint: CacheBreakpoint = UNSET


class ImagePart(Strict, kw_only=True, tag_field="type", tag="image_url"):
    """Not supported yet: this server takes text only."""

    image_url: Refused = UNSET
    prompt_cache_breakpoint: CacheBreakpoint = UNSET


class AudioPart(Strict, kw_only=True, tag_field="type", tag="input_audio"):
    """Not supported yet: this server takes text only."""

    input_audio: Refused = UNSET
    prompt_cache_breakpoint: CacheBreakpoint = UNSET


class FilePart(Strict, kw_only=True, tag_field="type", tag="file"):
    """Not supported yet: this server takes text only."""

    file: Refused = UNSET
    prompt_cache_breakpoint: CacheBreakpoint = UNSET


class RefusalPart(Strict, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer: text like any other."""

    refusal: str


ContentPart = TextPart | ImagePart | AudioPart | FilePart | RefusalPart
Content = Annotated[
    str | list[ContentPart],
    described("A text, or text parts, which are joined by line breaks if the template takes no parts."),
]
Name = Annotated[str | None, described("Passed to the chat template as the message's `name`.")]


class SystemMessage(Strict, kw_only=True, tag_field="role", tag="system"):
    """Instructions for the model."""

    content: Content
    name: Name = None


class DeveloperMessage(Strict, kw_only=True, tag_field="role", tag="developer"):
    """The newer name of a system message; the chat template sees the role `system`."""

    content: Content
    name: Name = None


class UserMessage(Strict, kw_only=True, tag_field="role", tag="user"):
    """A message of the user."""

    content: Content
    name: Name = None


class AssistantMessage(Strict, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer of the model."""

    content: Content | None = None
    name: Name = None
    refusal: Annotated[str | None, described("Stands for `content` where that is missing.")] = None
    audio: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    tool_calls: Annotated[list[MessageCall] | None, described("Calls that the answer made.")] = None
    function_call: Annotated[CalledFunction | None, described("The older form of `tool_calls`.")] = None
    reasoning_content: Annotated[str | None, described("The answer's reasoning; the template decides its use.")] = None
    reasoning: Annotated[str | None, described("Another name of `reasoning_content`.")] = None
    parsed: Annotated[Raw | UnsetType, described("Accepted, without effect: `openai` adds it.")] = UNSET
    annotations: Annotated[Raw | UnsetType, described("Accepted, without effect: labels of the content.")] = UNSET
    provider_specific_fields: OfLitellm = UNSET
    thinking_blocks: OfLitellm = UNSET
    reasoning_details: Annotated[Raw | UnsetType, described("Accepted, without effect: routers add it.")] = UNSET


class ToolMessage(Strict, kw_only=True, tag_field="role", tag="tool"):
    """The result of a tool call."""

    content: Content
    tool_call_id: Annotated[str, described("The id of the call.")]
    name: Annotated[str | None, described("The function; default: that of the call with this id.")] = None


class FunctionMessage(Strict, kw_only=True, tag_field="role", tag="function"):
    """The older form of a tool message."""

    content: Content | None
    name: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class PredictedText(Strict, kw_only=True):
    """A piece of text."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint = UNSET


class Prediction(Strict, kw_only=True):
    """What the answer will probably contain."""

    type: Literal["content"]
    content: str | list[PredictedText]


class StreamOptions(Strict, kw_only=True):
    """What a stream carries besides the text."""

    include_usage: Annotated[bool | None, described("Send one more chunk, before [DONE], with the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, described("Send the usage so far with every chunk.")] = None
    include_obfuscation: Annotated[Refused, unsupported("null and false are accepted.")] = UNSET


# ── fields of chat and completions ────────────────────────────────────────────────────────────────────────────────────
Priority = Annotated[
    PriorityClass | int | None, described("Priority class: 0 interactive, 1 standard (default), 2 batch.")
]
CacheSalt = Annotated[
    str | None,
    described("Cached prompt prefixes are shared only between requests with the same salt.", maxLength=1024),
]
Timeout = Annotated[float | None, described("Seconds until the deadline.", exclusiveMinimum=0)]


class Sampled(Formatted, kw_only=True):
    """Parameters of both endpoints. null means the same as leaving the field out."""

    model: Annotated[
        str | None, described("The served model's name, as `/v1/models` lists it; default: the first model.")
    ] = None
    temperature: Annotated[
        float | None, described("0 is greedy; default: the model's recommendation, else 1.", minimum=0, maximum=100)
    ] = None
    top_p: Annotated[
        float | None,
        described("Nucleus sampling; default: the model's recommendation, else 1.", exclusiveMinimum=0, maximum=1),
    ] = None
    presence_penalty: Annotated[float | None, described("Over the output.", minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, described("Over the output.", minimum=-2, maximum=2)] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        described("Token id (as a string) to a bias between -100 and 100.", maxProperties=MAX_LOGIT_BIAS),
    ] = None
    seed: Annotated[int | None, described("The same seed, prompt and parameters give the same text.")] = None
    n: Annotated[int | None, described("Choices per prompt; default 1.", minimum=1, maximum=MAX_CHOICES)] = None
    stop: Annotated[
        str | list[str] | None, described(f"Stop strings; generation ends before them. At most {MAX_STOP_STRINGS}.")
    ] = None
    stream: Annotated[bool | None, described("Stream server-sent events as tokens are generated.")] = None
    stream_options: Annotated[StreamOptions | None, described("Only with `stream`.")] = None
    user: Annotated[str | None, described("A label; no effect on generation.")] = None
    metadata: Annotated[dict[str, str] | None, described("Labels; no effect on generation.")] = None

    top_k: Annotated[int | None, described("Keep the k likeliest tokens; 0 or -1 keeps all.", minimum=-1)] = None
    min_p: Annotated[
        float | None,
        described("Drop tokens below this fraction of the likeliest one.", minimum=0, maximum=1),
    ] = None
    repetition_penalty: Annotated[
        float | None, described("Over prompt and output; 1 is off.", minimum=0.01, maximum=100)
    ] = None
    ignore_eos: Annotated[bool | None, described("Do not end at the model's end tokens.")] = None
    min_tokens: Annotated[int | None, described("No end token before this many output tokens.", minimum=0)] = None
    stop_token_ids: Annotated[
        list[int] | None, described("Generation ends at these tokens.", maxItems=MAX_STOP_TOKEN_IDS)
    ] = None
    include_stop_str_in_output: Annotated[bool | None, described("Include the stop string in the text.")] = None
    skip_special_tokens: Annotated[bool | None, described("Omit special tokens from the text; default true.")] = None
    prompt_logprobs: Annotated[
        int | None,
        described("Log-probabilities of the prompt; in a stream before its text.", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    return_token_ids: Annotated[bool | None, described("Add the token ids of prompt and output.")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None
    best_of: Annotated[
        int | None, described("Generate this many and return the n likeliest; not with `stream`.", minimum=1)
    ] = None
    self_consistency: Annotated[
        SelfConsistency | None,
        described(
            "Generate `samples` answers and return one with the most frequent field: `regex` or `json_path` extracts"
            " it. The answer has a `vote`, whose `majority` is false unless more than half agree."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        described(
            "Keep this many tokens from the end of the prompt (-1: as many as fit) and report how many were cut.",
            minimum=-1,
        ),
    ] = None


class ChatRequest(Sampled, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], described("The conversation so far; at least one message.", minItems=1)]
    max_completion_tokens: Annotated[
        int | None,
        described(
            "Maximum number of output tokens; default: to the end of the context. 0 only with `prompt_logprobs`.",
            minimum=0,
        ),
    ] = None
    max_tokens: Annotated[int | None, described("The older name of `max_completion_tokens`.", minimum=0)] = None
    logprobs: Annotated[bool | None, described("Return the log-probability of every token.")] = None
    top_logprobs: Annotated[
        int | None,
        described("Also of the k likeliest tokens; requires `logprobs`.", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    safety_identifier: Annotated[str | None, described("A label; no effect on generation.")] = None
    prompt_cache_key: Annotated[str | None, described("Names the handle of `prompt_cache_retention`.")] = None
    session_id: Annotated[
        str | None, described("Continue this session: the messages are the new ones; its own come before them.")
    ] = None

    add_generation_prompt: Annotated[bool | None, described("Let the template begin the answer; default true.")] = None
    continue_final_message: Annotated[bool | None, described("Continue the last message instead of answering it.")] = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("More variables for the chat template.")] = None

    tools: Annotated[list[ToolSpec] | None, described("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None,
        described("`auto` (default), `none`, `required`, or the function to call; `allowed_tools` narrows the list."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, described("The answer may have several calls; default true.")] = None
    functions: Annotated[list[FunctionSpec] | None, described("The older form of `tools`.")] = None
    function_call: Annotated[
        Literal["none", "auto"] | FunctionName | None, described("The older form of `tool_choice`.")
    ] = None
    reasoning_effort: Annotated[
        Effort | None,
        described("How much a model that reasons should reason; `none` turns it off. See docs/tools.md."),
    ] = None
    thinking_token_budget: Annotated[
        int | None, described("Most tokens of reasoning; then the answer is begun.", minimum=0)
    ] = None
    verbosity: Annotated[
        Verbosity | None, described("Passed to the chat template; refused if the template does not read it.")
    ] = None
    modalities: Annotated[Refused, unsupported('null and ["text"] are accepted.')] = UNSET
    audio: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    prediction: Annotated[
        Prediction | None,
        described("Text that the answer will probably contain: a source of drafts with `--speculate`."),
    ] = None
    web_search_options: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    moderation: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    service_tier: Annotated[
        ServiceTier | None, described("`flex` is the priority `batch`, `priority` is `interactive`; see `priority`.")
    ] = None
    store: Annotated[bool | None, described("Store the completion and its messages for 30 days; default false.")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        described("Keep the prompt cached for ten minutes, or 24 hours, as far as the quota allows."),
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, described("Accepted, without effect: equal prompt prefixes are always reused.")
    ] = None


class CompletionRequest(Sampled, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[Raw, described("A text, token ids, or a list of either.", **input_schema(min_chars=0))]
    max_tokens: Annotated[
        int | None,
        described("Maximum number of output tokens; default 16. 0 only with `echo` or `prompt_logprobs`.", minimum=0),
    ] = None
    logprobs: Annotated[
        int | None, described("Log-probabilities of this many likeliest tokens.", minimum=0, maximum=MAX_LOGPROBS)
    ] = None
    echo: Annotated[bool | None, described("Return the prompt before the completion.")] = None
    add_special_tokens: Annotated[
        bool | None, described("Add the special tokens that begin a prompt; default true.")
    ] = None
    suffix: Annotated[str | None, described("Text after the completion, for models that can fill in the middle.")] = (
        None
    )


class TokenizeRequest(Strict, kw_only=True):
    """The body of POST /tokenize: a `prompt`, or `messages` as chat would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool | None, described("Default true for a prompt, false for messages.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, described("Default false: special tokens are shown.")] = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}
"""Unsupported fields, with the values (besides null) that have no effect and are accepted."""

NOT_SUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
}

STREAM_OPTIONS_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}
