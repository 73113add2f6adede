"""The real server with the default model, through the stock client and plain HTTP."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from contract.real_server import TINY, RealServer, kv_used, real_server, tiny_model
from contract.schema_check import DOCUMENT, problems, schemas
from serve.wire import (
    CHAT,
    COMPLETIONS,
    chat_text,
    completion_text,
    connected,
    events,
    eventually,
    post,
    raw_post,
    read_all,
    stream,
)

from millrace.cli import main

pytestmark = pytest.mark.live

MODEL = "smollm2-135m-instruct"
PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "def fibonacci(n):",
    "Répondez en français: quelle heure est-il?",
    "数を三つ挙げてください。🌊",
    "Count from one to ten.",
]


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


def chat(content: str = PROMPTS[0], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def text(prompt: Any = "The sea is", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}


def conforms(value: Any, name: str) -> None:
    if DOCUMENT.exists():
        assert problems(value, {"$ref": name}, schemas()) == []


def test_streams_that_run_at_once_equal_whole_answers_alone(server: RealServer) -> None:
    """Greedy answers: one at a time and whole, then twice each, streamed and all at once."""
    asked = [chat(prompt) for prompt in PROMPTS]
    alone = [post(server.port, CHAT, body).json for body in asked]
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        options = {"stream_options": {"include_usage": True}}
        streamed = list(pool.map(lambda body: stream(server.port, CHAT, {**body, **options}), asked * 2))
    for whole, chunks in zip(alone * 2, streamed, strict=True):
        conforms(whole, "CreateChatCompletionResponse")
        for chunk in chunks:
            conforms(chunk, "CreateChatCompletionStreamResponse")
        assert chat_text(chunks) == whole["choices"][0]["message"]["content"]
        assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert whole["choices"][0]["message"]["content"].strip()


def test_the_stock_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("Name the capital of France."))
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.system_fingerprint
    with client.chat.completions.stream(**chat("Say hello.", n=2, max_tokens=60)) as events_of_stream:
        final = events_of_stream.get_final_completion()
    assert final.choices[0].message.content == final.choices[1].message.content
    completion = client.completions.create(**text())
    assert completion.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_repeated_prompt_is_cached(server: RealServer) -> None:
    long = "Tell me about water. " * 16
    first = post(server.port, CHAT, chat(long, max_tokens=2, cache_salt="fresh")).json["usage"]
    second = post(server.port, CHAT, chat(long, max_tokens=2, cache_salt="fresh")).json["usage"]
    other = post(server.port, CHAT, chat(long, max_tokens=2, cache_salt="other")).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens"] // 2
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_seeds(server: RealServer) -> None:
    def said(**fields: Any) -> list[str]:
        choices = post(server.port, CHAT, chat(max_tokens=12, **{"temperature": 1.0, **fields})).json["choices"]
        return [choice["message"]["content"] for choice in choices]

    two = said(seed=7, n=2)
    assert said(seed=7, n=2) == two
    assert said(seed=8) == two[1:]
    assert len(set(said(n=4, temperature=50.0))) == 4, "almost uniform over the vocabulary, so never twice the same"


def test_stop_strings(server: RealServer) -> None:
    whole = post(server.port, COMPLETIONS, text(max_tokens=30)).json["choices"][0]["text"]
    stop = whole[10:14]
    cut = post(server.port, COMPLETIONS, text(max_tokens=30, stop=stop)).json
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    kept = post(server.port, COMPLETIONS, text(max_tokens=30, stop=stop, include_stop_str_in_output=True)).json
    assert kept["choices"][0]["text"] == whole[: whole.index(stop)] + stop
    assert (
        completion_text(stream(server.port, COMPLETIONS, text(max_tokens=30, stop=stop))) == cut["choices"][0]["text"]
    )


def test_logprobs_are_probabilities(server: RealServer) -> None:
    answer = post(server.port, CHAT, chat(logprobs=True, top_logprobs=5, max_tokens=8)).json
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    for entry in content:
        assert entry["logprob"] <= 0
        assert entry["token"] == entry["top_logprobs"][0]["token"], "greedy takes the likeliest"
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1.0001
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_scoring_agrees_with_generating(server: RealServer) -> None:
    """A text has the same log-probabilities as output and as prompt."""
    generated = post(server.port, COMPLETIONS, text(logprobs=0, return_token_ids=True)).json["choices"][0]
    ids = generated["prompt_token_ids"] + generated["token_ids"]
    scored = post(server.port, COMPLETIONS, text(ids, echo=True, logprobs=0, max_tokens=0)).json["choices"][0]
    count = len(generated["token_ids"])
    ours, theirs = generated["logprobs"]["token_logprobs"], scored["logprobs"]["token_logprobs"][-count:]
    assert ours == pytest.approx(theirs, abs=2e-3)
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["text"] == "The sea is" + generated["text"]
    assert scored["finish_reason"] == "length"


def test_lengths_and_finish_reasons(server: RealServer) -> None:
    hello = post(server.port, CHAT, chat("Say hello.", max_tokens=60)).json
    assert hello["choices"][0]["finish_reason"] == "stop"
    longer = post(server.port, CHAT, chat("Say hello.", max_tokens=60, ignore_eos=True)).json
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == 60
    least = hello["usage"]["completion_tokens"] + 5
    more = post(server.port, CHAT, chat("Say hello.", max_tokens=100, min_tokens=least)).json
    assert more["usage"]["completion_tokens"] >= least
    assert post(server.port, CHAT, chat(max_tokens=1)).json["usage"]["completion_tokens"] == 1


def test_logit_bias(server: RealServer) -> None:
    [token] = post(server.port, "/tokenize", {"prompt": " banana", "add_special_tokens": False}).json["tokens"][:1]
    answer = post(
        server.port, COMPLETIONS, text(logit_bias={str(token): 100}, return_token_ids=True, max_tokens=3)
    ).json
    assert answer["choices"][0]["token_ids"] == [token] * 3


def test_bad_words_and_allowed_tokens(server: RealServer) -> None:
    plain = post(server.port, COMPLETIONS, text(max_tokens=16)).json["choices"][0]["text"]
    word = plain.split()[2]
    asked = text(max_tokens=16, bad_words=[word])
    without = post(server.port, COMPLETIONS, asked).json["choices"][0]["text"]
    assert word not in without.split()
    assert without.split()[:2] == plain.split()[:2]
    assert completion_text(stream(server.port, COMPLETIONS, asked)) == without
    ids = post(server.port, "/tokenize", {"prompt": " yes no", "add_special_tokens": False}).json["tokens"]
    only = chat(allowed_token_ids=ids, max_tokens=4, temperature=1.0, return_token_ids=True)
    choice = post(server.port, CHAT, only).json["choices"][0]
    assert choice["finish_reason"] == "length"  # no end token is allowed
    assert set(choice["token_ids"]) <= set(ids)


def test_prompts_of_every_form(server: RealServer) -> None:
    ids = post(server.port, "/tokenize", {"prompt": "The sea is"}).json["tokens"]
    alone = post(server.port, COMPLETIONS, text()).json["choices"][0]["text"]
    for prompt in (["The sea is", "Once"], ids, [ids, ids]):
        assert post(server.port, COMPLETIONS, text(prompt)).json["choices"][0]["text"] == alone
    assert post(server.port, "/detokenize", {"tokens": ids}).json["prompt"] == "The sea is"


def test_the_context_is_never_clipped(server: RealServer) -> None:
    error = post(server.port, COMPLETIONS, text("word " * 3000, max_tokens=2000)).error
    assert error["code"] == "context_length_exceeded"
    assert "2000" in error["message"]
    assert "4096" in error["message"]
    assert post(server.port, CHAT, chat("word " * 100_000)).error["code"] == "context_length_exceeded"
    assert post(server.port, COMPLETIONS, text([10**6])).error["param"] == "prompt"
    assert post(server.port, CHAT, chat(logit_bias={"999999": 1})).error["param"] == "logit_bias"


def test_blocks_of_disconnected_clients_are_freed(server: RealServer) -> None:
    """Clients leave at once or with the beginning of their answer."""
    for number in range(24):
        is_streamed = number % 3 != 0
        with connected(server.port) as sock:
            story = f"Tell a long story, number {number}."
            sock.sendall(raw_post(CHAT, chat(story, max_tokens=800, stream=is_streamed, n=1 + number % 2)))
            if is_streamed and number % 4:
                assert sock.recv(1 << number % 4, socket.MSG_WAITALL)
    eventually(lambda: kv_used(server) == 0)
    assert post(server.port, CHAT, chat(max_tokens=2)).status == 200


def test_a_client_that_does_not_read_does_not_delay_others(server: RealServer) -> None:
    with connected(server.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(CHAT, chat("Tell a very long story.", stream=True, max_tokens=1500, ignore_eos=True)))
        sock.recv(1)
        for _ in range(3):
            assert chat_text(stream(server.port, CHAT, chat(max_tokens=8)))
            sock.recv(1)
    eventually(lambda: kv_used(server) == 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_deadlines(server: RealServer, is_streamed: bool) -> None:
    fields = chat("Tell a story.", max_tokens=3500, ignore_eos=True, timeout=0.5, stream=is_streamed)
    reply = post(server.port, CHAT, fields)
    if is_streamed and reply.status == 200:  # It passed after the first token.
        assert events(reply)[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


def test_a_grammar_that_only_the_vocabulary_shows_to_be_wrong_is_refused(server: RealServer) -> None:
    """Its special token exists in no vocabulary. Nothing of a stream has been sent by then."""
    for is_streamed in (False, True):
        body = chat(structured_outputs={"grammar": "start: <|nosuch|>"}, stream=is_streamed)
        reply = post(server.port, "/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "structured_outputs.grammar")
        assert "<|nosuch|>" in reply.error["message"]


def test_profile_measures_steps(server: RealServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    with connected(server.port) as sock:
        sock.sendall(raw_post(CHAT, chat(max_tokens=3500, ignore_eos=True)))
        assert main(["profile", "--steps", "20", "--out", str(page), "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert "Waiting for 20 steps" in printed.err
    assert "decode only" in printed.out
    assert "limits of the device" in printed.out
    assert "<svg" in page.read_text(encoding="utf-8")
    eventually(lambda: kv_used(server) == 0)
    assert main(["profile", "--timeout", "0.1", "--url", server.url]) == 1
    assert "No step ran" in capsys.readouterr().err


def test_cost_without_a_price_says_how_to_give_one(server: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*options: str) -> str:
        assert main(["cost", "--url", server.url, *options]) == 0
        return capsys.readouterr().out

    def is_known() -> bool:
        post(server.port, CHAT, chat())  # Costs are read from steps with and without prompts.
        return "largest items" in printed()

    eventually(is_known)
    assert "--price-per-hour" in printed()
    assert "$" not in printed(), "no dollars without a price"
    assert "$ per million" in printed("--price", "2")
    assert "--price-per-hour" not in printed("--price", "2")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[RealServer]:
    """It takes minutes for an answer that fills its context."""
    with real_server(*tiny_model(tmp_path, max_context=1 << 18), "--drain-timeout-s", "600") as server:
        yield server


def is_draining(server: RealServer) -> bool:
    return any("Draining: " in line for line in server.lines)


def story(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return chat("Tell a story.", model=TINY, max_tokens=num_tokens, ignore_eos=True, **fields)


def test_sigterm_lets_answers_finish(tiny: RealServer) -> None:
    with connected(tiny.port) as one, connected(tiny.port) as two:
        for sock in (one, two):
            sock.sendall(raw_post(CHAT, story(1000, stream=True, stream_options={"include_usage": True})))
            assert sock.recv(12) == b"HTTP/1.1 200"
        tiny.signal(signal.SIGTERM)
        answers = [read_all(sock) for sock in (one, two)]
    for answer in answers:
        assert b'"finish_reason":"length"' in answer
        assert b'"completion_tokens":1000' in answer
        assert b"data: [DONE]" in answer
    assert tiny.wait() == 0, "".join(tiny.lines)


def test_a_second_signal_stops_at_once(tiny: RealServer) -> None:
    with connected(tiny.port) as sock:
        sock.sendall(raw_post(CHAT, story(1 << 17, stream=True)))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        tiny.signal(signal.SIGTERM)
        eventually(lambda: is_draining(tiny))
        tiny.signal(signal.SIGTERM)
        data = read_all(sock)
    tiny.wait()
    lines = [line for line in data.split(b"\n") if line.startswith(b'data: {"error"')]
    assert json.loads(lines[0][6:])["error"]["code"] == "engine_unavailable"


def test_the_first_question_that_the_playground_offers_is_answered(server: RealServer) -> None:
    pane = Path(__file__).parents[2] / "millrace" / "web" / "static" / "playground" / "pane.js"
    [starter] = re.findall(r'^const SMALL_STARTERS = \["(.*?)"', pane.read_text(encoding="utf-8"), re.MULTILINE)
    answer = post(server.port, CHAT, chat(starter)).json["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("The capital of France is Paris.", "stop")
