"""Objects that name their properties have no others, unless the schema says so or names them in several places."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.text.grammar.inline import tightened_schema

A, B = {"a": {"type": "string"}}, {"b": {"type": "integer"}}
OPEN = {"type": "object", "properties": A}
SHUT = {**OPEN, "additionalProperties": False}
SHUT_IN = {"additionalProperties": False}
CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
)
ONE, OTHER = ({"type": "object", "properties": own, "required": list(own)} for own in (A, B))


@pytest.mark.parametrize(
    ("schema", "tight"),
    [
        (OPEN, SHUT),
        ({"type": "object", "properties": {"o": OPEN}}, {"properties": {"o": SHUT}}),
        ({"$defs": {"x": OPEN}, "anyOf": [{"$ref": "#/$defs/x"}, OPEN]}, {"$defs": {"x": SHUT}, "anyOf": [..., SHUT]}),
        ({**OPEN, "required": ["a"]}, {**SHUT, "required": ["a"]}),
        ({"$defs": {"x": OPEN}, "allOf": [{"$ref": "#/$defs/x"}]}, {"$defs": {"x": SHUT}}),
        ({"$defs": {"c": CAT}, "oneOf": [{"$ref": "#/$defs/c"}, DOG]}, {"$defs": {"c": {**CAT, **SHUT_IN}}}),
        ({"oneOf": [ONE, OTHER, {"type": "null"}]}, {"oneOf": [{**ONE, **SHUT_IN}, {**OTHER, **SHUT_IN}, ...]}),
        ({"properties": {"o": {"allOf": [{"minimum": 1}, {"maximum": 2}]}}}, {"additionalProperties": False}),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], tight: dict[str, Any]) -> None:
    found = json.loads(tightened_schema(json.dumps(schema)))
    for key, value in tight.items():
        if isinstance(value, list):
            assert all(want in (..., one) for one, want in zip(found[key], value, strict=True))
        else:
            assert found[key] == value
    assert ("properties" in schema) == (found.get("additionalProperties") is False)


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "integer"}},
        {**OPEN, "required": ["b"]},
        {**OPEN, "minProperties": 2},
        {**OPEN, "patternProperties": {"^x": {}}},
        {"allOf": [OPEN, {"type": "object", "properties": B}]},
        {"allOf": [OPEN, {"$ref": "#/$defs/x"}], "$defs": {"x": OPEN}},
        {**OPEN, "allOf": [{"properties": B}]},
        {**OPEN, "anyOf": [{"properties": B}, {"properties": {}}]},
        {"$defs": {"x": {"properties": B}}, "$ref": "#/$defs/x", "properties": A},
        {"oneOf": [ONE, {"type": "object", "properties": {}}]},
        {"oneOf": [{**ONE, "additionalProperties": True}, OTHER]},
        {"oneOf": [CAT, {**CAT, "properties": {"kind": {"enum": ["cat", "dog"]}}}]},
        {"oneOf": [{**DOG, "required": []}, CAT]},
        {"oneOf": [OPEN, {"properties": B, "required": ["b"]}]},
        {"type": "object"},
        {"enum": [{"properties": {}}]},
        {"const": {"properties": {}}},
    ],
)
def test_other_objects_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert json.loads(tightened_schema(json.dumps(schema))) == schema
