"""Grammars in llguidance's form. llguidance reads a list of grammars; the first one may refer to others by name."""

from __future__ import annotations

import json
import re

import msgspec
from llguidance import LLMatcher, LLParserLimits

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.gbnf import lark_of_gbnf
from millrace.text.grammar.inline import ITEM_SEPARATOR, KEY_SEPARATOR, check_inline, checked_schema
from millrace.text.grammar.patterns import ascii_classes, literal
from millrace.text.grammar.problems import sentence_of

MAX_LEXER_STATES = 50_000
"""Of one grammar; each takes 1 to 2 KiB."""
MAX_STEP_ITEMS = 10_000
"""Work of the parser per token. A step waits for the masks of all its rows."""
ANY_OBJECT = '{"type": "object"}'
_UNSUPPORTED_IN_LARK = re.compile(r"^\s*[a-z_][\w.-]*\s*\[[^\]\n]*\b(stop|temperature)\s*=", re.MULTILINE)
"""Rule attributes that change how tokens are sampled, which a mask cannot do."""


def limits() -> LLParserLimits:
    """llguidance's own limits on size and work per call; its errors would otherwise quote the whole grammar."""
    return LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_STEP_ITEMS)


def guidance_source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it, without `after`."""
    match grammar.kind:
        case "json_object":
            return _from_schema(ANY_OBJECT, grammar)
        case "json_schema":
            return _from_schema(grammar.source, grammar)
        case "regex":
            return LLMatcher.grammar_from_regex(ascii_classes(grammar.source, "d"))
        case "choice":
            return LLMatcher.grammar_from_regex(_regex_of_choices(grammar.source))
        case "gbnf":
            return LLMatcher.grammar_from_lark(lark_of_gbnf(grammar.source))
        case "lark":
            _check_lark(grammar.source)
            return LLMatcher.grammar_from_lark(grammar.source)


def starting_after(source: str, before: str) -> str:
    """What the rule `before` allows, then the grammar `source`."""
    if source.startswith("{"):
        (answer,) = json.loads(source)["grammars"]
    else:
        answer = {"lark_grammar": source}
    return json.dumps(
        {"grammars": [{"lark_grammar": f"start: before @answer\n{before}"}, {**answer, "name": "answer"}]}
    )


def _from_schema(schema: str, grammar: Grammar) -> str:
    fields = checked_schema(schema)
    try:
        text = json.dumps(fields, allow_nan=False)
        if grammar.whitespace:
            whitespace = ascii_classes(grammar.whitespace, "s")
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ITEM_SEPARATOR,
                "key_separator": KEY_SEPARATOR,
            },
        )
    except ValueError as error:
        raise GrammarError(sentence_of(str(error), grammar.noun)) from None


def _regex_of_choices(source: str) -> str:
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise GrammarError("The choices are not a JSON array of strings.") from None
    if not choices:
        raise GrammarError("The list of choices is empty; send at least one choice.")
    return "|".join(literal(choice) for choice in choices)


def _check_lark(source: str) -> None:
    if found := _UNSUPPORTED_IN_LARK.search(source):
        raise GrammarError(f"The grammar uses the rule attribute {found[1]!r}, which is not supported; remove it.")
    check_inline(source)
