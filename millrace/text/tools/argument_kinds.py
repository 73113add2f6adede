"""Which kinds of JSON value a parameter takes, for formats that write strings without quotes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from millrace.text.tools.json_scanner import json_text

STRING, NULL = "string", "null"
ALL_KINDS = frozenset((STRING, NULL, "boolean", "integer", "number", "array", "object"))
_MAX_DEPTH = 20


def parameter_schemas(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of each parameter that a function's schema names."""
    properties = resolved(parameters, parameters).get("properties")
    return properties if isinstance(properties, dict) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a chain of references inside `root` leads to; {} if there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict):
            return {}
        target = schema.get("$ref")
        if not isinstance(target, str):
            return schema
        schema = _at(root, target)
    return {}


def _at(root: Mapping[str, Any], target: str) -> Any:
    found: Any = root
    for part in target.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if name and isinstance(found, dict) else found
    return found


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that the schema allows; all of them if it does not say."""
    schema = resolved(schema, root)
    if depth > _MAX_DEPTH:
        return ALL_KINDS
    kinds = ALL_KINDS
    given = schema.get("type")
    if isinstance(given, (str, list)):
        kinds &= frozenset([given] if isinstance(given, str) else [one for one in given if isinstance(one, str)])
    if "const" in schema or isinstance(schema.get("enum"), list):
        kinds &= frozenset(_kind(value) for value in schema.get("enum", [schema.get("const")]))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            kinds &= frozenset().union(*(kinds_of(one, root, depth + 1) for one in schema[keyword]))
    if isinstance(schema.get("allOf"), list):
        for one in schema["allOf"]:
            kinds &= kinds_of(one, root, depth + 1)
    return kinds


def _kind(value: Any) -> str:
    match value:
        case None:
            return NULL
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return STRING
    return "array" if isinstance(value, list) else "object"


def value_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that a model wrote without quotes. A text that is no value of these kinds is a string."""
    found = _literal(text.strip())
    kind = STRING if found is None else _kind(found[0])
    is_one = kind in kinds or (kind == "integer" and "number" in kinds) or STRING not in kinds
    is_string = found is None or kind == STRING or not is_one
    return json_text(text if is_string else found[0])  # type: ignore[index]


def _literal(text: str) -> tuple[Any] | None:
    """The value that JSON, or else Python, reads; None if neither does, or if JSON cannot hold it."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json_text(value)
            return (value,)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return None
