"""`suffix` over HTTP with a vocabulary like Qwen's: the prompt goes around it, in both APIs that have it."""

from __future__ import annotations

from array import array

import pytest
from serve.front_under_test import END, byte_tokenizer, running_front, saying
from serve.wire import post
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from millrace.text.tokenizers.tokenizer import Tokenizer

pytestmark = pytest.mark.live

NAMES = ("<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


def qwen_like() -> Tokenizer:
    backend = Backend.from_str(byte_tokenizer().to_json())
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    return Tokenizer(backend, end_token_ids=(END,))


def test_the_prompt_goes_around_the_answer() -> None:
    tokenizer = qwen_like()
    prefix, middle, suffix = (tokenizer.token_id(name) for name in NAMES[1:])
    with running_front(saying("x + y"), tokenizer=tokenizer) as front:
        asked = {"prompt": ["def f(x, y):\n    return ", "é"], "suffix": "\n# end", "echo": False}
        reply = post(front.port, "/v1/completions", asked)
        assert reply.status == 200, reply.body
        assert [choice["text"] for choice in reply.json["choices"]] == ["x + y"] * 2
        sent = [list(array("i", request.prompt)) for request in front.engine.received]
        for ids, text in zip(sent, asked["prompt"], strict=True):  # type: ignore[call-overload]
            assert (ids[0], ids[-1]) == (prefix, middle)
            cut = ids.index(suffix)
            assert bytes(ids[1:cut]).decode() == text
            assert bytes(ids[cut + 1 : -1]).decode() == "\n# end"
        ollama = {"model": front.state.model_name, "prompt": "a", "suffix": "b", "stream": False}
        assert post(front.port, "/api/generate", ollama).json["response"] == "x + y"
        assert list(array("i", front.engine.received[-1].prompt)) == [prefix, 97, suffix, 98, middle]
