"""Paths of the server itself: adapters, Millrace's own figures, and what operating needs."""

from __future__ import annotations

from typing import Any

from millrace.observe.history import MAX_WINDOW_S
from millrace.serve.describe.openapi.operations import (
    BODY_ERRORS,
    as_json,
    body_of,
    event_of,
    in_path,
    in_query,
    json_of,
    operation,
    ref,
)
from millrace.serve.describe.routes_requests import MAX_LISTED


def adapter_paths() -> dict[str, Any]:
    one, of_model, errors = in_path("name"), in_query("model", type="string"), ("403", "404", "500", "503")
    made = operation("adapters", "addAdapter", "Add a LoRA adapter", "AdapterInfo", (*BODY_ERRORS, "403", "409"))
    canary = operation(
        "adapters",
        "startCanary",
        "Give a new version a share of the requests",
        "AdapterInfo",
        (*BODY_ERRORS, "403"),
        parameters=[one, of_model],
    )
    example = {"name": "pirate", "path": "/srv/adapters/pirate"}
    said = {"description": "A sentence.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    load = operation("adapters", "loadLora", "Add one, as with vLLM", said, (*BODY_ERRORS, "403", "409"))
    unload = operation("adapters", "unloadLora", "Remove one, as with vLLM", said, (*BODY_ERRORS, "403"))
    lora = {"lora_name": "pirate", "lora_path": "/srv/adapters/pirate"}
    return {
        "/v1/adapters": {
            "post": {**made, "requestBody": body_of("AdapterRequest", example)},
            "get": operation(
                "adapters",
                "listAdapters",
                "List them",
                "AdapterInfoList",
                ("400", "404", "500", "503"),
                parameters=[of_model],
            ),
        },
        "/v1/adapters/{name}": {
            "get": operation(
                "adapters", "retrieveAdapter", "Describe one", "AdapterInfo", errors[1:], parameters=[one, of_model]
            ),
            "delete": operation(
                "adapters", "deleteAdapter", "Remove one", "DeletedAdapter", errors, parameters=[one, of_model]
            ),
        },
        "/v1/adapters/{name}/canary": {
            "post": {
                **canary,
                "requestBody": body_of("CanaryRequest", {"path": "/srv/adapters/v2"}),
            },
            "delete": operation(
                "adapters", "abortCanary", "Take a canary back", "AdapterInfo", errors, parameters=[one, of_model]
            ),
        },
        "/v1/adapters/{name}/canary/promote": {
            "post": operation(
                "adapters",
                "promoteCanary",
                "Give all requests to the new version",
                "AdapterInfo",
                errors,
                parameters=[one, of_model],
            )
        },
        "/v1/load_lora_adapter": {"post": {**load, "requestBody": body_of("LoadLoraRequest", lora)}},
        "/v1/unload_lora_adapter": {"post": {**unload, "requestBody": body_of("UnloadLoraRequest", lora)}},
    }


def own_paths() -> dict[str, Any]:
    return {**_text_paths(), **_load_paths(), **_kv_paths(), **_replica_paths(), **_request_paths()}


def _text_paths() -> dict[str, Any]:
    encode = operation("text", "tokenize", "Text or messages to token ids", "TokenizeAnswer", BODY_ERRORS)
    decode = operation("text", "detokenize", "Token ids to text", "DetokenizeAnswer", BODY_ERRORS)
    return {
        "/tokenize": {"post": {**encode, "requestBody": body_of("TokenizeRequest", {"prompt": "The sea is"})}},
        "/tokenizer_info": {
            "get": operation(
                "text",
                "tokenizerInfo",
                "Describe the tokenizer",
                "TokenizerInfo",
                ("400", "404"),
                parameters=[_of_model()],
            )
        },
        "/detokenize": {"post": {**decode, "requestBody": body_of("DetokenizeRequest", {"tokens": [504, 3217, 314]})}},
    }


def _load_paths() -> dict[str, Any]:
    return {
        "/v1/stats": {
            "get": operation(
                "operate",
                "stats",
                "Figures and time series for dashboards",
                _figures(),
                ("400", "404"),
                parameters=_series(),
            )
        },
        "/v1/load": {
            "get": operation(
                "operate",
                "load",
                "How busy this server is, for gateways",
                "Load",
                ("400", "404"),
                parameters=[_of_model()],
            )
        },
    }


def _kv_paths() -> dict[str, Any]:
    one_event = {"text/event-stream": {"schema": event_of("KvEvent")}}
    events = {"description": "Server-sent events without end; the first is a snapshot.", "content": one_event}
    return {
        "/v1/kv/events": {
            "get": operation(
                "operate",
                "kvEvents",
                "Which KV blocks are cached, for gateways",
                events,
                ("400", "403", "404", "503"),
                parameters=[_of_model()],
            )
        },
        "/v1/kv/tree": {
            "get": operation(
                "operate",
                "kvTree",
                "The prefix tree of the cache, without text",
                _figures(),
                ("400", "403", "404", "503"),
                parameters=_nodes(),
            )
        },
        "/v1/kv/blocks": {
            "post": {
                **operation(
                    "operate",
                    "kvBlocks",
                    "KV blocks of a prompt, for other replicas",
                    _octets(),
                    ("400", "403", "404", "409", "413", "429", "503"),
                    parameters=[_of_model()],
                ),
                "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}},
            }
        },
    }


def _replica_paths() -> dict[str, Any]:
    """What gateways move between replicas, beside blocks."""
    made = as_json({"type": "object"})
    made["application/json"]["example"] = {"name": "sailor", "model": "smollm2", "system": "Answer as a sailor would."}
    created = {"description": "With all that makes them.", "content": as_json({"type": "object"})}
    stored = {"description": "What it keeps now.", "content": as_json({"type": "object"})}
    return {
        "/v1/stored": {
            "get": operation(
                "operate",
                "giveStored",
                "A session, responses or a conversation, for gateways",
                _octets(),
                ("400", "403", "404"),
                parameters=_stored_at(),
            ),
            "post": {
                **operation(
                    "operate",
                    "takeStored",
                    "Keep what another replica gave, for gateways",
                    stored,
                    ("400", "403", "409", "413"),
                ),
                "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}},
            },
        },
        "/v1/created": {
            "get": operation(
                "operate", "listCreated", "Models that clients made, for gateways", created, ("400", "403")
            ),
            "post": {
                **operation(
                    "operate",
                    "takeCreated",
                    "Keep a model that another replica has, for gateways",
                    stored,
                    (*BODY_ERRORS, "403", "404", "409"),
                ),
                "requestBody": {"required": True, "content": made},
            },
        },
        "/v1/created/files/{digest}": {
            "get": operation(
                "operate",
                "readCreatedFile",
                "A file of an adapter that was uploaded",
                _octets(),
                ("400", "403", "404"),
                parameters=[in_path("digest")],
            )
        },
    }


def _request_paths() -> dict[str, Any]:
    one, unknown = [in_path("request_id")], ("404", "503")
    either = {"oneOf": [ref("RunningRequest"), ref("RequestOutcome")]}
    described = {"description": "What it has done so far, or how it ended.", "content": as_json(either)}
    explained = {"description": "Its stages, in figures and in sentences.", "content": as_json({"type": "object"})}
    return {
        "/v1/requests": {
            "get": operation(
                "operate", "listRequests", "List running requests", "RunningRequests", ("400",), parameters=[_listed()]
            )
        },
        "/v1/steps": {
            "get": operation(
                "operate",
                "steps",
                "The engine's last steps",
                _figures(),
                ("400", "403", "404", "503"),
                parameters=_last(),
            )
        },
        "/v1/cost": {
            "get": operation(
                "operate",
                "cost",
                "What tokens cost on this machine",
                _figures(),
                ("400", "403", "404"),
                parameters=_price(),
            )
        },
        "/v1/requests/{request_id}": {
            "get": operation("operate", "retrieveRequest", "Describe a request", described, unknown, parameters=one),
            "delete": operation("operate", "cancelRequest", "Cancel it", "CancelledRequest", unknown, parameters=one),
        },
        "/v1/requests/{request_id}/explain": {
            "get": operation(
                "operate", "explainRequest", "Why it took as long as it did", explained, unknown, parameters=one
            )
        },
        "/v1/requests/{request_id}/cancel": {
            "post": operation(
                "operate", "cancelRequestByPost", "Cancel it", "CancelledRequest", unknown, parameters=one
            )
        },
    }


def _figures() -> dict[str, Any]:
    return {"description": "Present figures and series.", "content": as_json({"type": "object"})}


def _octets() -> dict[str, Any]:
    return {"description": "The sealed part.", "content": {"application/octet-stream": {"schema": {}}}}


def operate_paths() -> dict[str, Any]:
    text = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    html = {"description": "This page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    json = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    ready = operation("operate", "ready", "Readiness: the engine answers requests", "Health")
    ready["responses"]["503"] = json_of("Health", "Not ready, with the reason.")
    return {
        "/health": {"get": operation("operate", "health", "Liveness: the process runs", "Health")},
        "/ready": {"get": ready},
        "/metrics": {"get": operation("operate", "metrics", "Metrics for Prometheus", text)},
        "/docs": {"get": operation("operate", "docs", "API documentation as a page", html)},
        "/openapi.json": {"get": operation("operate", "openapi", "API description as OpenAPI", json)},
    }


def _series() -> list[dict[str, Any]]:
    window = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW_S, "default": 300}
    step = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW_S, "default": 5}
    return [
        {"name": "window", "in": "query", "description": "Seconds to look back.", "schema": window},
        {"name": "step", "in": "query", "description": "Seconds per point, at most the window.", "schema": step},
        _of_model(),
    ]


