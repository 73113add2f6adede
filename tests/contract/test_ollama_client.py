"""The stock `ollama` client, unchanged, against a front on a real socket."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import get, post

from millrace.link.messages import unpack_tokens
from millrace.text.chat.template import ChatTemplate
from millrace.version import __version__

pytestmark = pytest.mark.live

TEXT = 'Grüße, "world" 🌍\nbye'
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT), max_context=256) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> ollama.Client:
    return ollama.Client(front.url)


def prompt_of(front: Front) -> str:
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def test_chat(client: ollama.Client, front: Front) -> None:
    answer = client.chat(MODEL, [{"role": "system", "content": "Be kind."}, *HI], options={"num_predict": 99})
    assert answer.message.content == TEXT
    assert answer.message.role == "assistant"
    assert answer.done
    assert answer.done_reason == "stop"
    assert answer.prompt_eval_count == len("[system]Be kind.\n[user]hi\n[assistant]")
    assert answer.eval_count == len(TEXT.encode()) + 1
    assert (answer.total_duration or 0) > 0
    params = front.engine.received[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.8, 40, 0.9, 99)


def test_chat_stream(client: ollama.Client) -> None:
    parts = list(client.chat(f"{MODEL}:latest", HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == len(TEXT.encode()) + 1


def test_generate(client: ollama.Client, front: Front) -> None:
    whole = client.generate(MODEL, "hi", system="S", options={"stop": ["bye"], "seed": 3, "repeat_penalty": 1.2})
    assert whole.response == TEXT.removesuffix("bye")
    assert prompt_of(front) == "[system]S\n[user]hi\n[assistant]"
    parts = list(client.generate(MODEL, "hi", raw=True, stream=True))
    assert "".join(part.response for part in parts) == TEXT
    assert prompt_of(front) == "hi"
    assert front.engine.received[-1].params.max_tokens == 256 - 2


def test_a_final_assistant_message_is_continued(client: ollama.Client, front: Front) -> None:
    client.chat(MODEL, [*HI, {"role": "assistant", "content": "It is"}])
    assert prompt_of(front) == "[user]hi\n[assistant]It is"


def test_streams_are_json_lines(front: Front) -> None:
    reply = post(front.port, "/api/generate", {"model": MODEL, "prompt": "hi"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.body.decode().splitlines()]
    assert lines[-1]["done"] is True
    assert "".join(line["response"] for line in lines) == TEXT


def test_a_body_without_json_content_type_is_accepted(front: Front) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": False}).encode()
    for headers in ({}, {"Content-Type": "application/octet-stream"}):  # {}: application/x-www-form-urlencoded
        request = urllib.request.Request(f"{front.url}/api/generate", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["response"] == TEXT


def test_the_version_is_one_that_clients_accept(front: Front) -> None:
    """Copilot Chat wants 0.6.4 or later; Codex 0.13.4, to use /v1/responses."""
    shown = get(front.port, "/api/version").json
    assert tuple(int(part) for part in shown["version"].split(".")) >= (0, 13, 4)
    assert shown["millrace"] == __version__


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat(MODEL, HI, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(TEXT.encode())
    parts = list(client.chat(MODEL, HI, logprobs=True, top_logprobs=2, stream=True))
    assert [entry for part in parts for entry in part.logprobs or []] == answer.logprobs


def test_num_ctx_limits_and_never_truncates(client: ollama.Client, front: Front) -> None:
    client.generate(MODEL, "hi", raw=True, options={"num_ctx": 50})
    assert front.engine.received[-1].params.max_tokens == 48
    for options, words in (
        ({"num_ctx": 10**6}, ("1000000", "256")),
        ({"num_ctx": 10, "num_predict": 20}, ("2 tokens", "20", "10")),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            client.generate(MODEL, "hi", raw=True, options=options)
        assert caught.value.status_code == 400
        assert all(word in caught.value.error for word in words)


def test_the_model(client: ollama.Client) -> None:
    [model] = client.list().models
    assert model.model == MODEL
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template
    assert shown.details is not None
    assert shown.details.parameter_size == "134.52M"
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert [one.name for one in client.ps().models] == [MODEL]


def test_a_request_without_a_prompt_only_loads(client: ollama.Client) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, keep_alive="5m").done_reason == "load"


def test_a_base_model_gets_the_prompt_without_a_template() -> None:
    with running_front(saying("x"), template=ChatTemplate({}, {})) as front:
        assert ollama.Client(front.url).generate(MODEL, "hi").response == "x"
        assert prompt_of(front) == "hi"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/api/chat", {"model": "llama3"}, 404, "model"),
        ("/api/chat", {"format": "yaml"}, 400, "format"),
        ("/api/chat", {"tools": [{}]}, 400, "tools[0].function"),
        ("/api/chat", {"think": True}, 400, "think"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "tool"}]}, 400, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/api/chat", {"options": {"temprature": 1}}, 400, "options.temprature"),
        ("/api/chat", {"options": {"tfs_z": 0.5}}, 400, "options.tfs_z"),
        ("/api/chat", {"options": {"mirostat_tau": -1}}, 400, "options.mirostat_tau"),
        ("/api/chat", {"options": {"num_predict": 10**7}}, 400, "options.num_predict"),
        ("/api/chat", {"options": {"top_p": 2}}, 400, "options.top_p"),
        ("/api/chat", {"keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "images": ["aa"]}, 400, "images"),
        ("/api/show", {}, 400, None),
        ("/api/pull", {"model": "/etc/passwd"}, 400, "model"),
        ("/api/push", {}, 501, None),
    ],
)
def test_errors(front: Front, path: str, fields: dict[str, Any], status: int, param: str | None) -> None:
    base = {} if path == "/api/show" else {"model": MODEL, **({"messages": HI} if path == "/api/chat" else {})}
    reply = post(front.port, path, {**base, **fields})
    assert reply.status == status, reply.body
    assert set(reply.json) == {"error", "message", "type", "param", "code"}
    assert reply.json["error"] == reply.json["message"]
    if param is not None:
        assert reply.json["param"] == param


def test_an_error_inside_a_stream_is_raised() -> None:
    with running_front(endless, step_s=0.01) as front:
        stream = ollama.Client(front.url).chat(MODEL, HI, stream=True)
        next(stream)
        front.call(lambda: front.engine.die("The engine is gone."))
        with pytest.raises(ollama.ResponseError, match="gone"):
            list(stream)
