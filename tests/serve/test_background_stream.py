"""Background responses that are streamed: their events can be read while they form, again, and from any point on."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, endless, running_front, saying
from serve.wire import Reply, get, post, request

from millrace.link.messages import NewRequest
from millrace.serve.responses import event_log

pytestmark = pytest.mark.live

RESPONSES = "/v1/responses"


def events(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    frames = [frame for frame in reply.body.decode().split("\n\n")[:-1] if not frame.startswith(": ")]
    return [json.loads(frame.partition("data: ")[2]) for frame in frames]


def test_events_can_be_read_again() -> None:
    with running_front(saying("Hello, world")) as front:
        sent = {"model": MODEL, "input": "hi", "stream": True, "background": True}
        first = events(post(front.port, RESPONSES, sent))
        assert [event["sequence_number"] for event in first] == list(range(len(first)))
        assert first[0]["type"] == "response.created"
        assert first[-1]["type"] == "response.completed"
        text = "".join(event["delta"] for event in first if event["type"] == "response.output_text.delta")
        assert text == "Hello, world"
        at = f"{RESPONSES}/{first[0]['response']['id']}"
        assert events(get(front.port, f"{at}?stream=true")) == first
        assert events(get(front.port, f"{at}?stream=true&starting_after=4")) == first[5:]
        stored = get(front.port, at).json
        assert stored == first[-1]["response"]
        assert get(front.port, f"{at}?starting_after=4").status == 400
        assert get(front.port, f"{at}?stream=true&starting_after=x").status == 400
        assert request(front.port, "DELETE", at).status == 200
        assert get(front.port, f"{at}?stream=true").status == 404
        plain = post(front.port, RESPONSES, {"input": "hi"}).json["id"]
        later = post(front.port, RESPONSES, {"input": "hi", "background": True}).json["id"]
        for made in (plain, later):
            for query in ("stream=true", "stream=true&starting_after=2"):
                refused = get(front.port, f"{RESPONSES}/{made}?{query}")
                assert (refused.status, refused.json["error"]["param"]) == (400, "stream")


def test_the_stream_of_a_response_that_waits_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEEP_ALIVE_S", 3600.0)
    with running_front(saying("Hello")) as front:
        front.call(front.engine.pause)
        sent = json.dumps({"input": "hi", "stream": True, "background": True})
        with closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)) as connection:
            connection.request("POST", RESPONSES, body=sent, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.readline() == b": waiting\n"
            front.call(front.engine.resume)
            assert rest(answer)[-1]["type"] == "response.completed"


def test_a_failure_is_an_event() -> None:
    def poisoned(request: NewRequest) -> list[int]:
        front.engine.poison.add(request.id)
        return [97, END]

    with running_front(poisoned) as front:
        said = events(post(front.port, RESPONSES, {"input": "hi", "stream": True, "background": True}))
        assert said[-1]["type"] in ("error", "response.failed")


def opened(port: int, sent: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, str]:
    """A stream whose first events have come, and the id of its response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", RESPONSES, body=json.dumps(sent), headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    while not answer.readline().startswith(b"event: "):
        pass  # A comment, and the empty line after it.
    return connection, answer, json.loads(answer.readline().partition(b"data: ")[2])["response"]["id"]


def rest(answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
    lines = answer.read().decode().split("\n")
    return [json.loads(line.partition("data: ")[2]) for line in lines if line.startswith("data: ")]


def test_the_stream_of_a_cancelled_response_ends_with_an_event() -> None:
    with running_front(endless, step_s=0.01) as front:
        sent = {"input": "hi", "stream": True, "background": True, "max_output_tokens": 4000}
        connection, answer, made = opened(front.port, sent)
        with closing(connection):
            assert post(front.port, f"{RESPONSES}/{made}/cancel", {}).json["status"] == "cancelled"
            last = rest(answer)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.cancelled", "cancelled")
        again = events(get(front.port, f"{RESPONSES}/{made}?stream=true"))
        assert [event["sequence_number"] for event in again] == list(range(len(again)))
        assert again[-1]["type"] == "response.cancelled"
        later = events(get(front.port, f"{RESPONSES}/{made}?stream=true&starting_after=1"))
        assert [event["sequence_number"] for event in later] == list(range(2, 2 + len(later)))
        assert later[-1]["type"] == "response.cancelled"
        assert events(get(front.port, f"{RESPONSES}/{made}?stream=true&starting_after=99999")) == []


def test_deleting_a_response_ends_its_stream_with_an_error() -> None:
    with running_front(endless, step_s=0.01) as front:
        sent = {"input": "hi", "stream": True, "background": True, "max_output_tokens": 4000}
        connection, answer, made = opened(front.port, sent)
        with closing(connection):
            assert request(front.port, "DELETE", f"{RESPONSES}/{made}").status == 200
            last = rest(answer)[-1]
        assert (last["type"], last["code"]) == ("error", "not_found")
