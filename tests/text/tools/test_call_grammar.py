"""Calls drawn within a format's grammar are read by its parser, and conform to the functions' schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from text.grammar.answers import accepts, draw_answer
from text.tools.test_parser import parsed

from millrace.params.grammar import Grammar
from millrace.text.answer_parser import AnswerForm
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.grammar import forced_calls, strict_calls
from millrace.text.tools.written import write_calls

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "short": {"type": ["string", "null"], "maxLength": 4},
        "day": {"$ref": "#/$defs/day"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "free": {"type": "string"},
    },
    "required": ["unit", "count", "code"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "string", "format": "date"}},
}
FUNCTIONS = (Function("get_weather", None, SCHEMA, is_strict=True), Function("now"))
TAGGED = sorted(name for name, spec in FORMATS.items() if spec.body == "tagged")

DRAWN = (
    "hermes",
    "cohere",
    "pythonic",
    "kimi_k2",
    "harmony",
    "qwen3_coder",
    "glm45",
    "deepseek_v32",
    "gemma4",
    "apertus",
)
"""One format of each way of writing; a draw takes a quarter of a second."""


def plain(text: str) -> int | None:
    return None


def drawn(environment: GrammarEnvironment, tokenizer: Tokenizer, name: str, source: str) -> list[list[Any]]:
    found = []
    for seed in range(4):
        answer = draw_answer(environment, Grammar("lark", source), tokenizer, seed, max_tokens=150)
        if answer is not None:
            found.append(parsed(AnswerForm(FORMATS[name], FUNCTIONS), [answer]))
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_calls_conform(environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str) -> None:
    schema = {**SCHEMA, "properties": {key: one for key, one in SCHEMA["properties"].items() if key != "free"}}
    functions = (Function("get_weather", None, schema), FUNCTIONS[1])
    source = forced_calls(FORMATS[name], functions, plain, max_calls=2)
    answers = drawn(environment, default_tokenizer, name, source)
    assert len(answers) > 1
    for answer in answers:
        assert 1 <= len(answer) <= 2, answer
        for call in answer:
            assert len(call) == 2, call  # Not cut.
            if call[0] == "get_weather":
                jsonschema.validate(json.loads(call[1]), schema)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_written_is_allowed(environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str) -> None:
    """Also where calls are only possible: after free text, up to the end of the call."""
    arguments = {"unit": "celsius", "count": 3, "code": "AB", "day": "2024-02-03", "tags": ["a"]}
    if FORMATS[name].body != "python":
        arguments["free"] = "2 < 3 </p>\n\n x"
    text = write_calls(FORMATS[name], [("get_weather", arguments)]).removesuffix("<|call|>")
    grammar = Grammar("lark", forced_calls(FORMATS[name], FUNCTIONS, plain, max_calls=1))
    assert accepts(environment, grammar, default_tokenizer, text)
    assert not accepts(environment, grammar, default_tokenizer, text.replace("celsius", "kelvin"))
    strict = strict_calls(FORMATS[name], FUNCTIONS, plain, max_calls=1)
    if strict is not None:
        said = "" if name == "harmony" else "Well, 2 < 3.\n"
        head = FORMATS[name].answer_head
        assert accepts(environment, Grammar("lark", strict), default_tokenizer, f"{said}{text}")
        assert accepts(environment, Grammar("lark", strict), default_tokenizer, f"{head}Just text.")
        wrong = f"{said}{text.replace('celsius', 'kelvin')}"
        assert not accepts(environment, Grammar("lark", strict), default_tokenizer, wrong)


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ({"properties": {"a<b": {}}}, "a<b"),
        ({"properties": {"a": {"type": "string", "format": "idn-email"}}}, "idn-email"),
    ],
)
def test_what_arguments_one_by_one_cannot_express_is_refused(name: str, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        forced_calls(FORMATS[name], [Function("f", None, {"type": "object", **schema})], plain, max_calls=1)


def test_optional_strings_and_numbers_without_quotes() -> None:
    properties = {
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"type": "number"},
        "any": {},
        "flag": {"type": "boolean"},
        "either": {"type": ["integer", "string"]},
    }
    form = AnswerForm(FORMATS["glm45"], [Function("f", None, {"type": "object", "properties": properties})])
    for key, text, value in [
        ("maybe", "null", None),
        ("maybe", "42", "42"),
        ("number", "42", 42),
        ("number", "4.5", 4.5),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "a b", "a b"),
        ("flag", "True", True),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("either", "[1]", "[1]"),
        ("unknown", "NaN", "NaN"),
    ]:
        written = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        [(_, arguments)] = parsed(form, [written])
        assert json.loads(arguments) == {key: value}, (key, text)
