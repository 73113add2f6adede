"""Every kind of grammar: what it accepts, what it refuses, and how it begins after a marker."""

from __future__ import annotations

import json
import re

import pytest
from text.grammar.answers import accepts, draw_answer
from text.grammar.schemas import INTEGER, NEUTRAL, NOT_ENFORCED, record

from millrace.params.grammar import Grammar
from millrace.text.grammar.check import GrammarCheck
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.grammar.gbnf import lark_of_gbnf, looks_like_gbnf
from millrace.text.grammar.inline import inline_schema
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.reasoning.preamble import preamble
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.grammar import forced_calls

CHECK = GrammarCheck()
AGE = json.dumps(record({"age": INTEGER}))
SUM_GBNF = r"""
# a sum
root ::= term (op term)*
op ::= [-+*/] | "\u00d7"
term ::= number | "(" root ")"
number ::= [0-9]+ ("." [0-9]{1,2})?
"""
CHOICES = ["yes", "yes please", 'quo"te\\', "é\n/x", "", "\x00[a]"]

KINDS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "regex": (Grammar("regex", r"\d{3}-[a-f/]+"), ["123-af", "123-a/"], ["12-a", "123-", "x123-a", "123-ag"]),
    "anchored regex": (Grammar("regex", r"^(yes|no)$"), ["yes", "no"], ["yesno", "^yes$"]),
    "choice": (Grammar("choice", json.dumps(CHOICES)), CHOICES, ["ye", "no", "a"]),
    "lark": (
        Grammar("lark", 'start: "[" start "]" | WORD\nWORD: /[a-z]+/'),
        ["word", "[[word]]"],
        ["[[word]", "[]", "Word"],
    ),
    "lark with a schema": (
        Grammar("lark", f'start: "<call>" args "</call>"\nargs: {inline_schema(AGE)}'),
        ['<call>{"age": 3}</call>'],
        ['<call>{"age":3}</call>', '<call>{"age": "x"}</call>', '{"age": 3}'],
    ),
    "gbnf": (Grammar("gbnf", SUM_GBNF), ["1", "1+2.55", "(1×2)/3"], ["1+", "2.555", "1 + 2", "(1"]),
    "whitespace": (
        Grammar("json_schema", AGE, whitespace=r"[ \n]{1,2}"),
        ['{"age":3}', '{ "age":  3\n}'],
        ['{"age":   3}', '{"age":\t3}'],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str) -> None:
    grammar, good, bad = KINDS[name]
    CHECK.check(grammar)
    for text in good:
        assert accepts(environment, grammar, default_tokenizer, text), text
    for text in bad:
        assert not accepts(environment, grammar, default_tokenizer, text), text


SPECIAL = "<|im_start|>"
THINK = ReasoningFormat("think", "<think>", "</think>")
MARKS = {
    "text": THINK,
    "special end": ReasoningFormat("x", "<think>", SPECIAL),
    "special": ReasoningFormat("y", "<repo_name>", SPECIAL),
}


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", KINDS)
def test_kinds_after_reasoning(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str, marks: str
) -> None:
    """Some markers are text, some are special tokens. Reasoning that the prompt has not begun may be left out."""
    plain, good, bad = KINDS[name]
    spec = MARKS[marks]
    for is_open in (True, False):
        before = preamble(spec, default_tokenizer.marker_id, is_open=is_open)
        grammar = Grammar(plain.kind, plain.source, after=before, whitespace=plain.whitespace)
        CHECK.check(grammar)
        opening = "" if is_open else spec.start
        for text in good:
            for break_ in ("", "\n", "\n\n"):
                thought = f"{opening}So </thin {text}, hm\n\n{spec.end}{break_}"
                assert accepts(environment, grammar, default_tokenizer, thought + text), text
        assert accepts(environment, grammar, default_tokenizer, good[0]) != is_open
        assert accepts(environment, grammar, default_tokenizer, f"{spec.start}a{spec.end}{good[0]}")
        for text in bad:
            assert not accepts(environment, grammar, default_tokenizer, f"{opening}x{spec.end}{text}"), text


