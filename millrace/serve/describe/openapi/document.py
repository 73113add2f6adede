"""The OpenAPI document, generated from the structs that decode requests and encode answers.

The document must not allow what the server refuses; `limits` adds the rules that the structs do not state.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from millrace.serve.anthropic import models as anthropic_models
from millrace.serve.anthropic import schemas as schemas_anthropic
from millrace.serve.describe import routes_adapters as adapters
from millrace.serve.describe import routes_canary as canary
from millrace.serve.describe import routes_kv, routes_load, routes_requests
from millrace.serve.describe.openapi.limits import tighten
from millrace.serve.describe.openapi.paths import paths
from millrace.serve.encode import classify, cohere_embed, multi_vector, rerank, score, sparse_vector
from millrace.serve.generate.messages import RESERVED
from millrace.serve.http.error_bodies import ErrorAnswer
from millrace.serve.ollama import embed
from millrace.serve.ollama import schemas as schemas_ollama
from millrace.serve.openai import answers, embeddings, schemas
from millrace.serve.openai.kept import prefixes, routes_stored, routes_tenants, stored_chat
from millrace.serve.openai.kept import routes_sessions as sessions
from millrace.serve.responses import schemas as schemas_responses
from millrace.serve.responses import schemas_items as response_items
from millrace.serve.stored.batch_store import BatchAnswer, BatchList
from millrace.serve.stored.file_store import FileAnswer, FileDeleted, FileList
from millrace.serve.stored.routes_batches import BatchRequest
from millrace.serve.stored.routes_files import PURPOSES
from millrace.version import __version__

_TYPES = (
    *(schemas.ChatRequest, schemas.CompletionRequest, schemas.TokenizeRequest, schemas.DetokenizeRequest),
    *(answers.ChatAnswer, answers.ChatChunk, answers.CompletionAnswer, answers.CompletionChunk),
    *(anthropic_models.AnthropicModel, anthropic_models.AnthropicModelList),
    *(answers.TokenizeAnswer, answers.DetokenizeAnswer, answers.Model, answers.ModelList, answers.Health),
    *(embeddings.EmbeddingsRequest, embeddings.EmbeddingsAnswer),
    *(cohere_embed.EmbedRequest, cohere_embed.EmbedAnswer),
    *(rerank.RerankRequest, rerank.RerankAnswer, score.ScoreRequest, score.ScoreAnswer),
    *(classify.ClassifyRequest, classify.ClassifyAnswer),
    *(multi_vector.MultiVectorRequest, multi_vector.MultiVectorAnswer),
    *(sparse_vector.SparseVectorRequest, sparse_vector.SparseVectorAnswer),
    *(ErrorAnswer, schemas_anthropic.AnthropicErrorAnswer, schemas_ollama.OllamaErrorAnswer),
    *(schemas_responses.ResponsesRequest, schemas_responses.InputTokensRequest, schemas_responses.ResponseAnswer),
    *(schemas_responses.ResponseEvent, schemas_responses.ResponseDeleted, schemas_responses.InputItemList),
    *(response_items.InputItem, schemas_responses.InputTokensAnswer, schemas_responses.ResponseInputMessage),
    *(response_items.ResponseInputCall, response_items.ResponseInputResult, response_items.ResponseInputReasoning),
    response_items.ResponseItemReference,
    *(schemas_responses.ConversationRequest, schemas_responses.ConversationUpdate),
    *(schemas_responses.ConversationItemsRequest, schemas_responses.ConversationAnswer),
    schemas_responses.ConversationDeleted,
    answers.TokenizerInfo,
    *(stored_chat.StoredList, stored_chat.StoredDeleted, routes_stored.ChatUpdate),
    *(prefixes.CacheRequest, prefixes.CreatedHandle, prefixes.CacheHandle),
    *(prefixes.CacheHandles, prefixes.DeletedHandle, prefixes.ImportedHandle, routes_tenants.TenantForgotten),
    *(sessions.SessionRequest, sessions.SessionChange, sessions.SessionAnswer),
    *(sessions.SessionList, sessions.SessionDeleted),
    *(adapters.AdapterRequest, adapters.AdapterInfo, adapters.AdapterInfoList, adapters.DeletedAdapter),
    *(adapters.LoadLoraRequest, adapters.UnloadLoraRequest, adapters.CanaryInfo, adapters.VersionInfo),
    canary.CanaryRequest,
    *(FileAnswer, FileList, FileDeleted, BatchRequest, BatchAnswer, BatchList),
    *(routes_requests.RunningRequest, routes_requests.RunningRequests, routes_requests.RequestOutcome),
    *(routes_requests.CancelledRequest, routes_load.Load, routes_kv.KvEvent),
    *(schemas_anthropic.MessagesRequest, schemas_anthropic.CountTokensRequest),
    *(schemas_anthropic.MessageAnswer, schemas_anthropic.MessageEvent, schemas_anthropic.CountTokensAnswer),
    *(schemas_ollama.OllamaChatRequest, schemas_ollama.OllamaGenerateRequest, schemas_ollama.OllamaShowRequest),
    *(schemas_ollama.OllamaAnswer, schemas_ollama.OllamaModels, schemas_ollama.OllamaShowAnswer),
    schemas_ollama.OllamaVersion,
    *(embed.OllamaEmbedRequest, embed.OllamaEmbedAnswer, embed.OllamaEmbeddingsRequest, embed.OllamaEmbeddingsAnswer),
    *(schemas_ollama.OllamaPullRequest, schemas_ollama.OllamaDeleteRequest, schemas_ollama.OllamaPullStatus),
    *(schemas_ollama.OllamaCreateRequest, schemas_ollama.OllamaCopyRequest),
)

_ACCEPTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("ChatRequest", "CompletionRequest"), schemas.NOT_SUPPORTED),
    "AssistantMessage": schemas.NOT_SUPPORTED_IN_MESSAGES,
    **dict.fromkeys(("ResponsesRequest", "InputTokensRequest"), schemas_responses.NOT_SUPPORTED),
    "StreamOptions": schemas.STREAM_OPTIONS_NOT_SUPPORTED,
    "ResponseStreamOptions": schemas_responses.STREAM_OPTIONS_NOT_SUPPORTED,
    **dict.fromkeys(("MessagesRequest", "CountTokensRequest"), schemas_anthropic.NOT_SUPPORTED),
    "OllamaChatRequest": schemas_ollama.NOT_SUPPORTED,
    "OllamaGenerateRequest": schemas_ollama.NOT_SUPPORTED,
    "OllamaCreateRequest": schemas_ollama.CREATE_NOT_SUPPORTED,
    "OllamaOptions": schemas_ollama.OPTIONS_NOT_SUPPORTED,
    "OllamaMessage": schemas_ollama.MESSAGE_NOT_SUPPORTED,
}
"""Accepted values of each unsupported field, apart from null."""

_TAGS = {
    "generate": "Generate text.",
    "encode": "Embed, rank, score and classify texts.",
    "stored completions": "Completions that were kept (`store`).",
    "responses": "Stored responses.",
    "conversations": "Stored conversations.",
    "cache": "Prompts that are kept cached.",
    "sessions": "Conversations that the server keeps, with their keys and values.",
    "files": "Stored files.",
    "batches": "Files of requests, run at batch priority.",
    "models": "The served model.",
    "adapters": "LoRA adapters of the served model.",
    "text": "The tokenizer.",
    "anthropic": "Anthropic's API.",
    "ollama": "Ollama's API.",
    "operate": "Running requests, health, readiness, metrics.",
}


@cache
def openapi_document() -> bytes:
    """Made when somebody asks for it: that takes longer than all else that a front does at its start."""
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": __version__,
            "description": "An LLM serving engine with OpenAI's, Anthropic's and Ollama's APIs. Unknown fields are"
            " refused, never ignored. null is the same as leaving a field out, also for unknown fields."
            " Integers have no decimal point: 8.0 is refused.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths(),
        "components": {"schemas": _schemas()},
    }
    return msgspec.json.encode(document)


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    for name, schema in components.items():
        _drop_null_defaults(schema)
        _limit_unsupported(schema, _ACCEPTED_VALUES.get(name, {}))
    tighten(components)
    for schema in components.values():
        _required_first(schema)
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"type": "null"}
    components["FileForm"] = _file_form()
    return dict(sorted(components.items()))


def _file_form() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "The form of POST /v1/files.",
        "required": ["purpose", "file"],
        "additionalProperties": False,
        "properties": {
            "purpose": {"type": "string", "enum": list(PURPOSES), "description": "What the file is for."},
            "file": {"type": "string", "format": "binary", "description": "The file."},
            "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
        },
    }


def _limit_unsupported(schema: dict[str, Any], accepted_values: dict[str, tuple[Any, ...]]) -> None:
    """An unsupported field may only have the values that ask for nothing."""
    for name, accepted in accepted_values.items():
        if name in schema.get("properties", {}):
            schema["properties"][name]["enum"] = [None, *accepted]
    variables = schema.get("properties", {}).get("chat_template_kwargs")
    if variables is not None:
        variables["propertyNames"] = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": list(RESERVED)}}


def _drop_null_defaults(schema: Any) -> None:
    """`default: null` only repeats that the field is optional."""
    if isinstance(schema, dict):
        if schema.get("default", ...) is None:
            del schema["default"]
        for value in schema.values():
            _drop_null_defaults(value)
    elif isinstance(schema, list):
        for value in schema:
            _drop_null_defaults(value)


def _required_first(schema: dict[str, Any]) -> None:
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    schema["properties"] = {name: fields[name] for name in sorted(fields, key=lambda name: name not in required)}
