"""Text of one choice; stop strings match the text that the client sees."""

from __future__ import annotations

import pytest

from millrace.params.sampling import SamplingParams
from millrace.text.text_stream import TextStream
from millrace.text.tokenizers.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, text: str, **params: object) -> tuple[str, TextStream]:
    stream = TextStream(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    shown = "".join(map(stream.push, tokenizer.encode(text)))
    return shown + stream.finish(), stream


def test_without_stop_strings(default_tokenizer: Tokenizer) -> None:
    shown, stream = run(default_tokenizer, "Hello 👍🏽 wörld\n")
    assert shown == "Hello 👍🏽 wörld\n"
    assert stream.stopped_by is None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(default_tokenizer: Tokenizer, include: bool) -> None:
    text = "One two three. Four five"
    shown, stream = run(default_tokenizer, text, stop=("ee. Fo",), include_stop_str_in_output=include)
    assert shown == ("One two three. Fo" if include else "One two thr")
    assert stream.stopped_by == "ee. Fo"
    assert stream.push(100) == ""
    assert stream.finish() == ""


def test_stop_strings_match_the_visible_text(default_tokenizer: Tokenizer) -> None:
    text = "Hello<|im_end|> world"
    assert run(default_tokenizer, text, stop=("<|im_end|>",))[0] == "Hello world"
    assert run(default_tokenizer, text, stop=("<|im_end|>",), skip_special_tokens=False)[0] == "Hello"
    assert run(default_tokenizer, text, stop=("o w",))[0] == "Hell"
    assert run(default_tokenizer, text, skip_special_tokens=False)[0] == text


def test_end_of_stream_releases_held_text(default_tokenizer: Tokenizer) -> None:
    stream = TextStream(default_tokenizer, SamplingParams(stop=("world peace",)))
    shown = "".join(map(stream.push, default_tokenizer.encode("Hello world")))
    assert shown == "Hello "
    assert stream.finish() == "world"
    assert stream.stopped_by is None


def test_end_of_stream_can_complete_a_stop_string(default_tokenizer: Tokenizer) -> None:
    stream = TextStream(default_tokenizer, SamplingParams(stop=("world peace", "world")))
    shown = "".join(map(stream.push, default_tokenizer.encode("Hello world")))
    assert shown + stream.finish() == "Hello "
    assert stream.stopped_by == "world"


def test_stop_string_after_an_incomplete_character(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("ab👍")[:-1]
    stream = TextStream(default_tokenizer, SamplingParams(stop=("b\ufffd",)))
    assert "".join(map(stream.push, ids)) + stream.finish() == "a"
    assert stream.stopped_by == "b\ufffd"
