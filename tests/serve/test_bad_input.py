"""Wrong requests: the error has OpenAI's shape and names the field, and the server keeps working."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, JSON, connected, get, post, raw_post, read_all, request

from millrace.serve.http.body import BodyDecoder
from millrace.serve.responses.schemas import ResponsesRequest
from millrace.serve.responses.schemas_tools import ResponseFunction

pytestmark = pytest.mark.live

USER = [{"role": "user", "content": "hi"}]
HUGE = 10**30


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def said(**message: Any) -> dict[str, Any]:
    return chat(messages=[message])


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=128) as running:
        yield running
        # Whatever was sent, nothing is left running and the server still answers.
        assert get(running.port, "/ready").status == 200
        assert post(running.port, CHAT, chat()).status == 200
        assert running.call(lambda: len(running.engine.rows)) == 0
        assert running.call(lambda: len(running.state.jobs)) == 0


BAD_FIELDS: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    # path, body, status, param, words in the message
    (CHAT, chat(temperature="warm"), 400, "temperature", '"warm"'),
    (CHAT, chat(temperature=True), 400, "temperature", "a number"),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "-0.1"),
    (CHAT, chat(temperature=101), 400, "temperature", "101"),
    (CHAT, chat(top_p=0), 400, "top_p", "top_p is 0"),
    (CHAT, chat(top_p=1.5), 400, "top_p", "1.5"),
    (CHAT, chat(top_k=-2), 400, "top_k", "-2"),
    (CHAT, chat(top_k=1.5), 400, "top_k", "an integer"),
    (CHAT, chat(min_p=2), 400, "min_p", "2"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", "0"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty", "3"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty", "-3"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "max_tokens is 0"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens", "-1"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", "max_completion_tokens is 0"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens", "128"),
    (CHAT, chat(max_completion_tokens=10**9), 400, "max_completion_tokens", "1000000000"),
    (CHAT, chat(max_tokens=HUGE), 400, "max_tokens", "bits"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), 400, "max_tokens", "send one"),
    (CHAT, chat(max_tokens=2, min_tokens=3), 400, "min_tokens", "3"),
    (CHAT, chat(n=0), 400, "n", "n is 0"),
    (CHAT, chat(n=129), 400, "n", "129"),
    (CHAT, chat(n=HUGE), 400, "n", "64 bits"),
    (CHAT, chat(seed=2**64), 400, "seed", "bits"),
    (CHAT, chat(seed="x"), 400, "seed", '"x"'),
    (CHAT, chat(stop=""), 400, "stop", "empty"),
    (CHAT, chat(stop=["a", ""]), 400, "stop", "empty"),
    (CHAT, chat(stop=[str(i) for i in range(10_000)]), 400, "stop", "10000"),
    (CHAT, chat(stop=["x" * 5000]), 400, "stop", "5000"),
    (CHAT, chat(stop=[1]), 400, "stop[0]", "a string"),
    (CHAT, chat(stop=5), 400, "stop", "5"),
    (CHAT, chat(stop_token_ids=[300]), 400, "stop_token_ids", "299"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids", "-1"),
    (CHAT, chat(logit_bias={"300": 1}), 400, "logit_bias", "300"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "logit_bias", "-1"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias", "'x'"),
    (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias", "101"),
    (CHAT, chat(logit_bias={"5": "x"}), 400, "logit_bias", "a number"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias", "an object"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(2000)}), 400, "logit_bias", "2000"),
    (CHAT, chat(logprobs=2), 400, "logprobs", "true or false"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "21"),
    (CHAT, chat(prompt_logprobs=21), 400, "prompt_logprobs", "21"),
    (CHAT, chat(stream="yes"), 400, "stream", '"yes"'),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream"),
    (
        CHAT,
        chat(stream=True, stream_options={"include_usge": True}),
        400,
        "stream_options.include_usge",
        "include_usage",
    ),
    (
        CHAT,
        chat(stream=True, stream_options={"include_obfuscation": True}),
        400,
        "stream_options.include_obfuscation",
        "not supported yet",
    ),
    (CHAT, chat(priority="urgent"), 400, "priority", "interactive, standard, batch"),
    (CHAT, chat(priority=3), 400, "priority", "3"),
    (CHAT, chat(cache_salt="x" * 2000), 400, "cache_salt", "2000"),
    (CHAT, chat(timeout=0), 400, "timeout", "0"),
    (CHAT, chat(timeout=-1), 400, "timeout", "-1"),
    (CHAT, chat(metadata={"a": 1}), 400, "metadata", "a string"),
    (CHAT, chat(metadata={str(i): "x" for i in range(100)}), 400, "metadata", "100"),
    (CHAT, chat(temprature=1), 400, "temprature", "'temperature'"),
    (CHAT, chat(max_token=1), 400, "max_token", "'max_tokens'"),
    (CHAT, chat(frobnicate=1), 400, "frobnicate", "Remove it"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function", "required"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "there are no 'tools'"),
    (CHAT, chat(response_format="json"), 400, "response_format", "send an object"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "text, json_object, json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_object", "scheme": {}}),
        400,
        "response_format.scheme",
        "not a parameter",
    ),
    (CHAT, chat(reasoning_effort="low"), 400, "reasoning_effort", "does not reason"),
    (CHAT, chat(store=0), 400, "store", "store"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities", "not supported yet"),
    (CHAT, chat(audio={"voice": "x"}), 400, "audio", "not supported yet"),
    (CHAT, chat(prediction={"type": "content", "content": 1}), 400, "prediction.content", "prediction"),
    (CHAT, chat(web_search_options={}), 400, "web_search_options", "not supported yet"),
    (CHAT, chat(service_tier="scale"), 400, "service_tier", "flex"),
    (CHAT, chat(function_call={"name": "f"}), 400, "function_call", "there are no 'functions'"),
    (CHAT, chat(verbosity="low"), 400, "verbosity", "does not read it"),
    (CHAT, chat(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "is 0"),
    (CHAT, chat(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "is -2"),
    (CHAT, chat(truncate_prompt_tokens=HUGE), 400, "truncate_prompt_tokens", "64 bits"),
    (COMPLETIONS, text(truncate_prompt_tokens="x"), 400, "truncate_prompt_tokens", '"x"'),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "reserved"),
    (CHAT, chat(add_generation_prompt=True, continue_final_message=True), 400, "continue_final_message", "both"),
    (CHAT, {"model": MODEL}, 400, "messages", "is required"),
    (CHAT, chat(model=5), 400, "model", "5"),
    (CHAT, chat(model="gpt-4o"), 404, "model", MODEL),
    (CHAT, chat(model=""), 404, "model", MODEL),
    (CHAT, chat(messages=[]), 400, "messages", "empty"),
    (CHAT, chat(messages="hi"), 400, "messages", '"hi"'),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]", "an object"),
    (
        CHAT,
        chat(messages=[*USER, {"role": "robot", "content": "x"}]),
        400,
        "messages[1].role",
        "system, developer, user",
    ),
    (CHAT, said(content="x"), 400, "messages[0].role", "is required"),
    (CHAT, said(role="user"), 400, "messages[0].content", "is required"),
    (CHAT, said(role="user", content=None), 400, "messages[0].content", "null"),
    (CHAT, said(role="assistant", content=None), 400, "messages[0].content", "null"),
    (CHAT, said(role="assistant"), 400, "messages[0].content", "null"),
    (CHAT, said(role="user", content=5), 400, "messages[0].content", "5"),
    (CHAT, said(role="user", content="x", colour=1), 400, "messages[0].colour", "colour"),
    (CHAT, said(role="user", contents="x"), 400, "messages[0].contents", "'content'"),
    (CHAT, said(role="tool", content="x"), 400, "messages[0].tool_call_id", "required"),
    (CHAT, said(role="assistant", content="x", tool_calls=[{}]), 400, "messages[0].tool_calls[0].id", "required"),
    (
        CHAT,
        said(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[0].content[0].type",
        "text only",
    ),
    (CHAT, said(role="user", content=[{"type": "smell"}]), 400, "messages[0].content[0].type", "text, image_url"),
    (CHAT, said(role="user", content=[{"type": "text"}]), 400, "messages[0].content[0].text", "is required"),
    (CHAT, said(role="user", content="x" * 200), 400, "messages", "128"),
    (CHAT, said(role="user", content="x" * 100_000), 400, "messages", "128"),
    (COMPLETIONS, text(max_tokens=0), 400, "max_tokens", "max_tokens is 0"),
    (COMPLETIONS, text(max_tokens=-1, echo=True), 400, "max_tokens", "-1"),
    (COMPLETIONS, text(max_tokens=127), 400, "max_tokens", "2 tokens"),
    (COMPLETIONS, text(prompt=None), 400, "prompt", "neither"),
    (COMPLETIONS, text(prompt=5), 400, "prompt", "neither"),
    (COMPLETIONS, text(prompt=""), 400, "prompt", "no tokens"),
    (COMPLETIONS, text(prompt=[]), 400, "prompt", "empty"),
    (COMPLETIONS, text(prompt=["a", 1]), 400, "prompt", "texts only"),
    (COMPLETIONS, text(prompt=[1, True]), 400, "prompt", "token ids only"),
    (COMPLETIONS, text(prompt=[1.5]), 400, "prompt", "token ids only"),
    (COMPLETIONS, text(prompt=[[]]), 400, "prompt", "empty array"),
    (COMPLETIONS, text(prompt=[["a"]]), 400, "prompt", "arrays of token ids only"),
    (COMPLETIONS, text(prompt=[5, 300]), 400, "prompt", "299"),
    (COMPLETIONS, text(prompt=[None]), 400, "prompt", "token ids only"),
    (COMPLETIONS, text(prompt={}), 400, "prompt", "neither"),
    (COMPLETIONS, text(prompt=[[1]] * 2000), 400, "prompt", "2000"),
    (CHAT, chat(messages=USER * 20_000), 400, "messages", "20000"),
    (COMPLETIONS, text(prompt=[-1]), 400, "prompt", "-1"),
    (COMPLETIONS, text(prompt=[HUGE]), 400, "prompt", "1000"),
    (COMPLETIONS, text(prompt=["a"] * 2000), 400, "n", "2000"),
    (COMPLETIONS, text(prompt=["a"] * 100, n=100), 400, "n", "10000"),
    (COMPLETIONS, text(prompt=["ok", "x" * 200]), 400, "prompt", "200"),
    (COMPLETIONS, text(logprobs=21), 400, "logprobs", "21"),
    (COMPLETIONS, text(logprobs=True), 400, "logprobs", "true"),
    (COMPLETIONS, text(best_of=1, n=2), 400, "best_of", "below n"),
    (COMPLETIONS, text(best_of=3, stream=True), 400, "best_of", "stream"),
    (COMPLETIONS, text(best_of=0), 400, "best_of", "0"),
    (COMPLETIONS, text(suffix="tail"), 400, "suffix", "fill in the middle"),
    (COMPLETIONS, text(messages=USER), 400, "messages", "not a parameter"),
    (COMPLETIONS, {"model": MODEL}, 400, "prompt", "is required"),
    (COMPLETIONS, text(model="nope"), 404, "model", MODEL),
    ("/tokenize", {}, 400, "prompt", "either"),
    ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model", MODEL),
    ("/detokenize", {"tokens": [300]}, 400, "tokens", "299"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "-1"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "an integer"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), BAD_FIELDS)
def test_bad_fields(front: Front, path: str, body: dict[str, Any], status: int, param: str | None, words: str) -> None:
    reply = post(front.port, path, body)
    error = reply.error
    assert reply.status == status, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert words in error["message"], error
    assert "x-request-id" in reply.headers


@pytest.mark.parametrize("is_read_alone", [False, True])
def test_a_broken_transfer_encoding(front: Front, is_read_alone: bool) -> None:
    with connected(front.port) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if is_read_alone:  # A later request has its answer, so the server has read this one's head.
            assert get(front.port, "/health").status == 200
        sock.sendall(b"zz\r\nxx\r\n")
        answer = read_all(sock)
    assert answer.split()[1] == b"400"
    assert b"malformed_http" in answer


def test_spaces_around_a_prompt(front: Front) -> None:
    for prompt in (b' "a" ', b"[ 97 ]", b'[\n"a"]', b"[ [ 97 ] ]", b"  [  97\t]", b"[" + b" " * 200 + b'"a"]'):
        body = b'{"model":"%s","prompt":%s}' % (MODEL.encode(), prompt)
        assert post(front.port, COMPLETIONS, body, JSON).status == 200, prompt


def test_a_deadline_in_the_far_future(front: Front) -> None:
    assert post(front.port, CHAT, chat(timeout=1e300)).status == 200


def test_context_overflow_gives_three_numbers(front: Front) -> None:
    error = post(front.port, COMPLETIONS, text(prompt="x" * 100, max_tokens=50)).error
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("100", "50", "128")), error
    exact = post(front.port, COMPLETIONS, text(prompt="x" * 100, max_tokens=28))
    assert exact.status == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"not json", "not valid JSON"),
        (b"[]", "an object"),
        (b"null", "an object"),
        (b'"x"', "an object"),
        (b'{"model": "m"} trailing', "not valid JSON"),
        (b'{"model":"%s","messages":[],"temperature":NaN}' % MODEL.encode(), "NaN"),
        (b'{"model":"%s","messages":[],"temperature":Infinity}' % MODEL.encode(), "NaN or Infinity"),
        (b'{"model":"%s","messages":[],"temperature":-Infinity}' % MODEL.encode(), "NaN or Infinity"),
        (b'{"temperature":1e999}', "out of range"),
        (b'{"model":"\xff\xfe","messages":[]}', "UTF-8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "UTF-8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', "surrogate"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\udc00\\ud800x"}]}', "surrogate"),
        (b'{"model":"m","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b"\x00\x01\x02", "not valid JSON"),
        (b'{"n":' + b"9" * 5000 + b"}", "out of range"),
    ],
)
def test_bad_json(front: Front, body: bytes, words: str) -> None:
    for path in (CHAT, COMPLETIONS):
        reply = post(front.port, path, body, JSON)
        assert reply.status == 400
        assert words in reply.error["message"], reply.error


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"Content-Type": "text/plain"}, 400, "application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 400, "application/json"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 400, "application/json"),
        ({"Content-Type": "application/json; charset=latin-1"}, 415, "UTF-8"),
        ({**JSON, "Content-Encoding": "gzip"}, 415, "gzip"),
        ({**JSON, "Content-Encoding": "zstd"}, 415, "zstd"),
    ],
)
def test_media_types(front: Front, headers: dict[str, str], status: int, words: str) -> None:
    reply = post(front.port, CHAT, json.dumps(chat()).encode(), headers)
    assert reply.status == status
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    "headers", [{}, JSON, {"Content-Type": "application/json; charset=UTF-8"}, {**JSON, "Content-Encoding": "identity"}]
)
def test_media_types_that_are_fine(front: Front, headers: dict[str, str]) -> None:
    assert post(front.port, CHAT, json.dumps(chat()).encode(), headers).status == 200


def test_an_unknown_field_counts_as_left_out_if_it_is_null(front: Front) -> None:
    answered = {"role": "assistant", "content": "a", "phase": None, "async_": None}
    many = chat(messages=[*USER, answered, *USER, answered, *USER], new_field=None)
    assert post(front.port, CHAT, many).status == 200
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async_": None}
    assert post(front.port, "/v1/responses", {"model": MODEL, "input": [item]}).status == 200
    for wrong in (0, False, "", [], {}):
        reply = post(front.port, CHAT, chat(messages=[*USER, {**answered, "phase": wrong}, *USER]))
        assert (reply.error["code"], reply.error["param"]) == ("unknown_field", "messages[1].phase")
    unknown = {f"n{index}": None for index in range(40)}
    part = {"type": "text", "text": "a", **unknown}
    nested = chat(messages=[{"role": "user", "content": [part], **unknown}, answered, *USER], **unknown)
    assert post(front.port, CHAT, nested).status == 200
    part["n7"] = 0
    assert post(front.port, CHAT, nested).error["param"] == "messages[0].content[0].n7"


def test_nulls_in_objects_of_free_form_stay() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
    body = {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": schema, "new": None}], "new": None}
    decoded = BodyDecoder(ResponsesRequest).decode(json.dumps(body).encode())
    assert decoded.tools is not None
    assert isinstance(decoded.tools[0], ResponseFunction)
    assert decoded.tools[0].parameters == schema


def test_unknown_paths_and_methods(front: Front) -> None:
    reply = get(front.port, "/v1/chat/completion")
    assert reply.status == 404
    assert CHAT in reply.error["message"]
    assert post(front.port, "/v1/nothing", {}).status == 404
    reply = get(front.port, COMPLETIONS)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    assert "POST" in reply.error["message"]
    assert post(front.port, "/v1/models", {}).error["code"] == "method_not_allowed"
    assert request(front.port, "DELETE", "/health").status == 405


def test_unknown_model_by_path(front: Front) -> None:
    reply = get(front.port, "/v1/models/org/nothing")
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    ],
)
def test_http_that_cannot_be_parsed(front: Front, raw: bytes, status: int) -> None:
    with connected(front.port) as sock:
        sock.sendall(raw)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 %d" % status, b"HTTP/1.0 %d" % status)), head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_too_many_headers(front: Front) -> None:
    lines = b"".join(b"X-%d: y\r\n" % i for i in range(1000))
    with connected(front.port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"431")
    assert "error" in json.loads(body)


@pytest.mark.parametrize("bad", ["a" * 200, "héllo", "a b"])
def test_a_strange_request_id_is_replaced(front: Front, bad: str) -> None:
    reply = get(front.port, "/health", headers={"X-Request-Id": bad})
    assert reply.headers["x-request-id"].startswith("req-")


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_huge_body_is_refused_before_it_is_read(front: Front) -> None:
    """Only the head is sent; the error comes anyway."""
    with connected(front.port) as sock:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {100 << 20}\r\n\r\n"
        )
        sock.sendall(head.encode())
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


def test_a_huge_body_with_expect_continue_is_refused(front: Front) -> None:
    with connected(front.port) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {100 << 20}\r\n"
        sock.sendall((head + "Expect: 100-continue\r\n\r\n").encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_expect_continue_works(front: Front) -> None:
    message = raw_post(CHAT, chat(), headers="Expect: 100-continue\r\nConnection: close\r\n")
    head, _, body = message.partition(b"\r\n\r\n")
    with connected(front.port) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(body)
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_unknown_expectations_are_refused(front: Front) -> None:
    assert post(front.port, CHAT, chat(), {"Expect": "a miracle"}).error["code"] == "http_error"


def test_a_hundred_megabytes_are_refused_at_the_limit(front: Front) -> None:
    """The error says how much had been read by then."""
    limit = front.state.config.server.body_limit_mb << 20
    piece = b"x" * (1 << 20)
    with connected(front.port) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(100):
                sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            sock.sendall(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    read = re.search(rb"at least (\d+) bytes", answer)
    assert read is not None
    assert limit < int(read[1]) < limit + len(piece)


def test_a_body_that_never_comes_does_not_hurt_others(front: Front) -> None:
    with connected(front.port) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert post(front.port, CHAT, chat()).status == 200


def test_a_slow_body_times_out(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.serve.http.body.BODY_TIMEOUT_S", 0.2)
    with connected(front.port) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("method", "path"), [("PUT", CHAT), ("GET", "/health"), ("GET", "/nowhere"), ("POST", CHAT)])
def test_an_odd_expectation_gets_an_error_body(front: Front, method: str, path: str) -> None:
    with connected(front.port) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nExpect: a miracle\r\nContent-Length: 0\r\n\r\n".encode())
        head = sock.recv(65536)
        assert head.split()[1] in (b"400", b"417")
        assert b'"error":{"message":' in head
