"""Fields of chat and completions that say what the answer must conform to: OpenAI's and those of vLLM's users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.errors import BadRequest
from millrace.serve.generate.checks import refuse_unsupported
from millrace.serve.generate.choosing.beam_fields import BeamFields
from millrace.serve.generate.grammars import Format, format_of, only_format, schema_format
from millrace.serve.http.schema import Refused, Strict, described, unsupported
from millrace.text.grammar.gbnf import looks_like_gbnf

_SCHEMA = "A JSON schema, as an object or as a text that holds one."
_REGEX = "A regular expression that matches the whole answer, without look-around or backreferences."
_CHOICE = "The answer is one of these texts."
_GRAMMAR = "A grammar in Lark notation (llguidance's dialect), or in GBNF, which is told by its `::=`."
_WHITESPACE = "With a schema: a regular expression for the whitespace between JSON tokens."


class TextFormat(Strict, kw_only=True, tag_field="type", tag="text"):
    """Free text, as without a format."""


class JsonObjectFormat(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object, or one that a schema allows."""

    schema: Annotated[
        Raw | UnsetType, described("A schema, as llama.cpp's clients send it.", type=["object", "null"])
    ] = UNSET
    value: Annotated[
        Raw | UnsetType, described("The same, as huggingface_hub's client sends it.", type=["object", "null"])
    ] = UNSET


class JsonSchema(Strict, kw_only=True):
    """A JSON schema with a name."""

    name: Annotated[str, described("A label; no effect on generation.")]
    schema: Annotated[
        Raw,
        described("The schema. Properties are written in its order, separated by `, ` and `: `.", type="object"),
    ]
    description: Annotated[str | None, described("A label; no effect on generation.")] = None
    strict: Annotated[bool | None, described("The answer always follows the schema, whatever this says.")] = None


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Strict, kw_only=True):
    """Exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json: Annotated[Raw | UnsetType, described(_SCHEMA)] = UNSET
    json_object: Annotated[bool | None, described("true: any JSON object.")] = None
    regex: Annotated[str | None, described(_REGEX)] = None
    choice: Annotated[list[str] | None, described(_CHOICE, minItems=1)] = None
    grammar: Annotated[str | None, described(_GRAMMAR)] = None
    whitespace_pattern: Annotated[str | None, described(_WHITESPACE)] = None
    disable_additional_properties: Annotated[
        bool | None, described("With `json`: objects have no properties besides those that are named.")
    ] = None
    disable_any_whitespace: Annotated[
        bool | None, described("Accepted: without `whitespace_pattern` the whitespace is fixed.")
    ] = None
    disable_fallback: Annotated[bool | None, described("Accepted: there is one backend, llguidance.")] = None
    structural_tag: Annotated[Refused, unsupported("null is accepted.")] = UNSET


class Formatted(BeamFields, kw_only=True):
    """At most one of these fields says what the answer must conform to."""

    response_format: Annotated[
        ResponseFormat | None,
        described(
            'Hold the answer to a form: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": …,'
            ' "schema": …}}, whether or not "strict" is set. A schema that is wrong or uses a keyword that is not'
            " supported is refused. With `ignore_eos` or below `min_tokens` it ends only where nothing else may follow."
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, described("Hold the answer to a schema, a regular expression, a list or a grammar.")
    ] = None
    guided_json: Annotated[Raw | UnsetType, described("The older name of `structured_outputs.json`.")] = UNSET
    guided_json_object: Annotated[bool | None, described("See `structured_outputs.json_object`.")] = None
    guided_regex: Annotated[str | None, described("See `structured_outputs.regex`.")] = None
    guided_choice: Annotated[list[str] | None, described("See `structured_outputs.choice`.", minItems=1)] = None
    guided_grammar: Annotated[str | None, described("See `structured_outputs.grammar`.")] = None
    guided_whitespace_pattern: Annotated[str | None, described("See `structured_outputs.whitespace_pattern`.")] = None
    guided_decoding_backend: Annotated[str | None, described("Accepted: there is one backend, llguidance.")] = None


def format_wanted(body: Formatted) -> Format | None:
    guided = _constraints(
        "guided_",
        body.guided_json,
        body.guided_json_object,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.guided_whitespace_pattern,
    )
    return only_format([_response_format(body.response_format), _structured(body.structured_outputs), *guided])


def _response_format(wanted: ResponseFormat | None) -> Format | None:
    match wanted:
        case JsonObjectFormat():
            return _object_format(wanted)
        case JsonSchemaFormat():
            return schema_format("response_format", wanted.json_schema.schema)
    return None


def _object_format(wanted: JsonObjectFormat) -> Format:
    given = (wanted.schema, wanted.value)
    schemas = [one for one in given if isinstance(one, Raw) and bytes(one) not in (b"null", b"{}")]
    if len(schemas) > 1:
        raise BadRequest(
            "'response_format' has 'schema' and 'value', which mean the same; send one of them.",
            param="response_format.value",
        )
    return schema_format("response_format", schemas[0]) if schemas else format_of("response_format", "json_object")


def _structured(wanted: StructuredOutputs | None) -> Format | None:
    if wanted is None:
        return None
    refuse_unsupported(wanted, {"structural_tag": ()}, "structured_outputs.")
    found = only_format(
        _constraints(
            "structured_outputs.",
            wanted.json,
            wanted.json_object,
            wanted.regex,
            wanted.choice,
            wanted.grammar,
            wanted.whitespace_pattern,
            closed=bool(wanted.disable_additional_properties),
        )
    )
    if found is None:
        raise BadRequest(
            "'structured_outputs' holds no constraint; set json, json_object, regex, choice or grammar.",
            param="structured_outputs",
        )
    return found


def _constraints(
    prefix: str,
    schema: Raw | UnsetType,
    json_object: bool | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
    *,
    closed: bool = False,
) -> Iterator[Format]:
    has_schema = not isinstance(schema, UnsetType) and bytes(schema) != b"null"
    if whitespace is not None and not has_schema and not json_object:
        raise BadRequest(
            f"'{prefix}whitespace_pattern' has a meaning only with JSON; remove it.",
            param=f"{prefix}whitespace_pattern",
        )
    if closed and not has_schema:
        name = f"{prefix}disable_additional_properties"
        raise BadRequest(f"'{name}' has a meaning only with a schema; remove it.", param=name)
    spelling = whitespace or ""
    if has_schema and not isinstance(schema, UnsetType):
        yield schema_format(f"{prefix}json", schema, whitespace=spelling, closed=closed)
    if json_object:
        yield format_of(f"{prefix}json_object", "json_object", whitespace=spelling)
    if regex is not None:
        yield format_of(f"{prefix}regex", "regex", regex)
    if choice is not None:
        yield format_of(f"{prefix}choice", "choice", msgspec.json.encode(choice).decode())
    if grammar is not None:
        yield format_of(f"{prefix}grammar", "gbnf" if looks_like_gbnf(grammar) else "lark", grammar)
