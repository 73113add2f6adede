"""Several models behind one front: chosen by name, loaded on request, described and unloaded over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import anthropic
import pytest
from serve.front_under_test import MODEL, TEMPLATE, Front, byte_tokenizer, running_front, saying
from serve.null_engine import NullEngine
from serve.wire import eventually

from millrace.errors import BadRequest, EngineUnavailable
from millrace.link.client import EngineClient
from millrace.params.defaults import NEUTRAL_DEFAULTS
from millrace.params.grammar import Grammar
from millrace.serve.describe.sampler import take_sample
from millrace.serve.generate import grammars, heartbeat
from millrace.serve.ollama.keep_alive import keep_alive_s
from millrace.serve.served_models import ServedModel
from millrace.serve.state import FrontState, ModelText
from millrace.text.chat.template import ChatTemplate
from millrace.text.grammar.compiler import GrammarCompiler

pytestmark = pytest.mark.live

OTHER = "other-model"


@dataclass
class Control:
    """Loads the second model as the supervisor would, and notes what it was asked."""

    front: Front
    orders: list[tuple[str, Any]] = field(default_factory=list)
    holds: bool = False
    """True: a load goes on until the test ends it."""
    engine: NullEngine | None = None

    def start(self, client: EngineClient) -> None:
        self.orders.append(("load", OTHER))
        engine = NullEngine(saying("I am the other"), vocab_size=byte_tokenizer().vocab_size, is_ready=False)
        client.reconnect(engine)
        self.engine = engine
        if not self.holds:
            self.front.loop.call_soon(engine.become_ready)

    def end_load(self) -> None:
        assert self.engine is not None
        self.engine.become_ready()

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None:
        await self.keep_alive(name, 0.0)

    async def keep_alive(self, name: str, seconds: float) -> None:
        self.orders.append((name, seconds))
        if seconds == 0:
            await self.front.state.models.find(name).client.retire(0.0)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Front, Control, list[int]]]:
    with running_front(saying("I am the first")) as front:
        control = Control(front)
        readings: list[int] = []

        def add() -> None:
            client = EngineClient(None)
            client.on_wanted = lambda: control.start(client)

            def read() -> FrontState:
                readings.append(1)
                text = ModelText(byte_tokenizer(), ChatTemplate({"default": TEMPLATE}, {}), NEUTRAL_DEFAULTS)
                return front.state.of_model(front.state.config, OTHER, client, text)

            state = front.state
            state.models.add(
                ServedModel(OTHER, client, read=read, aliases=("alias", "tagged:7b"), loads_at_start=False)
            )
            state.metrics.add_model(OTHER, client)
            state.control = control

        front.call(add)
        yield front, control, readings


def ask(front: Front, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)) as connection:
        data = json.dumps(body) if body is not None else None
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text


def ask_and_load(front: Front, path: str, body: dict[str, Any], end_load: Callable[[], None]) -> str:
    """The frames of a stream whose model is loading until the first comment has come."""
    with closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)) as connection:
        sent = json.dumps({"model": OTHER, "stream": True, **body})
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        comment = answer.readline()
        front.call(end_load)
        return (comment + answer.read()).decode()


def complete(front: Front, model: str) -> tuple[int, Any]:
    return ask(front, "POST", "/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 20})


def test_ten_requests_load_the_model_once_and_it_answers_with_its_own_engine(
    served: tuple[Front, Control, list[int]],
) -> None:
    front, control, readings = served
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda number: complete(front, (OTHER, "alias")[number % 2]), range(10)))
    assert {status for status, _ in answers} == {200}
    assert {(body["model"], body["choices"][0]["text"]) for _, body in answers} == {(OTHER, "I am the other")}
    assert control.orders == [("load", OTHER)]
    assert len(readings) == 1
    assert complete(front, MODEL)[1]["choices"][0]["text"] == "I am the first"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_every_dialect_chooses_by_name(
    served: tuple[Front, Control, list[int]], path: str, body: dict[str, Any]
) -> None:
    front, _, _ = served
    status, answer = ask(front, "POST", path, {"model": OTHER, **body})
    assert status == 200, answer
    if path != "/tokenize":
        assert "I am the other" in json.dumps(answer)
    status, answer = ask(front, "POST", path, {"model": "absent", **body})
    assert status == 404
    assert f"'{MODEL}', '{OTHER}'" in json.dumps(answer)


def test_a_request_without_a_model_goes_to_the_first(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    messages = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "model": None}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 20}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        status, answer = ask(front, "POST", path, body)
        assert (status, answer["model"]) == (200, MODEL), path


def test_models_are_listed_with_aliases_and_status(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    complete(front, OTHER)
    listed = ask(front, "GET", "/v1/models")[1]["data"]
    assert [(one["id"], one["root"], one["status"]) for one in listed] == [
        (MODEL, MODEL, "loaded"),
        (OTHER, OTHER, "loaded"),
        ("alias", OTHER, "loaded"),
        ("tagged:7b", OTHER, "loaded"),
    ]
    assert ask(front, "GET", "/v1/models/tagged:7b")[1]["root"] == OTHER
    assert [one["name"] for one in ask(front, "GET", "/api/tags")[1]["models"]] == [MODEL, OTHER]
    assert [one["name"] for one in ask(front, "GET", "/api/ps")[1]["models"]] == [MODEL, OTHER]
    assert ask(front, "GET", "/ready")[1]["models"] == {MODEL: "loaded", OTHER: "loaded"}
    page = ask(front, "GET", "/metrics")[1]
    assert re.search(rf'^millrace_engine_ready\{{model="{OTHER}"\}} 1', page, re.MULTILINE)
    assert re.search(rf'^millrace_kv_blocks\{{model="{MODEL}",state="free"\}} 60', page, re.MULTILINE)


def test_unload_and_load_over_http(served: tuple[Front, Control, list[int]]) -> None:
    front, control, _ = served
    complete(front, OTHER)
    assert ask(front, "POST", "/v1/models/alias/unload")[1]["status"] == "unloaded"
    assert [one["name"] for one in ask(front, "GET", "/api/ps")[1]["models"]] == [MODEL]
    assert ask(front, "GET", "/ready")[0] == 200, "an unloaded model does not make the server unready"
    assert ask(front, "POST", "/v1/models/alias/load")[1]["status"] == "loaded"
    status, answer = ask(front, "POST", "/api/generate", {"model": f"{OTHER}:latest", "keep_alive": 0})
    assert (status, answer["done_reason"]) == (200, "unload")
    status, answer = ask(front, "POST", "/api/generate", {"model": OTHER, "keep_alive": "10m"})
    assert (status, answer["done_reason"]) == (200, "load")
    assert control.orders[-1] == (OTHER, 600.0)
    assert ask(front, "POST", "/v1/models/absent/load")[0] == 404


def test_an_engine_that_does_not_answer_hides_no_request_of_another(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _, _ = served
    complete(front, OTHER)

    async def silent(*args: object) -> bytes:
        raise EngineUnavailable("The engine did not answer.")

    async def knows(what: str, name: str, tenant: str | None) -> bytes:
        return b'{"id":"known","sequences":[]}' if name == "known" else b""

    monkeypatch.setattr(front.state.models.find(MODEL).client, "query", silent)
    monkeypatch.setattr(front.state.models.find(OTHER).client, "query", knows)
    assert ask(front, "GET", "/v1/requests/known/explain") == (200, {"id": "known", "sequences": []})
    assert ask(front, "GET", "/v1/requests/unknown/explain")[0] == 503


def test_a_model_that_cannot_be_loaded_hurts_no_other(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    client = front.state.models.find(OTHER).client
    works, client.on_wanted = client.on_wanted, lambda: client.give_up("It does not fit.")
    status, answer = complete(front, OTHER)
    assert (status, answer["error"]["message"]) == (503, "It does not fit.")
    assert complete(front, MODEL)[0] == 200
    status, answer = ask(front, "GET", "/ready")
    assert (status, answer["models"][OTHER]) == (200, "failed")
    client.on_wanted = works
    assert complete(front, OTHER)[0] == 200, "the next request tries again"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (0, 0), ("0", 0), ("0s", 0), (30, 30), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (-1, -1)],
)
def test_keep_alive_values(value: str | float | None, seconds: float | None) -> None:
    assert keep_alive_s(value) == seconds
    assert keep_alive_s("-5m") == -1


@pytest.mark.parametrize("value", ["soon", "5 m", "", float("inf"), float("nan"), "1d"])
def test_keep_alive_mistakes(value: str | float) -> None:
    with pytest.raises(BadRequest, match="keep_alive is"):
        keep_alive_s(value)


def test_every_model_has_figures_of_its_own(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    complete(front, OTHER)
    complete(front, MODEL)
    front.call(lambda: take_sample(front.state, 0.0))
    first, other = (ask(front, "GET", f"/v1/stats?window=60&step=5{query}")[1] for query in ("", "&model=alias"))
    assert (first["model"], other["model"]) == (MODEL, OTHER)
    assert [(one["name"], one["status"]) for one in first["models"]] == [(MODEL, "loaded"), (OTHER, "loaded")]
    assert (
        other["totals"]["output_tokens"]
        == front.call(lambda: front.state.models.find(OTHER).client.stats).output_tokens
    )
    assert ask(front, "GET", f"/v1/cost?model={OTHER}&price=1")[1]["model"] == OTHER
    assert ask(front, "GET", f"/tokenizer_info?model={OTHER}")[0] == 200
    for path in ("/v1/stats", "/v1/cost", "/v1/steps", "/tokenizer_info"):
        status, answer = ask(front, "GET", f"{path}?model=absent")
        assert (status, f"'{MODEL}', '{OTHER}'" in answer["error"]["message"]) == (404, True), path
    page = ask(front, "GET", "/metrics?names=vllm")[1]
    for name in (MODEL, OTHER):
        assert re.search(
            rf'^millrace_sequences_total\{{model="{name}",priority="standard"\}} [1-9]', page, re.MULTILINE
        )
        assert re.search(rf'^millrace_request_output_tokens_total\{{model="{name}"\}} [1-9]', page, re.MULTILINE)
    assert page.count("# TYPE millrace_e2e_seconds histogram") == 1


def test_a_model_that_nobody_needs_raises_no_alert(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    page = ask(front, "GET", "/metrics")[1]
    assert f'millrace_engine_unloaded{{model="{OTHER}"}} 1.0' in page
    assert f'millrace_engine_ready{{model="{OTHER}"}}' not in page
    status, answer = ask(front, "GET", f"/v1/steps?model={OTHER}")
    assert (status, answer["error"]["message"]) == (503, f"The model {OTHER!r} is unloaded, so it runs no steps.")
    assert ask(front, "GET", f"/v1/stats?model={OTHER}")[1]["now"]["status"] == "unloaded"


def test_models_are_listed_in_pages_for_clients_of_anthropic(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    client = anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0)
    names = [MODEL, OTHER, "alias", "tagged:7b"]
    assert [model.id for model in client.models.list(limit=1)] == names, "the client asks for page after page"
    first = client.models.list(limit=2)
    assert ([model.id for model in first.data], first.has_more, first.last_id) == (names[:2], True, OTHER)
    before = client.models.list(limit=1, before_id="alias")
    assert ([model.id for model in before.data], before.has_more, before.first_id) == ([OTHER], True, OTHER)
    with pytest.raises(anthropic.NotFoundError):
        client.models.list(after_id="nosuch")


STREAMS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "data: [DONE]"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}, "data: [DONE]"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}, "event: message_stop"),
    ("/v1/responses", {"input": "Hi"}, "event: response.completed"),
]


@pytest.mark.parametrize(("path", "body", "end"), STREAMS)
def test_a_stream_tells_that_its_model_is_being_loaded(
    served: tuple[Front, Control, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    end: str,
) -> None:
    front, control, _ = served
    complete(front, OTHER)
    loaded = ask(front, "POST", path, {"model": OTHER, "stream": True, **body})[1]
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.03)
    monkeypatch.setattr(control, "holds", True)
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    waited = ask_and_load(front, path, body, control.end_load)
    assert waited.startswith(f": The model {OTHER!r} is still loading")
    shown = "\n\n".join(frame for frame in waited.split("\n\n") if not frame.startswith((":", "event: ping")))
    assert end in shown
    assert shown.count("\n\n") == loaded.count("\n\n"), "the same frames, the first of them included"


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, _ in STREAMS])
def test_a_stream_whose_model_fails_to_load_ends_with_the_error(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    front, _, _ = served
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    client = front.state.models.find(OTHER).client
    loads: list[str] = []
    monkeypatch.setattr(client, "on_wanted", lambda: loads.append(OTHER))
    text = ask_and_load(front, path, body, lambda: client.give_up("It does not fit."))
    assert loads == [OTHER], "a load that failed is not repeated for the same request"
    assert text.startswith(": The model")
    assert "It does not fit." in text.rpartition("data: {")[2]
    before = front.state.metrics.counts.errors
    monkeypatch.setattr(client, "on_wanted", lambda: client.give_up("It does not fit."))
    assert ask(front, "POST", path, {"model": OTHER, **body})[0] == 503, "without a stream: a plain error"
    assert front.state.metrics.counts.errors == before + 1


def test_a_request_whose_model_is_loaded_anew_before_it_is_submitted_waits(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, control, _ = served
    complete(front, OTHER)
    is_checking, is_over = threading.Event(), threading.Event()

    def check(grammar: Grammar) -> None:
        is_checking.set()
        is_over.wait(60)

    state = front.state.models.find(OTHER).state
    monkeypatch.setattr(state, "grammar_check", GrammarCompiler(check))
    monkeypatch.setattr(grammars, "CHECK_LIMIT_S", 60.0)
    monkeypatch.setattr(control, "holds", True)
    fields = {"model": OTHER, "prompt": "Hi", "max_tokens": 20, "structured_outputs": {"choice": ["a"]}}
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(ask, front, "POST", "/v1/completions", fields)
        assert is_checking.wait(60)
        ask(front, "POST", f"/v1/models/{OTHER}/unload")
        front.call(front.state.models.find(OTHER).client.want)
        is_over.set()
        eventually(lambda: bool(control.engine.received) or answer.done())
        front.call(control.end_load)
        assert answer.result(60)[0] == 200
    state.grammar_check.close()


def test_a_loading_model_that_takes_too_long_is_a_bounded_wait(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _, _ = served
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    client = front.state.models.find(OTHER).client
    monkeypatch.setattr(client, "on_wanted", lambda: None)
    state = front.state
    other = front.state.models.find(OTHER).state
    assert other is not None
    monkeypatch.setattr(state, "loading_wait_s", 0.1)
    monkeypatch.setattr(other, "loading_wait_s", 0.1)
    status, text = ask(front, "POST", "/v1/completions", {"model": OTHER, "prompt": "Hi", "stream": True})
    assert (status, "is still loading; try again" in text, text.endswith("data: [DONE]\n\n")) == (200, True, True)
    status, answer = ask(front, "POST", "/v1/completions", {"model": OTHER, "prompt": "Hi"})
    assert (status, answer["error"]["message"]) == (
        503,
        f"The model {OTHER!r} is still loading; try again in a few seconds.",
    )
    front.call(lambda: client.give_up("stopped"))


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/chat", {"messages": []}),
        ("/api/embed", {"input": "Hi"}),
        ("/v1/models/alias/load", None),
    ],
)
def test_an_error_calls_the_model_as_the_client_did(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any] | None
) -> None:
    front, _, _ = served
    complete(front, OTHER)
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    client = front.state.models.find(OTHER).client
    failure = f"The model {OTHER!r} cannot be loaded: no room."
    monkeypatch.setattr(client, "on_wanted", lambda: front.loop.call_soon(client.give_up, failure))
    status, answer = ask(front, "POST", path, None if body is None else {"model": "alias", **body})
    said = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
    assert (status, said) == (503, "The model 'alias' cannot be loaded: no room.")


def test_a_stream_calls_the_model_as_the_client_did(
    served: tuple[Front, Control, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _, _ = served
    complete(front, OTHER)
    ask(front, "POST", f"/v1/models/{OTHER}/unload")
    model = front.state.models.find(OTHER)
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    monkeypatch.setattr(model.state, "loading_wait_s", 0.1)
    monkeypatch.setattr(model.client, "on_wanted", lambda: None)  # It stays unloaded.
    steps = ask(front, "GET", "/v1/steps?model=alias")[1]
    assert steps["error"]["message"] == "The model 'alias' is unloaded, so it runs no steps."
    waited = ask(front, "POST", "/v1/completions", {"model": "alias", "prompt": "Hi", "stream": True})[1]
    assert waited.startswith(": The model 'alias' is still loading")
    front.call(lambda: model.client.give_up("stopped"))


def test_an_unknown_model_is_called_as_the_client_did(served: tuple[Front, Control, list[int]]) -> None:
    front, _, _ = served
    for name in ("nosuch", "nosuch:latest"):
        status, answer = ask(front, "POST", "/api/chat", {"model": name, "messages": MESSAGES})
        assert (status, answer["error"].startswith(f"The model {name!r} is not served here")) == (404, True), answer
