"""A beam search is one request: in metrics and explanations, and when it is cancelled through any front."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers.served import MODEL, Served, serving, wait_until

COUNTERS = (
    'millrace_engine_finished_total{reason="length"}',
    'millrace_ttft_seconds_count{priority="standard"}',
    'millrace_sequence_seconds_count{priority="standard"}',
    'millrace_queue_seconds_count{priority="standard"}',
    'millrace_sequences_total{priority="standard"}',
    'millrace_good_sequences_total{priority="standard"}',
)


def search(served: Served, name: str, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": "Once upon a time", "num_beams": 4, "ignore_eos": True, **fields}
    return served.request("POST", "/v1/completions", body, {"X-Request-Id": name})


def ends(served: Served, name: str) -> list[str | None]:
    return [one["finish_reason"] for one in served.request("GET", f"/v1/requests/{name}")[1]["sequences"]]


def counts(served: Served) -> list[float]:
    _, page = served.request("GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return [float(lines.get(name, "0")) for name in COUNTERS]


@pytest.mark.live
def test_a_search_is_one_request() -> None:
    with serving("--fronts", "2") as served:
        wait_until(lambda: served.metric("millrace_fronts_up") == 2, "two fronts")
        status, answer = search(served, "counted", max_tokens=5)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        explained = served.request("GET", "/v1/requests/counted/explain")[1]
        assert (explained["state"], explained["id"]) == ("ended", answer["id"])
        (sequence,) = explained["sequences"]
        assert (sequence["finish_reason"], sequence["output_tokens"]) == ("length", 5)
        assert sequence["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        wait_until(lambda: counts(served)[0] >= 1, "the engine's report")
        assert counts(served) == [1.0] * len(COUNTERS)
        assert served.metric("millrace_engine_prompt_tokens_total") == answer["usage"]["prompt_tokens"]

        results: dict[str, Any] = {}
        for number in range(4):  # whichever front is asked
            name = f"cancelled{number}"
            runs = threading.Thread(target=lambda n=name: results.update({n: search(served, n, max_tokens=900)}))
            runs.start()
            wait_until(lambda name=name: served.request("GET", f"/v1/requests/{name}/explain")[0] == 200, "it is known")
            running = served.request("GET", f"/v1/requests/{name}/explain")[1]
            assert (running["state"] != "ended", len(running["sequences"])) == (True, 1)
            cancelled = served.request("DELETE", f"/v1/requests/{name}")[1]
            assert (cancelled["cancelled"], cancelled["sequences"]) == (True, 1)
            runs.join(60)
            assert (results[name][0], results[name][1]["error"]["code"]) == (499, "request_cancelled")
            # The front tells the engine, which may hear the next question, through another front, before that.
            wait_until(lambda name=name: ends(served, name) == ["cancelled"], "its end is known")
