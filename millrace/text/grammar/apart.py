"""Whether the alternatives of a `oneOf` exclude each other even if only the objects of an answer are closed."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

Schema = dict[str, Any]


def followed(schema: Schema, root: Schema) -> Schema:
    """What a reference to a definition leads to."""
    target = schema.get("$ref")
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", target) if isinstance(target, str) else None
    definitions = root.get(found[1]) if found else None
    definition = definitions.get(found[2]) if found and isinstance(definitions, dict) else None
    return definition if isinstance(definition, dict) else schema


def are_apart(members: Any, root: Schema) -> bool:
    """True if an answer to one alternative, with no properties besides those named, never fits another as it was sent.

    Alternatives that are closed may look different where those that were sent overlap.
    """
    if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
        return False
    return all(_differ(one, other) for one, other in combinations([followed(one, root) for one in members], 2))


def _differ(one: Schema, other: Schema) -> bool:
    types = _types(one), _types(other)
    if types[0] and types[1] and types[0].isdisjoint(types[1]):
        return True
    if types != ({"object"}, {"object"}):
        return bool(_values(one) and _values(other)) and _values(one).isdisjoint(_values(other))
    if _lacks(one, other) and _lacks(other, one):
        return True
    shared = _required(one) & _required(other)
    told = [(_values(_properties(one).get(name)), _values(_properties(other).get(name))) for name in shared]
    return any(mine and theirs and mine.isdisjoint(theirs) for mine, theirs in told)


def _types(schema: Schema) -> set[str]:
    given = schema.get("type")
    types = {str(one) for one in given} if isinstance(given, list) else {given} if isinstance(given, str) else set()
    return types | {"number"} if "integer" in types else types


def _lacks(one: Schema, other: Schema) -> bool:
    """True if an object of `one`, once closed, cannot have all that `other` requires."""
    is_closed = "properties" in one and not one.get("additionalProperties", False) and "patternProperties" not in one
    return is_closed and not _required(other) <= set(_properties(one))


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Schema) -> set[str]:
    required = schema.get("required")
    return set(map(str, required)) if isinstance(required, list) else set()


def _values(schema: Any) -> set[str]:
    """The values that `const` and `enum` allow, if they are texts; empty if others may be allowed."""
    if not isinstance(schema, dict):
        return set()
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    is_text = isinstance(given, list) and all(isinstance(one, str) for one in given)
    return set(given) if is_text and isinstance(given, list) else set()
