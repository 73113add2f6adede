"""Spans reach a receiver that decodes them with OpenTelemetry's own messages."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from helpers.span_receiver import SpanReceiver, receiving_spans
from helpers.waiting import LIMIT_S
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serve.front_under_test import MODEL, Front, endless, running_front
from serve.wire import CHAT, eventually, get, post, request

from millrace.config import Config, replace
from millrace.observe.tracing import exporter as exporter_module
from millrace.observe.tracing.context import enter_context
from millrace.observe.tracing.otlp import Span, encode_request
from millrace.observe.tracing.step_spans import DETAILS

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00"


pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def receiver() -> Iterator[SpanReceiver]:
    with receiving_spans() as server:
        yield server


@pytest.fixture(scope="module")
def front(receiver: SpanReceiver) -> Iterator[Front]:
    url = f"http://127.0.0.1:{receiver.server_port}"
    config = replace(Config(), server__port=0, observe__otlp_url=url)
    with pytest.MonkeyPatch.context() as patch, running_front(endless, config=config, step_s=0.002) as running:
        patch.setattr(exporter_module, "FLUSH_EVERY_S", 0.02)
        yield running


HI = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 4, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_stages_are_children_of_a_span_in_the_callers_trace(front: Front, receiver: SpanReceiver, stream: bool) -> None:
    receiver.spans.clear()
    reply = post(front.port, CHAT, body(stream=stream), {"traceparent": PARENT, "tracestate": "vendor=1"})
    eventually(lambda: len(receiver.spans) >= 5, LIMIT_S)
    [root] = [span for span in receiver.spans if span.name == f"POST {CHAT}"]
    assert root.trace_id.hex() == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert root.trace_state == "vendor=1"
    assert reply.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert [one.string_value for one in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    stages = {span.name: span for span in receiver.spans if span is not root}
    assert list(stages) == ["front", "queue", "prefill", "decode"]
    for span in stages.values():
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano - 1e6 <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1e6


@pytest.mark.parametrize(
    ("path", "fields", "operation"),
    [
        (CHAT, {"messages": HI}, "chat"),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}, "chat"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, "chat"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 4}}, "chat"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}, "text_completion"),
        ("/api/generate", {"prompt": "hi", "options": {"num_predict": 4}}, "text_completion"),
        ("/v1/embeddings", {"input": "hi"}, "embeddings"),
        ("/api/embed", {"input": "hi"}, "embeddings"),
        (CHAT, {"messages": []}, "chat"),
    ],
)
def test_a_span_says_what_was_asked_of_whom(
    front: Front, receiver: SpanReceiver, path: str, fields: dict[str, Any], operation: str
) -> None:
    receiver.spans.clear()
    post(front.port, path, {"model": MODEL, **fields})
    eventually(lambda: any(span.name == f"POST {path}" for span in receiver.spans), LIMIT_S)
    [root] = [span for span in receiver.spans if span.name == f"POST {path}"]
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["gen_ai.operation.name"].string_value == operation
    assert attributes["gen_ai.provider.name"].string_value == "millrace"


def test_errors_have_a_span_and_unsampled_traces_have_none(front: Front, receiver: SpanReceiver) -> None:
    receiver.spans.clear()
    post(front.port, CHAT, body(), {"traceparent": UNSAMPLED})
    assert get(front.port, "/health").status == 200
    assert post(front.port, CHAT, {"model": MODEL}).status == 400
    eventually(lambda: bool(receiver.spans), LIMIT_S)
    [span] = receiver.spans
    assert {one.key: one.value for one in span.attributes}["http.response.status_code"].int_value == 400
    assert not span.parent_span_id


def pass_rounds(front: Front) -> None:
    """The front's loop runs timers in their order, so rounds of 0.02 s have passed when one of 0.1 s ends there."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), front.loop).result(LIMIT_S)


