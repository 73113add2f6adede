"""Answers, events and errors conform to OpenAI's own schemas, for generated valid requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from contract.schema_check import DOCUMENT, problems, schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, chat_text, completion_text, events, get, post

pytestmark = pytest.mark.live

TEXT = "Tide and 時 wait for no one 🌊"

needs_document = pytest.mark.skipif(not DOCUMENT.exists(), reason="OpenAI's OpenAPI document is not at hand")


def conforms(value: Any, name: str) -> None:
    """Skipped if the document is missing; the rest of each test does not need it."""
    if DOCUMENT.exists():
        assert problems(value, {"$ref": name}, schemas()) == []


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT)) as running:
        yield running


floats = st.floats
nullable = st.none
SHARED = {
    "temperature": floats(0, 2) | st.integers(0, 2) | nullable(),
    "top_p": floats(0.01, 1) | nullable(),
    "top_k": st.integers(-1, 100),
    "min_p": floats(0, 1),
    "repetition_penalty": floats(0.5, 2),
    "presence_penalty": floats(-2, 2),
    "frequency_penalty": floats(-2, 2) | nullable(),
    "logit_bias": st.dictionaries(st.integers(0, 299).map(str), floats(-100, 100), max_size=5) | nullable(),
    "seed": st.integers(-(2**63), 2**63 - 1) | nullable(),
    "n": st.integers(1, 4) | nullable(),
    "stop": st.sampled_from([None, "no", "zz", ["time", "one"], [], ["時"], ["\u2028"]]),
    "stop_token_ids": st.lists(st.integers(0, 299), max_size=3),
    "bad_words": st.lists(st.sampled_from(["no", " time", "時", "\n"]), max_size=3) | nullable(),
    "allowed_token_ids": st.lists(st.integers(0, 298), min_size=4, max_size=6, unique=True) | nullable(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans() | nullable(),
    "ignore_eos": st.just(False),
    "min_tokens": st.integers(0, 1),
    "user": st.text(max_size=10),
    "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    "priority": st.sampled_from(["interactive", "standard", "batch", 0, 1, 2]),
    "cache_salt": st.text(max_size=5),
    "timeout": floats(5, 100),
    "return_token_ids": st.booleans(),
}
CHAT_ONLY = {
    "max_tokens": st.integers(1, 100),
    "logprobs": st.booleans(),
    "safety_identifier": st.text(max_size=5),
    "response_format": st.sampled_from([None, {"type": "text"}]),
    "tools": st.sampled_from([None, []]),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "b"]), st.integers(), max_size=2),
}
COMPLETION_ONLY = {
    "max_tokens": st.integers(1, 100),
    "logprobs": st.integers(0, 5) | nullable(),
    "echo": st.booleans(),
    "suffix": st.sampled_from([None, ""]),
}
characters = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
prompts = st.one_of(
    characters,
    st.lists(characters, min_size=1, max_size=3),
    st.lists(st.integers(0, 255), min_size=1, max_size=10),
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=5), min_size=1, max_size=3),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": characters},
        optional={"name": st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=5)},
    ),
    min_size=1,
    max_size=4,
)
generous = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@generous
@given(fields=st.fixed_dictionaries({"messages": messages}, optional={**SHARED, **CHAT_ONLY}), usage=st.booleans())
def test_chat(front: Front, fields: dict[str, Any], usage: bool) -> None:
    body = {"model": MODEL, **fields}
    reply = post(front.port, CHAT, body)
    assert reply.status == 200, reply.body
    answer = reply.json
    conforms(answer, "CreateChatCompletionResponse")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events(post(front.port, CHAT, {**body, "stream": True, **options}))
    for chunk in chunks:
        conforms(chunk, "CreateChatCompletionStreamResponse")
    assert len(answer["choices"]) == (fields.get("n") or 1)
    for choice in answer["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert chat_text(chunks, choice["index"]) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        streamed = [entry for c in own for entry in (c["logprobs"] or {}).get("content", [])]
        assert streamed == ((choice["logprobs"] or {}).get("content") or [])
    if usage:
        assert chunks[-1]["usage"] == answer["usage"]


@generous
@given(fields=st.fixed_dictionaries({"prompt": prompts}, optional={**SHARED, **COMPLETION_ONLY}), usage=st.booleans())
def test_completions(front: Front, fields: dict[str, Any], usage: bool) -> None:
    body = {"model": MODEL, **fields}
    reply = post(front.port, COMPLETIONS, body)
    assert reply.status == 200, reply.body
    answer = reply.json
    if not (fields.get("echo") and fields.get("logprobs") is not None):
        # The log-probability of an echoed first token is null, as in OpenAI's answers, though not in its schema.
        conforms(answer, "CreateCompletionResponse")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events(post(front.port, COMPLETIONS, {**body, "stream": True, **options}))
    for choice in answer["choices"]:
        assert completion_text(chunks, choice["index"]) == choice["text"]
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        offsets = [offset for c in own for offset in (c["logprobs"] or {}).get("text_offset", [])]
        assert offsets == ((choice["logprobs"] or {}).get("text_offset") or [])
    if usage:
        assert chunks[-1]["usage"] == answer["usage"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@generous
@given(
    name=st.sampled_from(sorted({*SHARED, *CHAT_ONLY, *COMPLETION_ONLY, "messages", "model", "stream", "prompt"})),
    value=junk,
    path=st.sampled_from([CHAT, COMPLETIONS]),
)
def test_junk_is_accepted_or_refused_by_name(front: Front, name: str, value: Any, path: str) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    reply = post(front.port, path, {"model": MODEL, "max_tokens": 4, **base, name: value})
    if reply.status == 200:
        return
    expected = (400, 404, 504) if name == "timeout" else (400, 404)  # a tiny timeout is valid and expires
    assert reply.status in expected, reply.body
    error = reply.error
    conforms(reply.json, "ErrorResponse")
    assert name in (error["param"] or error["message"]), error


@needs_document
def test_every_parameter_of_the_reference_is_known(front: Front) -> None:
    """Each is supported or refused by name, never unknown."""

    def properties(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return properties(schemas()[schema["$ref"].rsplit("/", 1)[-1]])
        found = set(schema.get("properties", ()))
        for part in schema.get("allOf", ()):
            found |= properties(part)
        return found

    for name, path in (("CreateChatCompletionRequest", CHAT), ("CreateCompletionRequest", COMPLETIONS)):
        for field in sorted(properties(schemas()[name]) - {"model", "messages", "prompt"}):
            base = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
            error = post(front.port, path, {"model": MODEL, **base, field: [{"surely": "wrong"}]}).error
            assert error["param"] is not None
            assert error["param"].startswith(field), error
            assert error["code"] != "unknown_field" or error["param"] != field, error


@needs_document
def test_models_and_errors(front: Front) -> None:
    conforms(get(front.port, "/v1/models").json, "ListModelsResponse")
    conforms(get(front.port, f"/v1/models/{MODEL}").json, "Model")
    for reply in (get(front.port, "/nowhere"), get(front.port, COMPLETIONS), post(front.port, CHAT, b"{")):
        conforms(reply.json, "ErrorResponse")


def test_our_own_document_describes_our_answers(front: Front) -> None:
    document = get(front.port, "/openapi.json").json
    defs = document["components"]["schemas"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "prompt_logprobs": 1}
    assert problems(body, defs["ChatRequest"], defs) == []
    assert problems(post(front.port, CHAT, body).json, defs["ChatAnswer"], defs) == []
    text = {"model": MODEL, "prompt": [1, 2], "logprobs": 2, "echo": True, "return_token_ids": True}
    assert problems(text, defs["CompletionRequest"], defs) == []
    assert problems(post(front.port, COMPLETIONS, text).json, defs["CompletionAnswer"], defs) == []
    for chunk in events(post(front.port, COMPLETIONS, {**text, "stream": True})):
        assert problems(chunk, defs["CompletionChunk"], defs) == []
    assert problems(post(front.port, CHAT, {}).json, defs["ErrorAnswer"], defs) == []
    assert problems(get(front.port, "/v1/models").json, defs["ModelList"], defs) == []
