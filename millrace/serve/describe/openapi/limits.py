"""Limits that the server checks and that the structs of the request bodies do not state, added to their JSON Schemas.

Left out are rules between fields (`top_logprobs` needs `logprobs`) and what JSON Schema cannot say: to it 8.0 is an
integer, while the server refuses it.
"""

from __future__ import annotations

from typing import Any

from millrace.params.sampling import MAX_STOP_STRINGS
from millrace.serve.generate.chat.tools import NAME_PATTERN
from millrace.serve.generate.checks import MAX_SEQUENCES
from millrace.serve.responses.schemas import ENCRYPTED_REASONING, LOGPROBS

_MAX_INT32 = 2**31 - 1
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_k", "num_predict")
_WINDOWS = ("dry_allowed_length", "dry_range", "dry_penalty_last_n", "repeat_last_n")
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _MAX_INT32}
_STOP = {"minLength": 1, "maxItems": MAX_STOP_STRINGS, "items": {"minLength": 1}}

FIELD_LIMITS: dict[str, dict[str, Any]] = {
    **{name: {"maximum": _MAX_INT32} for name in (*_COUNTS, *_WINDOWS)},
    "best_of": {"maximum": MAX_SEQUENCES},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "priority": {"minimum": 0, "maximum": 2},
    "truncate_prompt_tokens": {"not": {"const": 0}},
    "stop": _STOP,
    "stop_sequences": _STOP,
    "stop_token_ids": {"items": _TOKEN_ID},
    "tokens": {"items": _TOKEN_ID},
    "allowed_token_ids": {"items": _TOKEN_ID},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"minimum": -100, "maximum": 100},
    },
    "include": {"items": {"enum": [LOGPROBS, ENCRYPTED_REASONING]}},
}
"""Limits by the name of a request's field. Each keyword applies to its own JSON type only, so it may stand beside an
`anyOf` with null."""

MESSAGE_LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "AnthropicMessage": {"content": {"minItems": 1}},
    "ResponseInputMessage": {"content": {"minItems": 1}},
    "ContentSource": {"content": {"minItems": 1}},
    "ResponseNamespace": {"name": {"pattern": NAME_PATTERN}},
    **{
        name: {"name": {"pattern": NAME_PATTERN}}
        for name in ("FunctionSpec", "ResponseFunction", "AnthropicTool", "OllamaFunctionSpec")
    },
}
"""Limits on the fields of one type."""


def _has(field: str, *absent: str, min_items: int = 1) -> dict[str, Any]:
    """The field is sent, neither null nor a list of fewer items; each of `absent` is left out or null."""
    given = {"not": {"type": "null"}, "minItems": min_items}
    return {"required": [field], "properties": {field: given, **{other: {"type": "null"} for other in absent}}}


EITHER_FIELD: dict[str, list[dict[str, Any]]] = {
    "TokenizeRequest": [_has("prompt", "messages"), _has("messages", "prompt")],
    "OllamaShowRequest": [_has("model"), _has("name")],
    "AssistantMessage": [_has("content", min_items=0), _has("refusal"), _has("tool_calls"), _has("function_call")],
    "OllamaMessage": [_has("content"), _has("tool_calls")],
    "OllamaPullRequest": [_has("model"), _has("name")],
    "OllamaDeleteRequest": [_has("model"), _has("name")],
}
"""Requests and messages that need one of several fields."""

_UNSUPPORTED = "Not supported yet"
_LINK = "#/components/schemas/"


def tighten(components: dict[str, Any]) -> None:
    """Make the schemas of request bodies, and of what they contain, refuse what the server refuses."""
    _drop_unsupported_types(components)
    for name in _reachable(components, [name for name in components if name.endswith("Request")]):
        schema = components[name]
        for field, limits in (FIELD_LIMITS | MESSAGE_LIMITS.get(name, {})).items():
            if field in schema.get("properties", {}):
                schema["properties"][field].update(limits)
        if name in EITHER_FIELD:
            schema["anyOf"] = EITHER_FIELD[name]


def _drop_unsupported_types(components: dict[str, Any]) -> None:
    unsupported = {
        name for name, schema in components.items() if schema.get("description", "").startswith(_UNSUPPORTED)
    }
    for schema in components.values():
        _drop_from_unions(schema, {_LINK + name for name in unsupported})
    for name in unsupported:
        del components[name]


def _drop_from_unions(schema: Any, links: set[str]) -> None:
    if isinstance(schema, list):
        for part in schema:
            _drop_from_unions(part, links)
    elif isinstance(schema, dict):
        if "anyOf" in schema:
            schema["anyOf"] = [kind for kind in schema["anyOf"] if kind.get("$ref") not in links]
        if "discriminator" in schema:
            mapping = schema["discriminator"]["mapping"]
            schema["discriminator"]["mapping"] = {tag: link for tag, link in mapping.items() if link not in links}
        for part in schema.values():
            _drop_from_unions(part, links)


def _reachable(components: dict[str, Any], names: list[str]) -> set[str]:
    """These schemas and all that they refer to."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += _references(components[name])
    return found


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for part in schema for name in _references(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].removeprefix(_LINK)] if "$ref" in schema else []
    return own + [name for part in schema.values() for name in _references(part)]
