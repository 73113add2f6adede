"""Requests and answers of Ollama's API. Requests are strict: an unknown field is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.generate.choosing.sampler_fields import SamplerFields
from millrace.serve.generate.fields.documents import DocumentCache
from millrace.serve.generate.logprobs import TokenLogprob
from millrace.serve.http.schema import Refused, Strict, described, unsupported

# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_Loading = Annotated[Raw | UnsetType, described("Accepted, without effect: the server's settings decide.")]
"""How Ollama loads a model: no effect on what it answers."""


class OllamaOptions(SamplerFields, kw_only=True):
    """Sampling, and options of Ollama's own runner."""

    temperature: Annotated[
        float | None, described("0 is greedy; default: the model's recommendation, else 0.8.", minimum=0, maximum=100)
    ] = None
    top_k: Annotated[
        int | None, described("0 keeps all; default: the model's recommendation, else 40.", minimum=-1)
    ] = None
    top_p: Annotated[
        float | None, described("Default: the model's recommendation, else 0.9.", exclusiveMinimum=0, maximum=1)
    ] = None
    min_p: Annotated[float | None, described("Default 0.", minimum=0, maximum=1)] = None
    seed: Annotated[int | None, described("The same seed gives the same text; -1 = random.")] = None
    num_predict: Annotated[
        int | None,
        described(
            "Maximum number of output tokens; -1 or -2: up to the end of the context.",
            minimum=-2,
            **{"not": {"const": 0}},
        ),
    ] = None
    num_ctx: Annotated[int | None, described("Maximum tokens of prompt and answer; at most the model's context.")] = (
        None
    )
    stop: Annotated[str | list[str] | None, described("Stop strings: generation ends before them.")] = None
    repeat_penalty: Annotated[
        float | None, described("Applies to prompt and output tokens; default off.", minimum=0.01, maximum=100)
    ] = None
    presence_penalty: Annotated[float | None, described("Applies to output tokens.", minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, described("Applies to output tokens.", minimum=-2, maximum=2)] = None
    num_keep: Annotated[
        int | None,
        described("With `truncate` on /api/generate: first tokens that stay; default 4, -1: most.", minimum=-1),
    ] = None
    tfs_z: Annotated[Refused, unsupported("null and 1 are accepted.")] = UNSET
    penalize_newline: Annotated[Refused, unsupported("null and true are accepted.")] = UNSET
    numa: _Loading = UNSET
    num_batch: _Loading = UNSET
    num_gpu: _Loading = UNSET
    main_gpu: _Loading = UNSET
    num_thread: _Loading = UNSET
    low_vram: _Loading = UNSET
    f16_kv: _Loading = UNSET
    logits_all: Annotated[Refused, unsupported("null and false are accepted.")] = UNSET
    vocab_only: Annotated[Refused, unsupported("null and false are accepted.")] = UNSET
    use_mmap: _Loading = UNSET
    use_mlock: _Loading = UNSET
    embedding_only: Annotated[Refused, unsupported("null and false are accepted.")] = UNSET


class OllamaFunctionSpec(Strict, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("JSON schema of the arguments.")] = None
    strict: bool | None = None


class OllamaTool(Strict, kw_only=True):
    type: Literal["function"] | None = "function"
    function: OllamaFunctionSpec


class OllamaFunctionCall(Strict, kw_only=True):
    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Strict, kw_only=True):
    """A tool call of an earlier answer."""

    function: OllamaFunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: Annotated[str | None, described("Reasoning of an earlier answer.")] = None
    images: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    tool_calls: Annotated[list[OllamaCall] | None, described("Calls that the answer made.")] = None
    tool_name: Annotated[str | None, described("Of a tool message: the function that was called.")] = None
    name: Annotated[str | None, described("The older name of `tool_name`.")] = None
    tool_call_id: Annotated[str | None, described("Of a tool message: the call that it answers.")] = None
    cache: Annotated[
        DocumentCache | None, described("Reuse the content wherever it stood before, see /docs/kv.md.")
    ] = None


