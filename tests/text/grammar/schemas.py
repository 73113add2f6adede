"""Schemas of the kinds that clients send, each with a value that must be accepted and one that must not."""

from __future__ import annotations

from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 12}


def record(properties: dict[str, Any], *, optional: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


SCHEMAS: dict[str, tuple[Any, Any, Any]] = {
    "record": (record({"name": SHORT, "age": INTEGER}), {"name": "Ann", "age": 3}, {"name": "Ann"}),
    "nested": (
        record({"user": record({"id": INTEGER, "tags": {"type": "array", "items": SHORT, "maxItems": 3}})}),
        {"user": {"id": 1, "tags": ["a"]}},
        {"user": {"id": 1, "tags": "a"}},
    ),
    "optional": (record({"a": SHORT, "b": INTEGER}, optional=("b",)), {"a": "x"}, {"b": 2}),
    "enum": (record({"unit": {"enum": ["celsius", "fahrenheit", None, 4]}}), {"unit": "celsius"}, {"unit": "kelvin"}),
    "const": (
        record({"kind": {"const": "circle"}, "r": NUMBER}),
        {"kind": "circle", "r": 1.5},
        {"kind": "c"},
    ),
    "any of": (
        record({"value": {"anyOf": [SHORT, {"type": "integer", "minimum": 0}, {"type": "null"}]}}),
        {"value": None},
        {"value": -1},
    ),
    "several types": (record({"value": {"type": ["integer", "boolean"]}}), {"value": True}, {"value": "x"}),
    "bounded array": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        [1, 2],
        [1],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [SHORT, INTEGER], "items": False, "minItems": 2},
        ["a", 1],
        [1, "a"],
    ),
    "integer range": (record({"n": {"type": "integer", "minimum": -5, "maximum": 120}}), {"n": 120}, {"n": 121}),
    "exclusive range": (
        record({"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}),
        {"x": 0.5},
        {"x": 1},
    ),
    "multiple": (record({"n": {"type": "integer", "multipleOf": 25, "minimum": 0}}), {"n": 75}, {"n": 70}),
    "lengths": (record({"s": {"type": "string", "minLength": 2, "maxLength": 4}}), {"s": "abc"}, {"s": "a"}),
    "pattern": (record({"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}), {"zip": "12345"}, {"zip": "1234"}),
    "date": (record({"on": {"type": "string", "format": "date"}}), {"on": "2026-11-16"}, {"on": "tomorrow"}),
    "reference": (
        {"$defs": {"point": record({"x": INTEGER, "y": INTEGER})}, **record({"at": {"$ref": "#/$defs/point"}})},
        {"at": {"x": 1, "y": 2}},
        {"at": {"x": 1}},
    ),
    "recursion": (
        {
            "$defs": {"node": record({"v": BOOLEAN, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
            "$ref": "#/$defs/node",
        },
        {"v": True, "next": {"v": False, "next": None}},
        {"v": True, "next": 3},
    ),
    "all of": (
        {
            "allOf": [
                record({"a": INTEGER}, additionalProperties=True),
                {"required": ["b"], "properties": {"b": BOOLEAN}},
            ]
        },
        {"a": 1, "b": True},
        {"a": 1},
    ),
    "map": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3},
        {"x": 1},
        {"x": "y"},
    ),
    "separate alternatives": (
        {"oneOf": [record({"kind": {"const": "a"}, "n": INTEGER}), record({"kind": {"const": "b"}, "s": SHORT})]},
        {"kind": "b", "s": "x"},
        {"kind": "b", "n": 1},
    ),
    "escapes": (record({'quo"te\\ é': SHORT}), {'quo"te\\ é': "x"}, {"quote": "x"}),
}

NOT_ENFORCED: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": STRING},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a", "minLength": 2}},
    "unevaluatedProperties": {"allOf": [{"required": ["a"]}], "unevaluatedProperties": False},
    "unevaluatedItems": {"allOf": [{"prefixItems": [STRING]}], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x"}}},
    "overlap": {"oneOf": [STRING, {"minLength": 2}]},
    "disjoint": {"type": "object", "patternProperties": {"^a": INTEGER, "b$": STRING}},
    "minProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
    "minProperties' 3": {"properties": {"x": {"type": "object", "required": ["a"], "minProperties": 3}}},
    "maxProperties": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1},
    "iri": {"type": "string", "format": "iri"},
    "uri-reference": {"type": "string", "format": "uri-reference"},
}
"""What answers could not be held to, by a word of the refusal."""

NEUTRAL: list[Any] = [
    {"type": "array", "items": INTEGER, "uniqueItems": False},
    {"type": "array", "items": INTEGER, "minContains": 1, "unevaluatedItems": True},
    {"type": "array", "items": {"anyOf": [INTEGER, {"type": "array", "uniqueItems": False}]}, "then": {"maxItems": 0}},
]
"""Schemas that allow [1]; keywords without an effect."""
