"""The OpenAPI document, built from the very structs that decode requests and encode answers."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace import __version__
from millrace.serve.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    ErrorAnswer,
    Health,
    Model,
    ModelList,
    TokenizeAnswer,
)
from millrace.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_TYPES = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    TokenizeAnswer,
    DetokenizeAnswer,
    Model,
    ModelList,
    Health,
    ErrorAnswer,
)

_ERRORS = {
    "400": "The request is wrong; the message names the field, the value and the remedy.",
    "401": "An API key is wanted, or this one is not known.",
    "403": "The key's tenant may not do this.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large; it was not read.",
    "415": "The body is compressed, or not UTF-8.",
    "429": "A quota is used up, the queue is full, or the first token would come too late; see Retry-After.",
    "499": "The request was cancelled.",
    "500": "The request failed.",
    "503": "The engine is loading, draining or gone; Retry-After says when to try again.",
    "504": "The deadline passed.",
}

_CHAT_EXAMPLE = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_completion_tokens": 64,
}
_COMPLETION_EXAMPLE = {"model": "smollm2-135m-instruct", "prompt": "The sea is", "max_tokens": 16}
_STREAM_NOTE = (
    "With `stream`: server-sent events, each `data: ` and a chunk, then `data: [DONE]`."
    " An error after the first event is an event of its own, with an `error` object."
)


def openapi_document() -> bytes:
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": __version__,
            "description": "An LLM serving engine with OpenAI's API. Unknown fields are refused, never ignored;"
            " null means the same as leaving a field out.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "generate", "description": "Text from the model."},
            {"name": "models", "description": "What is served."},
            {"name": "text", "description": "The tokenizer."},
            {"name": "operate", "description": "Health, readiness, metrics."},
        ],
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }
    return msgspec.json.encode(document)


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        _tidy(schema)
        _required_first(schema)
    return dict(sorted(components.items()))


def _tidy(schema: Any) -> None:
    """A limit beside `anyOf` holds for the number in it; JSON Schema ignores it for null, so it may stay. What is
    dropped is `default: null`, which only repeats that the field may be left out."""
    if isinstance(schema, dict):
        if schema.get("default", ...) is None:
            del schema["default"]
        for value in schema.values():
            _tidy(value)
    elif isinstance(schema, list):
        for value in schema:
            _tidy(value)


def _required_first(schema: dict[str, Any]) -> None:
    required = schema.get("required", [])
    fields = schema.get("properties", {})
    schema["properties"] = {name: fields[name] for name in sorted(fields, key=lambda name: name not in required)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str, description: str = "OK") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: _json("ErrorAnswer", _ERRORS[status]) for status in statuses}


def _body(name: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": _ref(name), "example": example}}}


def _generate(summary: str, operation: str, names: tuple[str, str, str], example: dict[str, Any]) -> dict[str, Any]:
    request, answer, chunk = names
    ok = _json(answer, "The answer, or its stream.")
    ok["content"]["text/event-stream"] = {"schema": _ref(chunk)}
    return {
        "post": {
            "tags": ["generate"],
            "operationId": operation,
            "summary": summary,
            "description": _STREAM_NOTE,
            "parameters": [_request_id_parameter(), _timeout_parameter()],
            "requestBody": _body(request, example),
            "responses": {"200": ok, **_errors(*_ERRORS)},
        }
    }


def _request_id_parameter() -> dict[str, Any]:
    return {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "Echoed in the answer; up to 128 printable characters. Without one the server makes one up.",
        "schema": {"type": "string", "maxLength": 128},
    }


def _timeout_parameter() -> dict[str, Any]:
    return {
        "name": "X-Request-Timeout",
        "in": "header",
        "required": False,
        "description": "Seconds until the request is given up; the smaller of this and the field `timeout` holds.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }


def _get(tag: str, operation: str, summary: str, responses: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"get": {"tags": [tag], "operationId": operation, "summary": summary, "responses": responses, **more}}


def _paths() -> dict[str, Any]:
    chat_names = ("ChatRequest", "ChatAnswer", "ChatChunk")
    completion_names = ("CompletionRequest", "CompletionAnswer", "CompletionChunk")
    return {
        "/v1/chat/completions": _generate("Answer a conversation", "createChatCompletion", chat_names, _CHAT_EXAMPLE),
        "/v1/completions": _generate("Continue a text", "createCompletion", completion_names, _COMPLETION_EXAMPLE),
        **_model_paths(),
        **_request_paths(),
        **_text_paths(),
        **_operate_paths(),
    }


def _model_paths() -> dict[str, Any]:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/models": _get("models", "listModels", "List the served model", {"200": _json("ModelList")}),
        "/v1/models/{model}": _get(
            "models",
            "retrieveModel",
            "Describe a served model",
            {"200": _json("Model"), **_errors("404")},
            parameters=[parameter],
        ),
    }


def _request_paths() -> dict[str, Any]:
    identity = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "The answer's `id`, or the X-Request-Id of the request.",
        "schema": {"type": "string"},
    }
    told = {"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}}
    errors = _errors("401", "404", "503")
    cancel = {
        "tags": ["operate"],
        "operationId": "cancelRequest",
        "summary": "Cancel a request",
        "parameters": [identity],
        "responses": {"200": told, **errors},
    }
    summary = "Why a request waited, what it found cached, whether it was preempted, the time of each stage"
    explain = _get("operate", "explainRequest", summary, {"200": told, **errors}, parameters=[identity])
    return {"/v1/requests/{id}": {"delete": cancel}, "/v1/requests/{id}/explain": explain}


def _text_paths() -> dict[str, Any]:
    def post(operation: str, summary: str, request: str, answer: str, example: dict[str, Any]) -> dict[str, Any]:
        return {
            "post": {
                "tags": ["text"],
                "operationId": operation,
                "summary": summary,
                "requestBody": _body(request, example),
                "responses": {"200": _json(answer), **_errors("400", "404", "408", "413", "415", "500", "503")},
            }
        }

    return {
        "/tokenize": post(
            "tokenize", "Text or messages to token ids", "TokenizeRequest", "TokenizeAnswer", {"prompt": "The sea is"}
        ),
        "/detokenize": post(
            "detokenize", "Token ids to text", "DetokenizeRequest", "DetokenizeAnswer", {"tokens": [504, 3217, 314]}
        ),
    }


def _operate_paths() -> dict[str, Any]:
    text = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    html = {"description": "This page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    json = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    not_ready = _json("Health", "Not ready, with the reason.")
    return {
        "/health": _get("operate", "health", "The process is alive", {"200": _json("Health")}),
        "/ready": _get("operate", "ready", "Requests would be answered", {"200": _json("Health"), "503": not_ready}),
        "/metrics": _get("operate", "metrics", "Metrics for Prometheus", {"200": text}),
        "/docs": _get("operate", "docs", "The documentation for people", {"200": html}),
        "/openapi.json": _get("operate", "openapi", "The documentation for programs", {"200": json}),
    }