class OllamaCommon(Strict, kw_only=True):
    model: Annotated[str, described("Name of a served model, with or without `:latest`.")]
    stream: Annotated[bool | None, described("Stream JSON lines as tokens are generated; default true.")] = None
    options: OllamaOptions | None = None
    logprobs: Annotated[bool | None, described("Return the log-probability of every token.")] = None
    top_logprobs: Annotated[
        int | None, described("Also for this many likeliest tokens; needs `logprobs`.", minimum=0, maximum=20)
    ] = None
    keep_alive: Annotated[
        str | float | None,
        described(
            'How long the model stays loaded after this request: seconds or a duration such as "5m"; 0 unloads it, -1'
            " keeps it. Where API keys are required, only an operator's key changes it; for others the server's setting"
            " stays and 0 is refused. What the request computed stays cached as long, where there is room."
        ),
    ] = None
    format: Annotated[
        Raw | UnsetType,
        described(
            'Hold the answer to a form: "json" for any JSON object, or a JSON schema.',
            anyOf=[{"enum": ["", "json", None]}, {"type": "object"}],
        ),
    ] = UNSET
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None, described("Whether, and how much, the model reasons.")
    ] = None
    shift: Annotated[
        bool | None,
        described("A context is never shifted, so true needs `options.num_predict`, which must fit into the context."),
    ] = None