def test_steps_have_spans_and_none_twice(receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.serve.describe.tracing.STEPS_EVERY_S", 0.02)
    monkeypatch.setattr(exporter_module, "FLUSH_EVERY_S", 0.02)
    asked: list[int] = []

    async def query(kind: str, last: str, tenant: str | None) -> bytes:
        """Two steps more than were asked for."""
        asked.append(int(last))
        end, now = front.state.client.stats.step_no + 1, time.monotonic()
        numbers = list(range(max(1, end - int(last) - 2), end))
        steps = {name: [0 if name == "prefill_tokens" else 5] * len(numbers) for name in DETAILS}
        steps |= {"step_no": numbers, "done": [now + n for n in numbers], "device_s": [0.5] * len(numbers)}
        return msgspec.json.encode(steps)

    url = f"http://127.0.0.1:{receiver.server_port}"
    config = replace(Config(), server__port=0, observe__otlp_url=url, observe__otlp_steps=True)
    receiver.spans.clear()
    with running_front(endless, config=config, step_s=0.002) as front:
        monkeypatch.setattr(front.state.client, "query", query)
        for _ in range(3):
            before = len(asked)
            post(front.port, CHAT, body(max_tokens=5))
            eventually(lambda before=before: len(asked) > before, LIMIT_S)
        pass_rounds(front)
        before = len(asked)
        pass_rounds(front)
        assert len(asked) == before, "an idle engine is not asked"
        eventually(lambda: sum(span.name == "engine steps" for span in receiver.spans) >= 3, LIMIT_S)
    spans = [span for span in receiver.spans if span.name in ("decode step", "engine steps")]
    roots = {span.span_id: span for span in spans if span.name == "engine steps"}
    numbers = []
    for span in spans:
        attributes = {one.key: one.value for one in span.attributes}
        if span.name == "engine steps":
            assert attributes["gen_ai.request.model"].string_value == MODEL
            continue
        numbers.append(attributes["millrace.step"].int_value)
        assert attributes["millrace.rows"].int_value == 5
        assert span.trace_id == roots[span.parent_span_id].trace_id
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(5e8, rel=1e-3)
    assert numbers == list(range(1, len(numbers) + 1)), "every step once"


def test_a_receiver_that_fails_costs_spans_only(front: Front, receiver: SpanReceiver) -> None:
    exporter = front.state.spans
    assert exporter is not None
    receiver.status = 400
    try:
        before = exporter.num_dropped
        assert post(front.port, CHAT, body()).status == 200
        eventually(lambda: exporter.num_dropped > before, LIMIT_S)
    finally:
        receiver.status = 200


def test_a_receiver_that_never_answers_delays_the_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "LAST_FLUSH_S", 0.1)
    span = Span(b"t" * 16, b"s" * 8, b"", "name", 1, 2)

    async def end(url: str) -> None:
        exporter = exporter_module.SpanExporter(url)
        exporter.add([span] * exporter_module.MAX_QUEUED)
        exporter.add([span])
        assert exporter.num_dropped == 1, "the queue has a limit"
        task = asyncio.create_task(exporter.run())
        await asyncio.sleep(0)  # Until it runs.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert exporter.num_dropped == 1, "it does not wait until each of the 16 batches is given up"

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(end(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        silent.settimeout(LIMIT_S)
        silent.accept()[0].close()  # It has tried.


def test_without_a_receiver_nothing_is_traced() -> None:
    with running_front(endless) as plain:
        reply = request(plain.port, "GET", "/v1/models", headers={"traceparent": PARENT})
        assert "traceparent" not in reply.headers


@pytest.mark.parametrize(
    "header",
    [None, "", "junk", PARENT.upper(), PARENT.replace("00-", "ff-", 1), PARENT + "-x", f"00-{'0' * 32}-{'1' * 16}-01"],
)
def test_malformed_contexts_begin_a_new_trace(header: str | None) -> None:
    context = enter_context(header, None)
    assert context.parent_id == b""
    assert context.trace_id.hex() != PARENT.split("-")[1]


def test_every_kind_of_value_survives_the_encoding() -> None:
    values = {"s": "ü", "b": True, "i": -5, "f": 1.5, "l": ("a", "b"), "big": 2**40}
    span = Span(b"t" * 16, b"s" * 8, b"", "name", 1, 2**62, attributes=values, error="broken")
    [scope] = ExportTraceServiceRequest.FromString(encode_request([span], {}, "1")).resource_spans[0].scope_spans
    decoded = {one.key: one.value for one in scope.spans[0].attributes}
    assert decoded["s"].string_value == "ü"
    assert decoded["b"].bool_value is True
    assert (decoded["i"].int_value, decoded["big"].int_value, decoded["f"].double_value) == (-5, 2**40, 1.5)
    assert [one.string_value for one in decoded["l"].array_value.values] == ["a", "b"]
    assert (scope.spans[0].status.code, scope.spans[0].status.message) == (2, "broken")
    assert scope.spans[0].end_time_unix_nano == 2**62


def test_equal_values_of_different_types_keep_their_types() -> None:
    spans = [Span(b"t" * 16, b"s" * 8, b"", "name", 1, 2, attributes={"v": value}) for value in (1, True, 1.0, "1")]
    [scope] = ExportTraceServiceRequest.FromString(encode_request(spans, {}, "1")).resource_spans[0].scope_spans
    kinds = [span.attributes[0].value.WhichOneof("value") for span in scope.spans]
    assert kinds == ["int_value", "bool_value", "double_value", "string_value"]
