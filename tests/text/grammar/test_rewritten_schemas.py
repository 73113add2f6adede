"""Keywords that llguidance does not read, or reads wrongly: answers follow the schema as it was sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

import msgspec
import pytest
from text.grammar.answers import accepts, allowed, of, spelled
from text.grammar.schemas import INTEGER, STRING

from millrace.errors import BadRequest
from millrace.params.grammar import Grammar
from millrace.text.grammar.check import GrammarCheck
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.grammar.inline import checked_schema
from millrace.text.grammar.patterns import ascii_classes
from millrace.text.grammar.python_types import grammar_of
from millrace.text.tokenizers.stand_in import build_stand_in
from millrace.text.tokenizers.tokenizer import Tokenizer

CHECK = GrammarCheck()
COLOURS = {"$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"}}, "type": "object"}
ASCII_WORD = {"type": "string", "pattern": r"^\d[\w.-]$"}
UINT64, LARGE = 2**64 - 1, 999_999_999_999_999_999

REWRITTEN: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "listed names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "names by reference": (
        {**COLOURS, "propertyNames": {"$ref": "#/$defs/Colour"}, "additionalProperties": INTEGER},
        [{"red": 1}],
        [{"green": 1}],
    ),
    "texts as names": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        [{"x y": 1}],
        [{"x": "y"}],
    ),
    "matched names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"ba": 1}]),
    "names by length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1}, {"äöü": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "unevaluated properties": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "unevaluated items": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": STRING},
        [[1, "a"]],
        [[1, 2]],
    ),
    "names and unevaluated properties": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "unevaluatedProperties": INTEGER},
        [{"a": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    "one unique item": ({"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    "all 64-bit integers": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, 2**62, -(2**62)],
        [2**63, -(2**63) - 1],
    ),
    "unsigned integers": ({"type": "integer", "minimum": 0, "maximum": UINT64}, [0, 2**62], [-1, UINT64 + 1]),
    "a bound that no float holds": ({"type": "integer", "maximum": LARGE}, [LARGE - 999], [LARGE + 1]),
    "an exclusive bound": (
        {"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 7},
        [2**53 + 4],
        [2**53, 2**53 + 8],
    ),
    "above zero": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, [0.1, 0.001], [0, 0.0, 0.2]),
    "above one": ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5, "type": "number"}, [1.25, 1.001], [1, 1.5]),
    "below zero": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.25], [-0.0, 0, -1]),
    "a number's bounds": ({"type": "number", "minimum": -1e30, "maximum": 1e30}, [-2.5], ["a"]),
    "digits": (ASCII_WORD, ["1a", "2-", "3."], ["١a", "1é", "🯸a"]),
    "counts as floats": ({"type": "array", "items": INTEGER, "minItems": 1.0, "maxItems": 2e0}, [[1]], [[], [1, 2, 3]]),
    "digits in names": ({"type": "object", "patternProperties": {r"^\d$": {}}}, [{"1": 2}], []),
    "an older dialect": (
        {"$schema": "https://json-schema.org/draft-07/schema#", "type": "array", "items": [INTEGER]},
        [[1]],
        [["a"]],
    ),
    "no version": ({"$schema": "http://json-schema.org/schema#", "type": "integer"}, [1], ["a"]),
    "a large value": ({"const": 2**53 + 2}, [2**53 + 2], [2**53]),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_answers_follow_the_schema_as_sent(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str
) -> None:
    schema, good, bad = REWRITTEN[name]
    CHECK.check(of(schema))
    for value in good:
        assert accepts(environment, of(schema), default_tokenizer, spelled(value)), value
    for value in bad:
        assert not accepts(environment, of(schema), default_tokenizer, spelled(value)), value


def test_minus_zero_is_not_below_zero(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    schema = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
    assert accepts(environment, of(schema), default_tokenizer, "-0.5")
    assert not accepts(environment, of(schema), default_tokenizer, "-0")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": 2**53 + 1}, "the value 9007199254740993, which is not supported"),
        ({"enum": [1, {"a": [12345678901234567890]}]}, "the value 12345678901234567890"),
        ({"type": "integer", "minimum": 10**400}, "uses 'minimum' 1000"),
        ({"type": "number", "exclusiveMaximum": -1e19}, "uses 'exclusiveMaximum' -1e+19"),
        ({"type": "integer", "multipleOf": 10**400}, "uses 'multipleOf' 1000"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "'propertyNames'"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["b"]}}, "'propertyNames'"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"type": "string", "pattern": "(?!a)b"}, "look-around in a regular expression, which is not"),
    ],
)
def test_what_cannot_be_written_otherwise_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(GrammarError) as raised:
        CHECK.check(of(schema))
    assert said in str(raised.value)
    assert len(str(raised.value)) < 200


def test_listed_names_do_not_multiply() -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(6):
        schema = {"propertyNames": {"enum": [str(index) for index in range(30)]}, "additionalProperties": schema}
    assert len(json.dumps(checked_schema(json.dumps(schema)))) < 100_000
    with pytest.raises(GrammarError, match="propertyNames"):
        CHECK.check(of(schema))


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        (r"^\d+$", "^[0-9]+$"),
        (r"[\d.-]\w", "[[:digit:].-][0-9A-Za-z_]"),
        (r"[^\d]\D\W[^a[\w]]", r"[^\d]\D\W[^a[\w]]"),
        (r"\\d\\\d]\d", r"\\d\\[0-9]][0-9]"),
        (r"[a\]\d]\[\d", r"[a\][:digit:]]\[[0-9]"),
        (r"[\w--\d]", r"[\w--\d]"),
        ("a--b", "a--b"),
    ],
)
def test_classes_of_ascii_characters(pattern: str, rewritten: str) -> None:
    assert ascii_classes(pattern) == rewritten


def test_digits_of_regular_expressions(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", r"^\d\w$")
    assert accepts(environment, grammar, default_tokenizer, "1é")
    assert not accepts(environment, grammar, default_tokenizer, "١a")


def test_whitespace_is_that_of_json(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    for pattern in (r"\s?", r"[\s]?"):
        grammar = Grammar("json_schema", '{"type": "array", "items": {"type": "null"}}', whitespace=pattern)
        assert accepts(environment, grammar, default_tokenizer, "[\nnull ]")
        assert not accepts(environment, grammar, default_tokenizer, "[\u2003null]")


def _plain_end() -> Tokenizer:
    """Its end token has text, as in a file that does not mark it as special."""
    return build_stand_in({"vocab_size": 300, "eos_token_id": 299})


def _hidden_token() -> Tokenizer:
    """Decoding hides a token that the vocabulary does not mark as special."""
    plain = _plain_end()
    # No loader makes such a tokenizer from a whole file.
    return Tokenizer(plain.backend, end_token_ids=plain.end_token_ids, special_ids=frozenset((298,)))


@pytest.mark.parametrize(("build", "wrong"), [(_plain_end, 299), (_hidden_token, 298)])
def test_end_tokens_and_hidden_tokens_are_no_text(build: Callable[[], Tokenizer], wrong: int) -> None:
    """An end token inside a string would cut the answer, and a hidden one would be missing in it."""
    tokenizer = build()
    environment = GrammarEnvironment(tokenizer, tokenizer.vocab_size)
    matcher = environment.compile(of(STRING)).matcher()
    matcher.consume(tokenizer.encode('"a'))
    tokens = set(allowed(matcher, environment.num_words))
    assert 297 in tokens
    assert wrong not in tokens
    matcher.consume(tokenizer.encode('"'))
    assert 299 in set(allowed(matcher, environment.num_words))


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Amount(msgspec.Struct):
    value: Decimal


@pytest.mark.parametrize("described", [Point | None, list[Point], dict[str, Amount], Literal["a", "b"]])
def test_types_made_of_types(described: Any) -> None:
    grammar = grammar_of(schema=described)
    assert grammar is not None
    CHECK.check(grammar)


def test_types_made_of_pydantic_models(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Item", name=(str, ...))
    for described in (list[model], pydantic.TypeAdapter(list[model])):
        grammar = grammar_of(schema=described)
        assert grammar is not None
        assert accepts(environment, grammar, default_tokenizer, '[{"name": "a"}]')
        assert not accepts(environment, grammar, default_tokenizer, '[{"name": "a", "other": 1}]')


def test_a_value_is_no_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    with pytest.raises(BadRequest, match="describes no JSON"):
        grammar_of(schema=[{"type": "integer"}])
