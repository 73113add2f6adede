"""Background responses that are streamed: their events can be read while they form, again, and from any point on."""

from __future__ import annotations

import json
from typing import Any

from serve.front_under_test import END, MODEL, running_front, saying
from serve.wire import Reply, get, post, request

from millrace.link.messages import NewRequest

RESPONSES = "/v1/responses"


def events(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    return [json.loads(frame.partition("data: ")[2]) for frame in reply.body.decode().split("\n\n")[:-1]]


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


def test_a_failure_is_an_event() -> None:
    def poisoned(request: NewRequest) -> list[int]:
        front.engine.poison.add(request.id)
        return [97, END]

    with running_front(poisoned) as front:
        said = events(post(front.port, RESPONSES, {"input": "hi", "stream": True, "background": True}))
        assert said[-1]["type"] in ("error", "response.failed")