def test_reasoning_cannot_end_the_answer(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    before = preamble(THINK, default_tokenizer.marker_id, is_open=True)
    matcher = environment.compile(Grammar("json_object", after=before)).matcher()
    matcher.consume(default_tokenizer.encode("I could stop here.", add_special=False))
    assert not matcher.may_end
    matcher.consume(default_tokenizer.encode("</think>\n\n{}", add_special=False))
    assert matcher.is_done


def test_random_choices(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    grammar = Grammar("choice", json.dumps(CHOICES))
    answers = {draw_answer(environment, grammar, default_tokenizer, seed) for seed in range(20)}
    assert answers <= set(CHOICES)
    assert len(answers) > 2


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (Grammar("regex", r"\bx"), "The regular expression uses a word boundary, which is not supported"),
        (Grammar("regex", "a$b"), "'$' before its end"),
        (Grammar("regex", "a^b"), "'^' after its start"),
        (Grammar("regex", "(("), "unclosed group"),
        (Grammar("choice", "[]"), "empty"),
        (Grammar("choice", '["a", 1]'), "not a JSON array of strings"),
        (Grammar("lark", "start: other"), "other"),
        (Grammar("lark", "root: /a/"), "start"),
        (Grammar("lark", 'start: x "b"\nx[stop="b"]: /.*/'), "'stop', which is not supported"),
        (Grammar("lark", "start: x\nx[temperature=0.5]: /.*/"), "'temperature'"),
        (Grammar("lark", 'start: %json {"not": {}}'), "'not'"),
        (Grammar("lark", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
        (Grammar("gbnf", 'start ::= "a"'), "root"),
        (Grammar("gbnf", 'root ::= "a'), "The GBNF grammar cannot be read"),
        (Grammar("gbnf", "root ::= " + "(" * 5000), "nested too deeply"),
        (Grammar("gbnf", "root ::= other"), "other"),
        (Grammar("json_object", whitespace="("), "unclosed group"),
    ],
)
def test_what_cannot_be_used_is_named(grammar: Grammar, said: str) -> None:
    with pytest.raises(GrammarError) as raised:
        CHECK.check(grammar)
    assert said in str(raised.value)


def test_a_regular_expression_that_backtracks_elsewhere_is_fast(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer
) -> None:
    assert accepts(environment, Grammar("regex", "(a+)+$"), default_tokenizer, "a" * 500)


def test_notations_are_told_apart() -> None:
    assert looks_like_gbnf(SUM_GBNF)
    assert not looks_like_gbnf('start: "::=" x\nx: "a ::= b"')


def test_the_gbnf_of_a_json_value(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    source = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
    lark_of_gbnf(source)
    grammar = Grammar("gbnf", source)
    for text in ('{"a": [1, -2.5, {"b": null}], "c": "\\u00e9\\n"}', "{}", '{"a":1}'):
        assert accepts(environment, grammar, default_tokenizer, text), text
    for text in ('{"a": 01}', "[1]", '{"a": "\n"}'):
        assert not accepts(environment, grammar, default_tokenizer, text), text


@pytest.mark.parametrize("name", NOT_ENFORCED)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(name)):
        CHECK.check(Grammar("json_schema", json.dumps(NOT_ENFORCED[name])))


@pytest.mark.parametrize("schema", NEUTRAL)
def test_keywords_without_effect_are_accepted(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, schema: dict[str, object]
) -> None:
    assert accepts(environment, Grammar("json_schema", json.dumps(schema)), default_tokenizer, "[1]")


def test_names_and_values_are_not_keywords() -> None:
    schema = record({"uniqueItems": {"const": {"minProperties": 5}}, "minProperties": {"enum": [{"not": 1}]}})
    CHECK.check(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("given", "is_allowed"),
    [("", True), ("a=1", True), ("a=1, c=3", True), ("b=2, c=3", True), ("a=1, b=2, c=3", True), ("c=3, a=1", False)],
)
def test_python_calls_with_optional_arguments_only(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, given: str, is_allowed: bool
) -> None:
    function = Function("f", parameters={"properties": {name: {"type": "integer"} for name in "abc"}})
    source = forced_calls(FORMATS["pythonic"], [function], lambda text: None, max_calls=1)
    assert accepts(environment, Grammar("lark", source), default_tokenizer, f"[f({given})]") == is_allowed
