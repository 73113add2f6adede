"""Grammars in llguidance's form, and llguidance's errors as sentences for the client."""

from __future__ import annotations

import json
import re

import msgspec
from llguidance import LLMatcher, LLParserLimits

from millrace.params import Grammar
from millrace.text.grammar.compiler import GrammarError

ANY_OBJECT = '{"type": "object"}'
_OPTIONS_KEY = "x-guidance"
_MAX_SHOWN_CHARS = 300


def limits() -> LLParserLimits:
    """llguidance's own limits on size and work per call; its errors would otherwise quote the whole grammar."""
    return LLParserLimits(verbose_errors=False)


def check_grammar(grammar: Grammar) -> None:
    """Compile without a vocabulary: finds everything that is wrong with the grammar itself."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(guidance_source(grammar), None, limits=limits())
    if is_error:
        raise GrammarError(sentence_of(messages[0]))


def guidance_source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    schema = ANY_OBJECT if grammar.kind == "json_object" else grammar.source
    _check_top_level(schema)
    try:
        # One fixed spelling of JSON: where whitespace is free, a small model may write it without end.
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    except ValueError as error:
        raise GrammarError(sentence_of(str(error))) from None


def _check_top_level(schema: str) -> None:
    try:
        fields = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise GrammarError('The schema is not a JSON object; send one, such as {"type": "object"}.') from None
    if _OPTIONS_KEY in fields:
        raise GrammarError(f"The schema contains {_OPTIONS_KEY!r}, which is not supported; remove it.")


def sentence_of(problem: str) -> str:
    """What llguidance said, as a sentence that names the cause."""
    place = re.search(r"while processing json-schema://\S*?(#\S*)", problem)
    what = problem.split("\n  while processing", maxsplit=1)[0]
    where = f" (at {place[1]})" if place else ""
    return _sentence(" ".join(what.split()), where)


def _sentence(problem: str, where: str) -> str:
    if found := re.match(r"Unimplemented keys: (\[.*\])", problem):
        names = ", ".join(repr(name) for name in json.loads(found[1]))
        return f"The schema uses {names}{where}, which is not supported; remove it."
    if found := re.match(r"Unknown format: (.*)", problem):
        return f"The schema uses the format {found[1]!r}{where}, which is not supported; remove it or use a pattern."
    if problem.startswith("oneOf constraints"):
        return f"The schema uses 'oneOf' whose alternatives may overlap{where}, which is not supported; use 'anyOf'."
    if "recursion limit" in problem:
        return "The schema is nested too deeply; send fewer levels."
    if len(problem) > _MAX_SHOWN_CHARS:
        problem = problem[:_MAX_SHOWN_CHARS] + "…"
    return f"The schema cannot be used{where}: {problem.rstrip('.')}."
