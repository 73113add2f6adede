"""Keywords of JSON schemas that llguidance does not read, or reads wrongly, in others that it does.

An answer that follows the result also follows the schema as it was sent.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any, TypeGuard

from millrace.text.grammar.apart import followed
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.patterns import ascii_classes

Schema = dict[str, Any]

MAX_BOUND = 2**63 - 1024
"""The largest number below 2**63 that a float holds: llguidance's bounds are floats, and 64-bit integers."""
MAX_COPIED_CHARS = 16 * 1024
"""Of the schema that all listed names share."""
_MAX_EXACT = 2**53
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3467]|draft/20(?:19-09|20-12))/schema#?")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_APPLICATORS = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas")
) | {"dependencies", "contains"}


def rewrite(schema: Schema, root: Schema) -> None:
    """Change the schema itself; those in it are rewritten already. `root` is the one that it is part of."""
    _normalise_dialect(schema)
    _limit_numbers(schema)
    _leave_whole_numbers(schema)
    for keyword in _COUNTS:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = int(count)
    _check_values([schema.get("const"), schema.get("enum")])
    _close_unevaluated(schema)
    _name_properties(schema, root)
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = ascii_classes(schema["pattern"])
    named = schema.get("patternProperties")
    if isinstance(named, dict):
        schema["patternProperties"] = {ascii_classes(name): value for name, value in named.items()}


def _normalise_dialect(schema: Schema) -> None:
    """llguidance takes `$schema` for a document to fetch unless it is spelled as that version spells it."""
    named = schema.get("$schema")
    if not isinstance(named, str):
        return
    if found := _DIALECT.fullmatch(named):
        schema["$schema"] = f"{'https' if '/' in found[1] else 'http'}://json-schema.org/{found[1]}/schema"
    else:
        del schema["$schema"]


def _limit_numbers(schema: Schema) -> None:
    """llguidance rounds bounds to floats. Round those that are large to the inside, and make them inclusive."""
    for keyword, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        for name in (keyword, exclusive):
            bound = schema.get(name)
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) < _MAX_EXACT:
                continue
            is_exclusive = name == exclusive or schema.get(exclusive) is True
            inner: float = _inward(bound * sign, is_exclusive=is_exclusive)
            if inner > MAX_BOUND:
                raise GrammarError(
                    f"The schema uses {name!r} {str(bound)[:24]}, which is not supported; use a number within 64 bits."
                )
            schema.pop(name)
            inner = max(inner, -MAX_BOUND)
            other = schema.get(keyword)
            if isinstance(other, (int, float)) and not isinstance(other, bool):
                inner = max(inner, other * sign)
            schema[keyword] = inner * sign
            if is_exclusive and schema.get(exclusive) is True:
                del schema[exclusive]


def _inward(bound: float, *, is_exclusive: bool) -> int:
    """The least whole number that a float holds from this lower bound on, which is large."""
    try:
        rounded = float(bound)
    except OverflowError:
        rounded = math.inf if bound > 0 else -math.inf
    if math.isinf(rounded):
        return -MAX_BOUND if rounded < 0 else MAX_BOUND + 1
    while rounded < bound or (is_exclusive and rounded <= bound):
        rounded = math.nextafter(rounded, math.inf)
    return math.ceil(rounded)


def _leave_whole_numbers(schema: Schema) -> None:
    """Between a whole number that is excluded and the next one, llguidance allows the excluded one, written without a
    point. Begin a little beside it."""
    for lower, upper, sign in (("inimum", "aximum", 1), ("aximum", "inimum", -1)):
        excluded = schema.get(f"exclusiveM{lower}")
        ends = [sign * end for end in (schema.get(f"m{upper}"), schema.get(f"exclusiveM{upper}")) if _is_number(end)]
        if schema.get("type") == "integer" or not ends or not _is_number(excluded) or excluded != int(excluded):
            continue
        start, end = sign * excluded, min(ends)
        if start < 0 or not start < end < start + 1:
            continue
        inner = start + 10.0 ** (math.floor(math.log10(end - start)) - 6)
        if start < inner < end:
            del schema[f"exclusiveM{lower}"]
            given = schema.get(f"m{lower}")
            schema[f"m{lower}"] = sign * (max(inner, sign * given) if _is_number(given) else inner)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_values(values: Any) -> None:
    """llguidance would write another number in place of one that a float does not hold."""
    if isinstance(values, (list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            _check_values(value)
    elif isinstance(values, (int, float)) and _MAX_EXACT <= abs(values) < math.inf and _as_written(values) != values:
        raise GrammarError(
            f"The schema uses the value {str(values)[:24]}, which is not supported, because it has more digits than a"
            " float; make it a string."
        )


def _as_written(number: float) -> int | None:
    """A large number as llguidance writes it."""
    try:
        return int(Decimal(repr(float(number))))
    except OverflowError:
        return None


def _name_properties(schema: Schema, root: Schema) -> None:
    """`propertyNames` beside `additionalProperties`, as dictionaries have them, as named or matched properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict):
        return
    rules = _rules(followed(names, root) if set(names) - _ANNOTATIONS == {"$ref"} else names)
    if not rules:
        del schema["propertyNames"]
        return
    if schema.get("properties") or schema.get("patternProperties"):
        return
    others = schema.get("additionalProperties", True)
    if listed := _listed(rules):
        if len(listed) * len(json.dumps(others)) > MAX_COPIED_CHARS:
            return
        schema["properties"] = dict.fromkeys(listed, others)
    elif pattern := _pattern(rules):
        schema["patternProperties"] = {pattern: others}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _rules(names: Schema) -> Schema:
    """What is asked of a name besides being a text."""
    asked = {keyword: value for keyword, value in names.items() if keyword not in _ANNOTATIONS}
    if asked.get("type") == "string":
        del asked["type"]
    return asked


def _listed(rules: Schema) -> list[str]:
    values = [rules["const"]] if set(rules) == {"const"} else rules.get("enum") if set(rules) == {"enum"} else None
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []


def _pattern(rules: Schema) -> str:
    if set(rules) == {"pattern"} and isinstance(rules["pattern"], str):
        return rules["pattern"]
    least, most = rules.get("minLength", 0), rules.get("maxLength", "")
    is_length = isinstance(least, int) and (most == "" or isinstance(most, int))
    return f"(?s)^.{{{least},{most}}}$" if set(rules) <= {"minLength", "maxLength"} and is_length else ""


def _close_unevaluated(schema: Schema) -> None:
    """Where no other schema applies to the same value, what is not evaluated is what is additional."""
    if not _APPLICATORS.isdisjoint(schema):
        return
    for keyword, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in schema:
            value = schema.pop(keyword)
            if not (same == "items" and isinstance(schema.get(same), list)):
                schema.setdefault(same, value)
            else:
                schema.setdefault("additionalItems", value)