class OllamaChatRequest(OllamaCommon, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[
        list[OllamaMessage] | None, described("The conversation; without messages the request only loads the model.")
    ] = None
    tools: Annotated[list[OllamaTool] | None, described("Functions that the model may call.")] = None
    session_id: Annotated[
        str | None, described("Continue this session: the messages are the new ones; its own come before them.")
    ] = None
    truncate: Annotated[
        bool | None,
        described("Drop the oldest messages of a conversation that is too long; `truncated_messages` says how many."),
    ] = None


class OllamaGenerateRequest(OllamaCommon, kw_only=True):
    """The body of POST /api/generate."""

    prompt: Annotated[str | None, described("The user's prompt; without one the request only loads the model.")] = None
    system: Annotated[str | None, described("System prompt.")] = None
    raw: Annotated[bool | None, described("Use the prompt without the chat template.")] = None
    suffix: Annotated[
        str | None, described("Text after the answer, for models that can fill in the middle; without the template.")
    ] = None
    truncate: Annotated[
        bool | None,
        described(
            "Cut a prompt that is too long after its first `options.num_keep` tokens; `truncated_prompt_tokens` says"
            " how many are gone."
        ),
    ] = None
    template: Annotated[
        str | None,
        described(
            "A Go template in place of the model's chat template, with `.System`, `.Prompt`, `.Response`, `.Suffix`,"
            " `if`, `else`, `end`, `not`, `and`, `or`; anything else is refused."
        ),
    ] = None
    context: Annotated[
        list[int] | None, described("Token ids of the conversation so far: the `context` of the reply before.")
    ] = None
    images: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    width: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    height: Annotated[Refused, unsupported("null is accepted.")] = UNSET
    steps: Annotated[Refused, unsupported("null is accepted.")] = UNSET


class OllamaShowRequest(Strict, kw_only=True):
    """The body of POST /api/show."""

    model: Annotated[str | None, described("Name of the served model.")] = None
    name: Annotated[str | None, described("Older name of `model`.")] = None
    verbose: Annotated[bool | None, described("Accepted, without effect.")] = None


class OllamaDeleteRequest(Strict, kw_only=True):
    """The body of DELETE /api/delete."""

    model: Annotated[str | None, described("Name of a downloaded model.")] = None
    name: Annotated[str | None, described("Older name of `model`.")] = None


class OllamaPullRequest(OllamaDeleteRequest, kw_only=True):
    """The body of POST /api/pull."""

    model: Annotated[str | None, described("Known name, or hub name: org/model[@revision][:quantisation].")] = None
    stream: Annotated[bool | None, described("Stream JSON lines with the progress; default true.")] = None
    insecure: Annotated[bool | None, described("Accepted, without effect: transfers are always verified.")] = None


class OllamaCreateRequest(Strict, kw_only=True):
    """The body of POST /api/create."""

    model: Annotated[str | None, described("Name of the new model.")] = None
    name: Annotated[str | None, described("Older name of `model`.")] = None
    from_: Annotated[str | None, described("Name of the served model that it is made of.")] = msgspec.field(
        default=None, name="from"
    )
    adapters: Annotated[
        dict[str, str] | None,
        described(
            "Files of a LoRA adapter as PEFT saves it, adapter_config.json and a safetensors file: digests"
            " (`sha256:…`) of uploaded files by name."
        ),
    ] = None
    system: Annotated[str | None, described("System prompt of conversations that have none.")] = None
    parameters: Annotated[
        OllamaOptions | None,
        described("Defaults of requests: any option of /api/chat."),
    ] = None
    license: Annotated[str | list[str] | None, described("Kept with the model.")] = None
    stream: Annotated[bool | None, described("Stream JSON lines with the progress; default true.")] = None
    files: Annotated[Refused, unsupported("null and {} are accepted.")] = UNSET
    template: Annotated[Refused, unsupported('null and "" are accepted.')] = UNSET
    messages: Annotated[Refused, unsupported("null and [] are accepted.")] = UNSET
    quantize: Annotated[Refused, unsupported('null and "" are accepted.')] = UNSET
    quantization: Annotated[Refused, unsupported('null and "" are accepted.')] = UNSET
    modelfile: Annotated[Refused, unsupported("null is accepted; `millrace create` sends one.")] = UNSET
    path: Annotated[Refused, unsupported("null is accepted.")] = UNSET


class OllamaCopyRequest(Strict, kw_only=True):
    """The body of POST /api/copy."""

    source: Annotated[str, described("Name of a served model, or of a created one.")]
    destination: Annotated[str, described("The further name.")]


CREATE_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "files": ({},),
    **dict.fromkeys(("template", "quantize", "quantization"), ("",)),
    "messages": ([],),
    **dict.fromkeys(("modelfile", "path"), ()),
}
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "width": (),
    "height": (),
    "steps": (),
}
OPTIONS_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), (False,)),
}
MESSAGE_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
}


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class OllamaCalledFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(msgspec.Struct):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct):
    """A whole answer or one line of a stream. /api/chat sets `message`, /api/generate `response`."""

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    """/api/generate only."""
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    """Nanoseconds, like all durations."""
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    truncated_messages: int | UnsetType = UNSET
    document_tokens: int | UnsetType = UNSET
    """Where messages are marked as documents: prompt tokens whose KV was taken from another place, approximately."""
    """With `truncate`: messages that were dropped from the beginning."""
    truncated_prompt_tokens: int | UnsetType = UNSET
    """/api/generate with `truncate`: tokens that were cut out of the prompt."""
    context: list[int] | UnsetType = UNSET
    """/api/generate without `raw`: token ids of the conversation so far, which the next request sends back."""


class OllamaDetails(msgspec.Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    context_length: int | UnsetType = UNSET
    """This and the two fields below: /api/ps only."""
    size_vram: int | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShowAnswer(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int | float | bool | None]
    capabilities: list[str]
    modified_at: str


class OllamaPullStatus(msgspec.Struct):
    """One line of a pull's progress; the last one says `success`."""

    status: str
    total: int | UnsetType = UNSET
    """Bytes, like `completed`."""
    completed: int | UnsetType = UNSET


class OllamaVersion(msgspec.Struct):
    version: str
    """Of the Ollama whose API this is; clients refuse older ones."""
    millrace: str
    """This server's own version."""


class OllamaErrorAnswer(msgspec.Struct):
    """Errors of /api/…: Ollama's `error` text, with OpenAI's fields beside it."""

    error: str
    message: str
    type: str
    param: str | None
    code: str | None
