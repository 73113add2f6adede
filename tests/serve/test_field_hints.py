"""An error about a field, a path or the bytes of a request says what to send instead."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, connected, post, read_all

from millrace.serve.anthropic.schemas import MessagesRequest
from millrace.serve.http.field_hints import field_hint
from millrace.serve.http.path_hints import path_hint
from millrace.serve.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from millrace.serve.openai.schemas import ChatRequest, CompletionRequest
from millrace.serve.responses.schemas import ResponsesRequest


@pytest.mark.parametrize(
    ("struct", "field", "hint"),
    [
        (CompletionRequest, "messages", "Here it is called 'prompt'."),
        (CompletionRequest, "max_new_tokens", "Here it is called 'max_tokens'."),
        (ChatRequest, "prompt", "Here it is called 'messages'."),
        (ChatRequest, "stop_sequences", "Here it is called 'stop'."),
        (ChatRequest, "include_usage", "It belongs in 'stream_options'."),
        (ChatRequest, "system", "Send it as a message whose role is 'system'."),
        (ChatRequest, "ebnf", "Here it is 'structured_outputs.grammar'."),
        (ChatRequest, "regex", "It belongs in 'structured_outputs'."),
        (ChatRequest, "temprature", "Did you mean 'temperature'?"),
        (ChatRequest, "frobnicate", "Remove it; unknown fields are not ignored."),
        (ResponsesRequest, "messages", "Here it is called 'input'."),
        (ResponsesRequest, "max_tokens", "Here it is called 'max_output_tokens'."),
        (ResponsesRequest, "response_format", "Here it is 'text.format'."),
        (ResponsesRequest, "reasoning_effort", "Here it is 'reasoning.effort'."),
        (MessagesRequest, "stop", "Here it is called 'stop_sequences'."),
        (MessagesRequest, "instructions", "Here it is called 'system'."),
        (OllamaChatRequest, "temperature", "It belongs in 'options'."),
        (OllamaChatRequest, "temprature", "Did you mean 'options.temperature'?"),
        (OllamaChatRequest, "max_tokens", "Here it is 'options.num_predict'."),
        (OllamaChatRequest, "response_format", "Here it is called 'format'."),
        (OllamaGenerateRequest, "messages", "Here it is called 'prompt'."),
    ],
)
def test_names_of_other_dialects_and_places(struct: type[msgspec.Struct], field: str, hint: str) -> None:
    assert field_hint(field, [struct]) == hint


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine")) as running:
        yield running


@pytest.mark.live
def test_an_unknown_field_is_refused_with_its_name_here(front: Front) -> None:
    reply = post(front.port, "/api/chat", {"model": MODEL, "messages": [], "temperature": 0.5})
    assert reply.status == 400
    assert reply.json["error"] == "'temperature' is not a parameter of this endpoint. It belongs in 'options'."


@pytest.mark.live
def test_a_byte_order_mark_is_named(front: Front) -> None:
    error = post(front.port, CHAT, b"\xef\xbb\xbf{}").error
    assert error["message"] == "The body is not valid JSON: it begins with a byte-order mark; send it without one."


@pytest.mark.live
def test_the_content_type_is_quoted_as_it_was_sent(front: Front) -> None:
    error = post(front.port, CHAT, b"{}", {"Content-Type": "garbage"}).error
    assert error["message"] == "The body has Content-Type 'garbage'; send it as application/json."


def test_unknown_paths_lead_to_endpoints_that_answer() -> None:
    paths = ["/v1/completions", "/v1/containers", "/v1/models"]
    assert path_hint("/v1/completion", paths, ["/v1/containers"]) == "Did you mean /v1/completions?"
    assert path_hint("/v1/container", paths, ["/v1/containers"]) == ""
    assert path_hint("/infill", paths) == "Here it is /v1/completions with 'suffix'."
    assert path_hint("/frobnicate", paths) == ""


@pytest.mark.live
def test_an_unknown_path_has_the_shape_of_the_dialect_that_the_client_speaks(front: Front) -> None:
    reply = post(front.port, "/v1/message", {}, {"anthropic-version": "2023-06-01"})
    assert reply.status == 404
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "not_found_error"
    assert "Did you mean /v1/messages?" in reply.json["error"]["message"]
    assert post(front.port, "/v1/message", {}).error["code"] == "not_found"


@pytest.mark.live
@pytest.mark.parametrize(
    ("header", "words"),
    [("Transfer-Encoding: gzip", "invalid `Transfer-Encoding`."), ("Bad Header: y", "b'Bad Header: y'")],
)
def test_what_the_parser_says_is_a_sentence(front: Front, header: str, words: str) -> None:
    with connected(front.port) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
        body = read_all(sock).partition(b"\r\n\r\n")[2]
    message = json.loads(body)["error"]["message"]
    assert words in message
    assert message.endswith(".")
    assert "^" not in message
