"""Checks values against OpenAI's OpenAPI document, with the part of JSON Schema that the document uses.

MILLRACE_OPENAI_OPENAPI names the file; the default is a file beside the checkout. Tests that need it are skipped if it
is missing.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data" / "openai-openapi.yaml"
DOCUMENT = Path(os.environ.get("MILLRACE_OPENAI_OPENAPI", _BESIDE))

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@cache
def schemas() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with DOCUMENT.open(encoding="utf-8") as file:
        document = yaml.load(file, Loader=loader)
    found: dict[str, Any] = document["components"]["schemas"]
    return found


def problems(value: Any, schema: dict[str, Any], defs: dict[str, Any], at: str = "$") -> list[str]:
    """Violations of the schema; empty if the value conforms."""
    if value is None and schema.get("nullable"):
        return []
    if "$ref" in schema:
        return problems(value, defs[schema["$ref"].rsplit("/", 1)[-1]], defs, at)
    found: list[str] = []
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(value, kind) for kind in kinds):
            return [f"{at}: {value!r} is not {kinds}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{at}: {value!r} is not {schema['const']!r}")
    for part in schema.get("allOf", ()):
        found += problems(value, part, defs, at)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            tried = [problems(value, part, defs, at) for part in schema[key]]
            if all(tried):
                found.append(f"{at}: fits none of {key}: {min(tried, key=len)}")
    found += _numbers(value, schema, at)
    if isinstance(value, dict):
        found += _object(value, schema, defs, at)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += problems(item, schema["items"], defs, f"{at}[{index}]")
    return found


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    return isinstance(value, _TYPES[kind])


def _numbers(value: Any, schema: dict[str, Any], at: str) -> list[str]:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return []
    found = []
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{at}: {value} is below {schema['minimum']}")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        found.append(f"{at}: {value} is not above {schema['exclusiveMinimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        found.append(f"{at}: {value} is above {schema['maximum']}")
    return found


def _object(value: dict[str, Any], schema: dict[str, Any], defs: dict[str, Any], at: str) -> list[str]:
    found = [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    properties = schema.get("properties", {})
    for name, inner in value.items():
        if name in properties:
            found += problems(inner, properties[name], defs, f"{at}.{name}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{at}.{name} is not allowed")
        elif isinstance(schema.get("additionalProperties"), dict):
            found += problems(inner, schema["additionalProperties"], defs, f"{at}.{name}")
    return found
