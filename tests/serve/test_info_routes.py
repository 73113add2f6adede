"""Models, metrics, documentation and the tokenizer's routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, get, post, request, stream

from millrace.config import Config, replace
from millrace.params.defaults import SamplingDefaults
from millrace.serve import api_routes
from millrace.serve.describe import routes_models
from millrace.sources.suggestion import Suggestion
from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def samples(front: Front) -> dict[str, float]:
    text = get(front.port, "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_models(front: Front) -> None:
    listed = get(front.port, "/v1/models").json
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model["id"] == MODEL
    assert model["object"] == "model"
    assert model["max_model_len"] == 4096
    assert get(front.port, f"/v1/models/{MODEL}").json.items() >= model.items()


def test_metrics_add_up() -> None:
    with running_front(saying("Hello")) as front:
        for _ in range(3):
            post(front.port, CHAT, body())
        stream(front.port, COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 2})
        post(front.port, CHAT, body(n=0))
        get(front.port, "/nowhere")
        found = samples(front)
    assert found[f"millrace_requests_total{{finish_reason=stop,route={CHAT},status=200}}"] == 3
    assert found[f"millrace_requests_total{{finish_reason=length,route={COMPLETIONS},status=200}}"] == 1
    assert found[f"millrace_requests_total{{finish_reason=,route={CHAT},status=400}}"] == 1
    assert found["millrace_requests_total{finish_reason=,route=unmatched,status=404}"] == 1
    assert found["millrace_ttft_seconds_count{priority=standard}"] == 4
    assert found["millrace_tpot_seconds_count{priority=standard}"] == 4
    assert sum(value for name, value in found.items() if name.startswith("millrace_errors_total")) == 2
    assert found["millrace_e2e_seconds_count"] == 4
    assert found["millrace_request_output_tokens_total"] == 3 * 6 + 2
    assert found["millrace_request_prompt_tokens_total"] == 3 * 20 + 2
    assert found["millrace_request_cached_tokens_total"] == 3 * 16
    assert found["millrace_open_requests"] == 0
    assert found["millrace_open_streams"] == 0
    assert found["millrace_engine_output_tokens_total"] == 3 * 5 + 2
    assert found["millrace_engine_ready"] == 1
    assert found["millrace_kv_blocks{state=free}"] == 60
    assert found["millrace_kv_blocks{state=cached}"] == 30
    assert found["millrace_kv_blocks{state=used}"] == 10
    assert found["millrace_running_requests"] == 0
    assert found["millrace_slow_client_drops_total"] == 0
    assert found["millrace_engine_prefix_hit_tokens_total"] == 16
    assert found["process_cpu_seconds_total"] > 0


def test_metrics_have_the_right_type(front: Front) -> None:
    assert get(front.port, "/metrics").headers["content-type"].startswith("text/plain")


def test_requests_are_logged_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    config = replace(Config(), observe__log_requests=True)
    with caplog.at_level(logging.INFO, "millrace"), running_front(saying("SECRET"), config=config) as front:
        post(front.port, CHAT, body(messages=[{"role": "user", "content": "PRIVATE"}]), {"X-Request-Id": "r-1"})
        stream(front.port, CHAT, body())
    lines = [record.getMessage() for record in caplog.records if record.name == "millrace.requests"]
    assert len(lines) == 2
    assert "request_id=r-1" in lines[0]
    assert "output=7" in lines[0]
    assert "SECRET" not in caplog.text
    assert "PRIVATE" not in caplog.text


def test_tokenize_and_back(front: Front) -> None:
    answer = post(front.port, "/tokenize", {"prompt": "héy"}).json
    assert answer == {"count": 4, "max_model_len": 4096, "tokens": list("héy".encode())}
    assert post(front.port, "/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "héy"}
    chat = post(front.port, "/tokenize", {"messages": [{"role": "user", "content": "hi"}], "model": MODEL}).json
    assert bytes(chat["tokens"]) == b"[user]hi\n[assistant]"
    assert post(front.port, "/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_landing_and_docs(front: Front) -> None:
    for path, title in (("/", "Millrace playground"), ("/docs", "Millrace API")):
        page = get(front.port, path)
        assert page.headers["content-type"].startswith("text/html")
        assert f"<title>{title}</title>" in page.body.decode()


def test_head_requests(front: Front) -> None:
    reply = request(front.port, "HEAD", "/health")
    assert reply.status == 200
    assert reply.body == b""


# ── OpenAPI ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_openapi_is_complete(front: Front) -> None:
    document = get(front.port, "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    for path in (CHAT, COMPLETIONS, "/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics", "/docs"):
        assert path in document["paths"], path
    text = json.dumps(document)
    for ref in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert ref in document["components"]["schemas"], ref
    operations = [spec for methods in document["paths"].values() for spec in methods.values()]
    names = [spec["operationId"] for spec in operations]
    assert len(names) == len(set(names))
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] == {"type": "null"}
    assert chat["required"] == ["messages"]
    assert all("description" in field for field in chat["properties"].values())


def test_openapi_examples_are_accepted(front: Front) -> None:
    document = get(front.port, "/openapi.json").json
    for path, methods in document["paths"].items():
        for method, spec in methods.items():
            if "application/json" not in spec.get("requestBody", {}).get("content", {}):
                continue
            example = spec["requestBody"]["content"]["application/json"]["example"]
            if "model" in example:
                example["model"] = MODEL
            if "tokens" in example:
                example["tokens"] = [65]
            # The file of the batch and ids are only examples; the served model is not deleted or made again, and the
            # fake engine keeps no prompt, no adapters and no models of clients.
            refused = {"/v1/batches": 404, "/api/create": 409, "/api/copy": 404, "/api/delete": 409, "/v1/cache": 400}
            added = ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/created")
            refused |= dict.fromkeys(added, 400)
            wanted = refused.get(path, 404 if "{" in path else 200)
            if path.endswith(
                ("/rerank", "/score", "/classify", "/sparse-vector", "/multi-vector")
            ):  # A model for text does none of them.
                reply = request(front.port, method.upper(), path, example)
                assert (reply.status, reply.error["code"]) == (400, "unsupported_model"), path
                continue
            assert request(front.port, method.upper(), path, example).status == wanted, path


def test_every_route_is_in_the_document(front: Front) -> None:
    documented = get(front.port, "/openapi.json").json["paths"]
    for method, routes in (("post", api_routes.POST), ("get", api_routes.GET), ("delete", api_routes.DELETE)):
        for path in routes:
            assert method in documented[re.sub(r":[^}]+}", "}", path)], (method, path)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_input_tokens_is_not_taken_for_a_response(front: Front, method: str) -> None:
    reply = request(front.port, method, "/v1/responses/input_tokens")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def test_a_response_allows_get_and_delete(front: Front) -> None:
    reply = request(front.port, "PUT", "/v1/responses/resp_1")
    assert (reply.status, reply.headers["allow"]) == (405, "DELETE, GET, HEAD")


def test_one_model_is_described_with_what_it_can_do_and_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_models, "suggest", lambda num_parameters: Suggestion("larger-1b", 700_000_000))
    with running_front(saying("hi")) as front:
        front.state.sampling_defaults = SamplingDefaults(temperature=0.2, top_p=0.9)
        found = get(front.port, f"/v1/models/{MODEL}").json
        assert found["capabilities"] == ["completion", "chat", "tools"]
        assert found["sampling"] == {"temperature": 0.2, "top_p": 0.9}
        assert found["suggestion"] == {"name": "larger-1b", "download_bytes": 700_000_000}
        assert "sampling" not in get(front.port, "/v1/models").json["data"][0]
        shown = post(front.port, "/api/show", {"model": MODEL}).json
        assert [line.split() for line in shown["parameters"].splitlines()] == [["temperature", "0.2"], ["top_p", "0.9"]]
    with running_front(saying("hi"), template=ChatTemplate({}, {})) as base:
        assert get(base.port, f"/v1/models/{MODEL}").json["capabilities"] == ["completion"]


def test_a_server_that_keeps_no_prompts_says_so_and_not_to_try_again() -> None:
    config = replace(Config(), memory__kv_retained=0.0)
    with running_front(saying("hi"), config=config) as front:
        reply = post(front.port, "/v1/cache", {"model": MODEL, "prompt": "A text. " * 40})
        assert (reply.status, reply.error["code"]) == (400, "cache_disabled")
        assert "--kv-retained" in reply.error["message"]
        assert "Retry-After" not in reply.headers