def _of_model() -> dict[str, Any]:
    text = "Which model's figures, by name or alias; by default those of the first."
    return {"name": "model", "in": "query", "description": text, "schema": {"type": "string"}}


def _listed() -> dict[str, Any]:
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED}
    return {"name": "limit", "in": "query", "description": "Only the longest running ones.", "schema": limit}


def _stored_at() -> list[dict[str, Any]]:
    text = "`sessions/ID`, `responses/ID` or `conversations/ID`."
    return [{"name": "at", "in": "query", "required": True, "description": text, "schema": {"type": "string"}}]


def _last() -> list[dict[str, Any]]:
    last = {"type": "integer", "minimum": 1, "maximum": 4096, "default": 200}
    return [{"name": "last", "in": "query", "description": "Number of steps.", "schema": last}, _of_model()]


def _nodes() -> list[dict[str, Any]]:
    nodes = {"type": "integer", "minimum": 1, "maximum": 2000, "default": 200}
    text = "How many nodes, those with most tokens under them."
    return [{"name": "nodes", "in": "query", "description": text, "schema": nodes}, _of_model()]


def _price() -> list[dict[str, Any]]:
    price = {"type": "number", "minimum": 0, "exclusiveMaximum": 1_000_000}
    text = "Dollars per hour, instead of --price-per-hour; only on servers without keys."
    return [{"name": "price", "in": "query", "description": text, "schema": price}, _of_model()]
