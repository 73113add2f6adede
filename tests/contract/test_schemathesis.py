"""Schemathesis on our OpenAPI document: valid requests get a documented answer, invalid ones are refused.

The same requests are sent in every run. `make fuzz SIZE=500` draws 500 of each kind for each operation from a new seed;
what it finds is kept in `REFUSED` or `ACCEPTED`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from helpers.suite import SEED
from hypothesis import HealthCheck, Phase, given, seed, settings
from serve.front_under_test import MODEL, VOCAB, Front, running_front, saying
from serve.wire import post

from millrace.serve.describe.openapi.document import openapi_document

pytestmark = pytest.mark.live

SIZE = int(os.environ.get("FUZZ_SIZE", "4"))
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method"),
)


def document() -> dict[str, Any]:
    """The document, narrowed to the served model and its vocabulary; random model names would all give a 404."""
    found: dict[str, Any] = json.loads(openapi_document())
    for name, schema in found["components"]["schemas"].items():
        fields = schema["properties"]
        if name.endswith("Request") and "model" in fields:
            fields["model"] = {"enum": [MODEL] if "model" in schema.get("required", ()) else [MODEL, None]}
        if name == "DetokenizeRequest":
            fields["tokens"]["items"] = {"type": "integer", "minimum": 0, "maximum": VOCAB - 1}
    return found


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"role": "tool", "content": "4"}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [*HELLO, TOOL]}),
    (CHAT, {"messages": [PICTURE]}),
    (CHAT, {"messages": [{"role": "assistant", "content": None}]}),
    (CHAT, {"messages": HELLO, "stop_token_ids": [-1]}),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}),
    (CHAT, {"messages": HELLO, "allowed_token_ids": []}),
    (CHAT, {"messages": HELLO, "allowed_token_ids": [-1]}),
    (COMPLETIONS, {"prompt": "a", "bad_words": [""]}),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["a" * 129]}),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}),
    (CHAT, {"messages": HELLO, "priority": 3}),
    (CHAT, {"messages": HELLO, "stop": [""]}),
    (CHAT, {"messages": HELLO, "seed": 2**64}),
    (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 0}),
    (COMPLETIONS, {"prompt": "a", "best_of": 1025}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**31}),
    (RESPONSES, {"input": "a", "include": ["file_search_call.results"]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    (RESPONSES, {"input": "a", "dynatemp_min": -1, "dynatemp_max": 2}),
    (f"{RESPONSES}/input_tokens", {"input": "a", "dynatemp_min": -1, "dynatemp_max": 2}),
    (f"{RESPONSES}/input_tokens", {"input": "a", "xtc_probability": 2}),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": []}]}),
    ("/api/chat", {"messages": [{"role": "tool"}]}),
    ("/api/chat", {"messages": [{"role": "user"}]}),
    ("/v1/conversations", {"": 1}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/embeddings", {"input": ["a", ""]}),
    (RESPONSES, {"input": ""}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]}),
    (RESPONSES, {"input": "a", "tools": [{"type": "namespace", "name": "a b", "tools": []}]}),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_surf"}]}),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": []}}]}
            ],
        },
    ),
    ("/api/embed", {"input": "a", "options": {"num_predict": 0}}),
    ("/api/embed", {"options": {"stop": [""]}}),
    ("/api/embed", {"dimensions": 0}),
    ("/api/embeddings", {"prompt": "a", "options": {"top_p": 2}}),
    ("/api/show", {"model": None}),
    ("/tokenize", {"prompt": None}),
    ("/tokenize", {"prompt": "a", "messages": HELLO}),
    ("/tokenize", {"messages": []}),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"tools": 1}}),
    ("/detokenize", {"tokens": [-1]}),
]
"""Bodies that both the server and its document must refuse."""
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "stop_token_ids": [0], "logit_bias": {"5": -100}, "stop": None, "priority": "batch"}),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}], "seed": 2**64 - 1, "stop": "b"}),
    (COMPLETIONS, {"prompt": [5], "best_of": None, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [5], "bad_words": [], "allowed_token_ids": [0]}),
    (RESPONSES, {"input": HELLO, "include": ["message.output_text.logprobs"], "store": False}),
    ("/api/chat", {"messages": [], "stream": False}),
    (CHAT, {"messages": [{"role": "assistant", "content": [], "refusal": "no"}]}),
    (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "of_another_version": None}], "": None}),
    (CHAT, {"messages": HELLO, **{f"of_another_version_{number}": None for number in range(30)}}),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search", "filters": {}}, NAMESPACE], "tool_choice": "none"}),
    ("/tokenize", {"prompt": "a", "messages": None}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [5]}),
]

IsAllowed = Callable[[str, dict[str, Any]], bool]
ENDLESS = "/v1/kv/events"
"""Its answer has no end."""
OPERATIONS = {
    (method, path): spec
    for path, methods in document()["paths"].items()
    for method, spec in methods.items()
    if path != ENDLESS
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=256) as running:
        yield running
        assert running.call(lambda: len(running.engine.rows)) == 0


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def is_allowed() -> IsAllowed:
    """True if the document allows this body on this path."""
    import jsonschema_rs

    found = document()

    @cache
    def validator(path: str) -> Any:
        root = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return jsonschema_rs.validator_for({**root, "components": found["components"]})

    return lambda path, body: bool(validator(path).is_valid(body))


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_document_refuses_what_the_server_refuses(
    front: Front, is_allowed: IsAllowed, path: str, body: dict[str, Any]
) -> None:
    body = body if "model" in body else {"model": MODEL, **body}
    assert post(front.port, path, body).status == 400
    assert not is_allowed(path, body)


@pytest.mark.parametrize(("items", "is_fine"), [([], False), (HELLO, True), (HELLO * 21, False)])
def test_items_of_a_conversation(front: Front, is_allowed: IsAllowed, items: list[Any], is_fine: bool) -> None:
    path = "/v1/conversations/{conversation_id}/items"
    conversation = post(front.port, "/v1/conversations", {}).json["id"]
    assert (post(front.port, path.format(conversation_id=conversation), {"items": items}).status == 200) == is_fine
    assert is_allowed(path, {"items": items}) == is_fine


@pytest.mark.parametrize(("path", "body"), ACCEPTED)
def test_document_allows_what_the_server_accepts(
    front: Front, is_allowed: IsAllowed, path: str, body: dict[str, Any]
) -> None:
    body = {"model": MODEL, **body}
    assert post(front.port, path, body).status == 200
    assert is_allowed(path, body)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operation(front: Front, schema: Any, method: str, path: str) -> None:
    from schemathesis import GenerationMode, checks

    operation, rules = schema[path][method.upper()], [getattr(checks, name) for name in CHECKS]
    spec = OPERATIONS[method, path]
    has_input = bool(spec.get("requestBody") or spec.get("parameters"))
    # Paths and forms accept any text; only JSON and queries can have a wrong type.
    is_json = "application/json" in spec.get("requestBody", {}).get("content", {})
    can_be_wrong = is_json or any(one["in"] == "query" for one in spec.get("parameters", ()))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if can_be_wrong else (GenerationMode.POSITIVE,)

    def check(case: Any) -> None:
        if any(value is None for value in (case.headers or {}).values()):
            return  # A header without a value is not sent, so nothing is wrong with the request.
        response = case.call(base_url=front.url, timeout=60)
        if response.status_code != 504:  # A tiny `timeout` is valid but cannot be met.
            case.validate_response(response, checks=rules)

    for mode in modes:
        bounded = settings(
            max_examples=SIZE if has_input else 1,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seed(SEED)(bounded(given(case=operation.as_strategy(generation_mode=mode))(check)))()
