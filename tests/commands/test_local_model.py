"""`chat` and `generate` with the default model in this process, with and without a terminal."""

from __future__ import annotations

import json

import pytest
from helpers.terminal import on_terminal

from millrace.cli import main

pytestmark = pytest.mark.live

QUICK = ["--dtype", "float32", "--kv-tokens", "4096", "--threads", "1"]


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", *options, *QUICK]) == 0
    return capsys.readouterr().out


def test_generate_is_reproducible_and_json_equals_text(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("The capital of France is", "--temperature", "0", "--max-tokens", "12")
    text = generate(capsys, *ask)
    assert "Paris" in text
    answer = json.loads(generate(capsys, *ask, "--json"))
    assert answer["text"] + "\n" == text
    assert answer["output_tokens"] == 12
    assert answer["finish_reason"] == "length"
    assert answer["model"] == "smollm2-135m-instruct"


def test_generate_through_the_chat_template_ends_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(capsys, "--chat", "What is the capital of France?", "--temperature", "0", "--json")
    answer = json.loads(text)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"


def test_prompt_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "word " * 9000, *QUICK]) == 1
    err = capsys.readouterr().err
    assert "millrace: The prompt has" in err


def test_chat_streams_and_ctrl_c_stops_only_the_answer() -> None:
    with on_terminal(["chat", *QUICK, "--temperature", "0"]) as t:
        t.expect("Chatting with smollm2-135m-instruct", timeout_s=60)
        t.expect("you ›")
        t.type("What is the capital of France?\r")
        t.expect("Paris", timeout_s=60)
        t.expect("you ›", timeout_s=60)
        t.type("Tell me a very long story about a river, in many chapters.\r")
        t.expect("the", timeout_s=60)
        t.ctrl_c()
        t.expect("(stopped)")
        t.expect("you ›")
        t.type("/stats\r")
        t.expect("finish reason: interruption")
        t.expect("you ›")
        t.type("/clear\r")
        t.expect("you ›")
        t.type("What is the capital of France?\r")
        t.expect("Paris", timeout_s=60)
        t.expect("you ›", timeout_s=60)
        t.type("\x04")
        assert t.wait() == 0, t.screen
