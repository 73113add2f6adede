"""Markers that grammars match by id: the tokenizer and llguidance agree which tokens these are; all can be drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.marker_shapes import KINDS, SHAPES, Kind, tokenizer_of
from text.grammar.answers import accepts
from text.small_vocabularies import small_byte_level, small_sentence_piece
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from millrace.params.grammar import Grammar
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.grammar import forced_calls, strict_calls
from millrace.text.tools.written import write_calls

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
FUNCTIONS = (Function("f", None, SCHEMA, is_strict=True),)
TOKENS = {
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "hy_v3": ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>", "</arg_value>"),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "deepseek_v32": ("｜DSML｜",),
    "step3": ("<｜tool_calls_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "</steptml:parameter>"),
    "solar_open2": ("<|tool_call:start|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
}
"""Formats with markers inside of calls, or with an opening of several parts; which of their parts are tokens."""


def check_agreement(tokenizer: Tokenizer) -> None:
    inner = GrammarEnvironment(tokenizer, tokenizer.vocab_size).tokens
    special = {index for index in range(tokenizer.vocab_size) if inner.is_special_token(index)}
    # Ids without a token, and a byte that is never part of UTF-8.
    no_text = {index for index in special if tokenizer.token_bytes(index) in (b"", b"\xff")}
    assert special - no_text == tokenizer.marker_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_tokenizer_and_llguidance_agree(tmp_path: Path, name: str, kind: Kind) -> None:
    tokenizer = tokenizer_of(tmp_path, name, kind)
    check_agreement(tokenizer)
    for marker in SHAPES[name].markers:
        is_marker = kind == "special" or (kind == "added" and marker.startswith("<"))
        assert (tokenizer.marker_id(marker) is not None) == is_marker, marker


@pytest.mark.parametrize("make", [small_byte_level, small_sentence_piece])
def test_they_agree_on_gguf_vocabularies(make: Callable[[], Tokenizer]) -> None:
    check_agreement(make())


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", TOKENS)
def test_every_marker_of_a_call_may_be_a_token(name: str, is_special: bool) -> None:
    """Each is drawn as its token, in forced calls and after text, up to the first value that is wrong."""
    backend = Backend.from_str(small_byte_level().to_json())
    backend.add_tokens(
        [AddedToken(text, special=is_special or "<" not in text, normalized=False) for text in TOKENS[name]]
    )
    end = backend.token_to_id("<|im_end|>")
    tokenizer = Tokenizer(backend, end_token_ids=(end,))
    environment = GrammarEnvironment(tokenizer, tokenizer.vocab_size)
    spec = FORMATS[name]
    call = write_calls(spec, [("f", {"a": "1 < 2", "b": "x"})])
    wrong = write_calls(spec, [("f", {"a": "1 < 2", "b": "z"})])
    markers = {tokenizer.token_id(text) for text in TOKENS[name]}
    assert len(markers & set(tokenizer.encode(call))) == len([text for text in TOKENS[name] if text in call])
    forced = Grammar("lark", forced_calls(spec, FUNCTIONS, tokenizer.marker_id, max_calls=1))
    strict = strict_calls(spec, FUNCTIONS, tokenizer.marker_id, max_calls=1)
    assert strict is not None
    auto = Grammar("lark", strict)
    assert accepts(environment, forced, tokenizer, call)
    assert not accepts(environment, forced, tokenizer, wrong)
    assert accepts(environment, auto, tokenizer, f"Well, 2 < 3.\n{call}")
    assert accepts(environment, auto, tokenizer, "Just < text.")
    assert not accepts(environment, auto, tokenizer, f"Well.\n{wrong}")
