"""Grammars of Python programs: schemas as dictionaries, and types that describe one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.params.grammar import Grammar
from millrace.text.grammar.gbnf import looks_like_gbnf
from millrace.text.grammar.inline import closed_schema

_TYPES = {"regex": "a string", "choice": "a list of strings", "grammar": "a string"}


FORMATS = ("schema", "regex", "choice", "grammar")


def grammar_of(**given: object) -> Grammar | None:
    """At most one of `FORMATS`.

    `schema`: a JSON schema, as a dictionary or as text, or a type: a msgspec Struct, a pydantic model, a dataclass, or
    one made of these, such as `list[Model]`.
    `regex`: matches the whole answer. `choice`: the answer is one of these texts. `grammar`: in Lark notation, in GBNF,
    or a `Grammar`.
    """
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadRequest(f"'{names[0]}' and '{names[1]}' both say what the answer must conform to; give one of them.")
    if not names:
        return None
    name, value = names[0], given[names[0]]
    match name, value:
        case "schema", _:
            return Grammar("json_schema", _schema_text(value))
        case "choice", [*choices] if all(isinstance(one, str) for one in choices):
            return Grammar("choice", json.dumps(choices, ensure_ascii=False))
        case "regex", str():
            return Grammar("regex", value)
        case "grammar", str():
            return Grammar("gbnf" if looks_like_gbnf(value) else "lark", value)
        case "grammar", Grammar():
            return value
    raise BadRequest(f"{name} is of type {type(value).__name__}; give {_TYPES[name]}.", param=name)


def parse_as(described: object, text: str) -> Any:
    """An answer in this schema as an object: of the type, or as plain values if the schema is a dictionary or text.
    Raises `ValueError`."""
    if isinstance(described, str | Mapping):
        return json.loads(text)
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(described, pydantic.TypeAdapter):
        return described.validate_json(text)
    try:
        msgspec.json.schema(described)
    except (TypeError, RuntimeError):
        if pydantic is None:
            raise
        return pydantic.TypeAdapter(described).validate_json(text)
    return msgspec.json.decode(text, type=described)


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(dict(schema), ensure_ascii=False)
    # A type names all its properties, so an answer has no others.
    return closed_schema(json.dumps(_schema_of_type(schema), ensure_ascii=False))


def _schema_of_type(described: Any) -> dict[str, Any]:
    """Pydantic's types may be inside others, such as list[Model], which msgspec does not read."""
    pydantic = sys.modules.get("pydantic")  # Who gives a pydantic model has imported pydantic; Millrace does not.
    problem: Exception
    try:
        if pydantic is not None and isinstance(described, pydantic.TypeAdapter):
            return dict(described.json_schema())
        if pydantic is not None and _is_model(described, pydantic):
            return dict(described.model_json_schema())
        return msgspec.json.schema(described)
    except (TypeError, RuntimeError) as error:
        problem = error
    try:
        if pydantic is not None:
            return dict(pydantic.TypeAdapter(described).json_schema())
    except Exception as error:  # Pydantic's errors are of several classes, and its own.
        problem = error
    said = " ".join(str(problem).split())[:200].rstrip(".")
    raise BadRequest(
        f"schema is {described!r}, which describes no JSON: {said}. Give a dictionary, a msgspec Struct, a dataclass, a"
        " pydantic model or a type made of these."
    )


def _is_model(described: Any, pydantic: Any) -> bool:
    return isinstance(described, type) and issubclass(described, pydantic.BaseModel)
