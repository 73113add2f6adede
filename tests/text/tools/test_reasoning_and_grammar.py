"""Reasoning that is open, possible or off, with a format, with forced calls or with either of them.

Every answer that a model may give can end, and is read back as what it is.
"""

from __future__ import annotations

import pytest
from text.grammar.answers import accepts
from text.tools.test_call_grammar import plain
from text.tools.test_parser import parsed

from millrace.params.grammar import Grammar
from millrace.text.answer_parser import AnswerForm
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.reasoning.formats import FORMATS as REASONING
from millrace.text.reasoning.preamble import preamble
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.grammar import answer_head, calls_or, forced_calls
from millrace.text.tools.written import write_calls

FUNCTIONS = (Function("now"),)
SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
JSON, WRONG = '{"a": 1}', '{"b": 1}'
THOUGHT = "Hm, {} is 2 < 3."


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "deepseek_v3", "harmony"])
@pytest.mark.parametrize("state", ["open", "possible", "off"])
def test_combinations(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, tool_format: str, state: str
) -> None:
    spec = FORMATS[tool_format]
    reasoning = REASONING["harmony" if tool_format == "harmony" else "think"]
    if tool_format == "harmony" and state == "open":
        pytest.skip("a prompt never opens a channel")
    head = answer_head(spec, plain)
    call = write_calls(spec, [("now", {})]).removesuffix("<|call|>")
    forced = forced_calls(spec, FUNCTIONS, plain, max_calls=1)
    either = calls_or(SCHEMA, forced, head)
    assert either is not None
    answer = spec.answer_head + JSON
    wrong = spec.answer_head + WRONG
    cases = [
        (SCHEMA, head, {answer: [JSON]}, [wrong, call]),
        (Grammar("lark", forced), "", {call: [("now", "{}")]}, [answer, "Hello."]),
        (Grammar("lark", either), "", {answer: [JSON], call: [("now", "{}")]}, [wrong, "Hello."]),
    ]
    start = "" if state == "open" else reasoning.start
    end = f"{reasoning.end}<|start|>assistant" if tool_format == "harmony" else f"{reasoning.end}\n\n"
    thought = f"{start}{THOUGHT}{end}"
    form = AnswerForm(spec, FUNCTIONS, None if state == "off" else reasoning, is_reasoning_open=state == "open")
    for grammar, before_answer, good, bad in cases:
        before = preamble(reasoning, plain, is_open=state == "open", head=before_answer)
        if state == "off":
            before = f"before: {before_answer}" if before_answer else ""
        held = Grammar(grammar.kind, grammar.source, after=before)
        for text, expected in good.items():
            thinking = accepts(environment, held, default_tokenizer, thought + text)
            assert thinking == (state != "off"), text
            assert accepts(environment, held, default_tokenizer, text) == (state != "open"), text
            if state != "off":
                assert parsed(form, list(thought + text)) == [("think", THOUGHT), *expected]
            if state == "possible":
                assert parsed(form, [text]) == expected
        for text in bad:
            assert not accepts(environment, held, default_tokenizer, text), text
            assert not accepts(environment, held, default_tokenizer, thought + text), text
