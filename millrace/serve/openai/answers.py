"""Bodies that clients receive, as structs. The OpenAPI document is built from the same structs.

A field typed `… | UnsetType` appears only if it was requested. Field order is the order on the wire.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from millrace.serve.generate.events import AnswerFinish
from millrace.serve.generate.logprobs import TokenLogprob
from millrace.serve.openai.schemas_tools import AnswerCall, CallDelta, FunctionCall, FunctionCallDelta


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    """Prompt tokens whose KV was already in the prefix cache."""
    document_tokens: int | UnsetType = UNSET
    """Where parts are marked as documents: prompt tokens whose KV was taken from another place, approximately."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Tokens of `prediction` that were tried as drafts and became output."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Those that were tried and did not."""


class Usage(msgspec.Struct):
    """Tokens of all choices together; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Of a model that reasons, and where a prediction was used."""


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt position (the first has none): token id to log-probability and rank."""


class VoteResult(msgspec.Struct):
    """How the answers of `self_consistency` voted."""

    value: str | None
    """The extracted field of the returned answer; null if no answer had one."""
    votes: int
    """Answers with this field."""
    samples: int
    """Answers generated."""
    majority: bool
    """True if more than half of the answers have this field. If all of them differ, `votes` is 1."""


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
ChatFinish = AnswerFinish | Literal["function_call"]


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """null if the answer consists of tool calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    """The call, if the request had `functions`."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; null if neither did."""
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    truncated_prompt_tokens: int | UnsetType = UNSET
    """Number of tokens that `truncate_prompt_tokens` cut from the beginning of the prompt."""
    vote: VoteResult | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionCallDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    truncated_prompt_tokens: int | UnsetType = UNSET


# ── completions ───────────────────────────────────────────────────────────────────────────────────────────────────────
class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerFinish
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    truncated_prompt_tokens: int | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct):
    """A whole completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    vote: VoteResult | UnsetType = UNSET


class CompletionChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: AnswerFinish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    truncated_prompt_tokens: int | UnsetType = UNSET


class CompletionChunk(msgspec.Struct):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Maximum tokens of prompt and output together; null until the model was loaded for the first time."""
    root: str
    """The model's own name; differs from `id` for an alias. Of an adapter: its `id`."""
    status: Literal["loaded", "loading", "unloaded", "failed"]
    """An unloaded model is loaded when a request names it."""
    parent: str | UnsetType = UNSET
    """Of an adapter: its model."""
    capabilities: list[str] | UnsetType = UNSET
    """Of one model: completion; chat, where it has a chat template; tools; thinking; embedding, if trained for it."""
    sampling: dict[str, float] | UnsetType = UNSET
    """Of one model: sampling of requests that leave these fields out. Others have the neutral value."""
    suggestion: SuggestedModel | UnsetType | None = UNSET
    """Of one model, if it is small: a better one that fits this machine."""


class SuggestedModel(msgspec.Struct):
    name: str
    download_bytes: int
    """0 if it is downloaded."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct):
    status: Literal["ok", "ready", "not ready"]
    reason: str | UnsetType = UNSET
    models: dict[str, str] | UnsetType = UNSET
    """The status of each model, on a server of several models."""


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]


class TokenizerInfo(msgspec.Struct):
    """What clients need to tokenise as the server does."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int | None
    bos_token: str | None
    eos_token: str | None
    end_tokens: dict[str, int]
    """Every token that ends an answer."""
    special_tokens: dict[str, str]
    """By role: bos_token, eos_token, …"""
    chat_template: str | None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str
