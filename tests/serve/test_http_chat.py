"""Chat completions over a real socket: answers and streams have the right shape and the same content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, Front, endless, running_front, saying
from serve.wire import CHAT, chat_text, connected, events, eventually, post, raw_post, read_all, stream

from millrace.link.messages import NewRequest, unpack_tokens

pytestmark = pytest.mark.live

NASTY = 'a"b\\c\nd\te\x00\x1f 🌍é\u2028\u2029\x85 </script> 漢字 ' + "👩‍👩‍👧‍👦"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello, world")) as running:
        yield running


@pytest.fixture(scope="module")
def nasty() -> Iterator[Front]:
    with running_front(saying(NASTY)) as running:
        yield running


@pytest.fixture(scope="module")
def letters() -> Iterator[Front]:
    with running_front(endless) as running:
        yield running


def test_a_whole_answer(front: Front) -> None:
    reply = post(front.port, CHAT, body(), {"X-Request-Id": "mine-1"})
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "mine-1"
    answer = reply.json
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["system_fingerprint"] == "fp_null"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len(b"[user]hi\n[assistant]")
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 13,
        "total_tokens": prompt + 13,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_the_prompt_is_the_rendered_template(front: Front) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert post(front.port, CHAT, body(messages=messages)).status == 200
    prompt = bytes(unpack_tokens(front.engine.received[-1].prompt).tolist())
    assert prompt == b"[system]be kind\n[user]one\ntwo\n[assistant]"


def test_a_stream(front: Front) -> None:
    reply = post(front.port, CHAT, body(stream=True), {"X-Request-Id": "mine-2"})
    assert reply.headers["x-request-id"] == "mine-2"
    chunks = events(reply)
    first, *middle, last = chunks
    assert {chunk["id"] for chunk in chunks} == {first["id"]}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all(set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices"} for chunk in chunks)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello, world"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *middle))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length_ends_an_answer(front: Front, field: str) -> None:
    answer = post(front.port, CHAT, body(**{field: 5})).json
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    chunks = stream(front.port, CHAT, body(**{field: 5}))
    assert chat_text(chunks) == "Hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_text_of_any_kind_survives(nasty: Front) -> None:
    assert post(nasty.port, CHAT, body()).json["choices"][0]["message"]["content"] == NASTY
    assert chat_text(stream(nasty.port, CHAT, body())) == NASTY
    logprobs = stream(nasty.port, CHAT, body(logprobs=True))
    assert chat_text(logprobs) == NASTY


def test_usage_at_the_end_of_a_stream(front: Front) -> None:
    whole = post(front.port, CHAT, body()).json["usage"]
    chunks = stream(front.port, CHAT, body(stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_in_every_chunk(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(front.port, CHAT, body(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 13
    assert chat_text(chunks) == "Hello, world"


def test_choices_keep_their_index(front: Front) -> None:
    answer = post(front.port, CHAT, body(n=3)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 39
    assert answer["usage"]["prompt_tokens"] == 20
    chunks = stream(front.port, CHAT, body(n=3))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        assert own[-1]["choices"][0]["finish_reason"] == "stop"
        assert chat_text(chunks, index) == "Hello, world"


def test_each_choice_has_its_own_seed(front: Front) -> None:
    post(front.port, CHAT, body(n=3, seed=41))
    sent = front.engine.received[-3:]
    assert [request.params.seed for request in sent] == [41, 42, 43]
    assert {request.params.n for request in sent} == {1}
    post(front.port, CHAT, body(n=2))
    first, second = (request.params.seed for request in front.engine.received[-2:])
    assert first != second


@pytest.mark.parametrize("stop", ["world", ["zzz", "world"], ["lo, w", "world"]])
def test_stop_strings(front: Front, stop: Any) -> None:
    answer = post(front.port, CHAT, body(stop=stop)).json
    expected = "Hel" if "lo, w" in stop else "Hello, "
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] in stop
    matched_at = len(expected) + len(answer["choices"][0]["stop_reason"])
    assert answer["usage"]["completion_tokens"] == matched_at
    assert front.engine.aborted[-1][1] == "stop"
    chunks = stream(front.port, CHAT, body(stop=stop))
    assert chat_text(chunks) == expected
    assert chunks[-1]["choices"][0]["stop_reason"] == answer["choices"][0]["stop_reason"]


def test_include_stop_str_in_output(front: Front) -> None:
    fields = body(stop="wor", include_stop_str_in_output=True)
    assert post(front.port, CHAT, fields).json["choices"][0]["message"]["content"] == "Hello, wor"
    assert chat_text(stream(front.port, CHAT, fields)) == "Hello, wor"


def test_half_a_stop_string_is_released_at_the_end(front: Front) -> None:
    fields = body(stop="worlds")
    assert post(front.port, CHAT, fields).json["choices"][0]["message"]["content"] == "Hello, world"
    assert chat_text(stream(front.port, CHAT, fields)) == "Hello, world"


def test_stop_token_ids(front: Front) -> None:
    answer = post(front.port, CHAT, body(stop_token_ids=[ord(",")])).json
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == ord(",")
    assert front.engine.received[-1].end_token_ids == (END, ord(","))
    post(front.port, CHAT, body(stop_token_ids=[ord(",")], ignore_eos=True))
    assert front.engine.received[-1].end_token_ids == (ord(","),)


def test_logprobs(front: Front) -> None:
    answer = post(front.port, CHAT, body(logprobs=True, top_logprobs=2)).json
    content = answer["choices"][0]["logprobs"]["content"]
    assert answer["choices"][0]["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in content] == list("Hello, world")
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "I", "logprob": -1.5, "bytes": [73]},
        ],
    }
    chunks = stream(front.port, CHAT, body(logprobs=True, top_logprobs=2))
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content
    assert (
        post(front.port, CHAT, body(logprobs=True)).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )


def test_logprobs_of_broken_characters_and_infinities(nasty: Front) -> None:
    content = post(nasty.port, CHAT, body(logprobs=True, top_logprobs=20)).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == NASTY
    assert content[0]["top_logprobs"][-1]["logprob"] == -9999.0


def test_prompt_logprobs(front: Front) -> None:
    answer = post(front.port, CHAT, body(prompt_logprobs=1)).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}


def test_token_ids(front: Front) -> None:
    answer = post(front.port, CHAT, body(return_token_ids=True)).json
    assert bytes(answer["prompt_token_ids"]) == b"[user]hi\n[assistant]"
    assert bytes(answer["choices"][0]["token_ids"]) == b"Hello, world"
    chunks = stream(front.port, CHAT, body(return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]


def test_parameters_reach_the_engine(front: Front) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": 3, "6": -100},
        "seed": -3,
        "min_tokens": 2,
        "max_tokens": 9,
    }
    more = {"priority": "batch", "cache_salt": "salt", "timeout": 5, "user": "u", "metadata": {"k": "v"}}
    assert post(front.port, CHAT, body(**fields, **more)).status == 200
    request = front.engine.received[-1]
    for name in (
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "seed",
        "min_tokens",
        "max_tokens",
    ):
        assert getattr(request.params, name) == fields[name], name
    assert request.params.temperature == 0.0
    assert request.params.frequency_penalty == -1.0
    assert request.params.logit_bias == ((5, 3.0), (6, -100.0))
    assert request.priority == 2
    assert request.cache_salt == "salt"
    assert request.deadline is not None
    assert 4.0 < request.deadline - request.arrival <= 5.0


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"parallel_tool_calls": None, "store": False, "stream": False, "n": None, "temperature": None},
        {"service_tier": "auto", "modalities": ["text"], "logit_bias": None, "stop": None, "seed": None},
        {"stop": [], "top_k": -1, "functions": [], "metadata": {}, "logprobs": False, "top_logprobs": 0},
        {"safety_identifier": "me", "prompt_cache_key": "k", "priority": 0, "skip_special_tokens": None},
    ],
)
def test_neutral_values_are_accepted(front: Front, fields: dict[str, Any]) -> None:
    reply = post(front.port, CHAT, body(**fields))
    assert reply.status == 200, reply.body


def test_assistant_messages_of_the_stock_client_are_accepted(front: Front) -> None:
    said = post(front.port, CHAT, body()).json["choices"][0]["message"]
    echoed = {**said, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [{"role": "user", "content": "hi"}, echoed, {"role": "user", "content": "more", "name": "ann"}]
    assert post(front.port, CHAT, body(messages=messages)).status == 200


def test_continue_final_message(front: Front) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert post(front.port, CHAT, body(messages=messages, continue_final_message=True)).status == 200
    assert bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).endswith(b"[assistant]Well")
    assert post(front.port, CHAT, body(messages=messages, add_generation_prompt=False)).status == 200
    assert bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).endswith(b"[assistant]Well\n")


def test_keep_alive_after_a_stream(front: Front) -> None:
    """Two streams and an answer on one connection: the chunked framing is exact."""
    with connected(front.port) as sock:
        sock.sendall(raw_post(CHAT, body(stream=True)))
        sock.sendall(raw_post(CHAT, body(stream=True)))
        sock.sendall(raw_post(CHAT, body(), headers="Connection: close\r\n"))
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.count(b"0\r\n\r\n") == 2
    assert data.count(b"data: [DONE]") == 2


def test_http_1_0_streams_without_chunks(front: Front) -> None:
    with connected(front.port) as sock:
        sock.sendall(raw_post(CHAT, body(stream=True), version="HTTP/1.0"))
        head, _, data = read_all(sock).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"Connection: close" in head
    assert data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")


def test_head_and_first_token_come_together(letters: Front) -> None:
    """The HTTP head is sent with the first token, so that an early failure still gets its own status."""
    letters.call(letters.engine.pause)
    with connected(letters.port) as sock:
        sock.sendall(raw_post(CHAT, body(stream=True, max_tokens=3)))
        eventually(lambda: bool(letters.engine.rows))
        letters.call(letters.engine.resume)
        first = sock.recv(65536)
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert b'"content":"a"' in first


def test_empty_answers(front: Front) -> None:
    with running_front(lambda request: [END]) as silent:
        answer = post(silent.port, CHAT, body()).json
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        chunks = stream(silent.port, CHAT, body())
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chat_text(chunks) == ""


def test_broken_utf8_is_held_until_whole(front: Front) -> None:
    def script(request: NewRequest) -> list[int]:
        return [0xF0, 0x9F, 0x8C, 0x8D, 0xE6, END]

    with running_front(script) as broken:
        chunks = stream(broken.port, CHAT, body())
        texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]]
        assert texts == ["🌍", "\ufffd"]
        assert post(broken.port, CHAT, body()).json["choices"][0]["message"]["content"] == "🌍\ufffd"


def test_long_prompts_are_tokenised_in_a_thread(front: Front) -> None:
    with running_front(saying("ok"), max_context=100_000, kv_tokens=200_000) as wide:
        reply = post(wide.port, CHAT, body(messages=[{"role": "user", "content": "x" * 50_000}], max_tokens=4))
        assert reply.json["usage"]["prompt_tokens"] == 50_000 + len("[user]\n[assistant]")


def test_json_is_utf8_not_escapes(nasty: Front) -> None:
    raw = post(nasty.port, CHAT, body()).body
    assert "漢字".encode() in raw
    json.loads(raw)


def test_parts_marked_as_documents_are_computed_alone_too_and_announced() -> None:
    seen: list[NewRequest] = []

    def script(request: NewRequest) -> list[int]:
        seen.append(request)
        return [*b"ok", END]

    texts = ["Oak beams, " * 20, "rye bread, " * 20]
    parts = [{"type": "text", "text": text, "cache": {"type": "document", "recompute": 0.5}} for text in texts]
    with running_front(script) as front:
        reply = post(front.port, CHAT, body(messages=[{"role": "user", "content": parts}]))
        assert reply.json["usage"]["prompt_tokens_details"]["document_tokens"] == 0
        assert reply.headers["x-millrace-warning"].startswith("approximate: 2 parts")
        asked = [request for request in seen if request.documents is not None]
        alone = [bytes(unpack_tokens(request.prompt).tolist()).decode() for request in seen if not request.documents]
        assert len(asked) == 1
        assert asked[0].documents is not None
        prompt = bytes(unpack_tokens(asked[0].prompt).tolist()).decode()
        spans = asked[0].documents.spans
        assert [prompt[span.start : span.end] for span in spans] == [text.strip() for text in texts]
        assert [span.first - span.start for span in spans] == [-(-len(text.strip()) // 2) for text in texts]
        assert all(text.startswith(own) for text, own in zip(texts, sorted(alone), strict=True))
        assert {request.params.pooling for request in seen if not request.documents} == {"last"}
        assert [bool(request.names) for request in seen] == [False, False, True], "explain shows what the client sent"
        plain = post(front.port, CHAT, body())
        assert set(plain.json["usage"]["prompt_tokens_details"]) == {"cached_tokens"}
        assert "x-millrace-warning" not in plain.headers
        refused = post(front.port, CHAT, body(messages=[{"role": "user", "content": parts}], prompt_logprobs=0))
        assert (refused.status, refused.json["error"]["param"]) == (400, "cache")
        wrong = [{"type": "text", "text": texts[0], "cache": {"type": "documents"}}]
        refused = post(front.port, CHAT, body(messages=[{"role": "user", "content": wrong}]))
        assert refused.json["error"]["message"].endswith('is "documents"; it must be document.')


def test_documents_stand_in_messages_of_all_roles() -> None:
    seen: list[NewRequest] = []

    def script(request: NewRequest) -> list[int]:
        seen.append(request)
        return [*b"ok", END]

    text, call = "Oak beams, " * 20, {"id": "a1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    content = [{"type": "text", "text": text, "cache": {"type": "document"}}]
    asked = {"role": "user", "content": "And?"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    block = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text},
        "cache": {"type": "document"},
    }
    result = {"type": "tool_result", "tool_use_id": "a1", "is_error": True, "content": [block]}
    use = {"type": "tool_use", "id": "a1", "name": "f", "input": {}}
    cases: list[tuple[str, list[Any]]] = [
        (CHAT, [asked, {"role": "assistant", "content": content}, asked]),
        (CHAT, [asked, called, {"role": "tool", "tool_call_id": "a1", "content": content}]),
        (CHAT, [{"role": "system", "content": content}, asked]),
        ("/v1/messages", [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]),
        ("/v1/messages", [asked, {"role": "assistant", "content": [block]}, asked]),
    ]
    with running_front(script) as front:
        for path, messages in cases:
            seen.clear()
            reply = post(front.port, path, body(messages=messages, max_tokens=5))
            assert reply.status == 200, reply.json
            documents = seen[-1].documents
            assert documents is not None, messages
            prompt = bytes(unpack_tokens(seen[-1].prompt).tolist()).decode()
            assert [prompt[span.start : span.end] for span in documents.spans] == [text.strip()]
            assert reply.headers["x-millrace-warning"] == "approximate: 1 part of the prompt is marked as a document"
