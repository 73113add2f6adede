"""Every routing decision is a span in the caller's trace, and the replica's span is its child."""

from __future__ import annotations

import asyncio

import pytest
from helpers.gateways import gateway_over
from helpers.span_receiver import receiving_spans

from millrace.bench.gateway.null_replica import NullReplica, answer_text

pytestmark = pytest.mark.live

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("streams", [False, True])
def test_decisions_are_spans_of_the_callers_trace(streams: bool) -> None:
    async def check(url: str) -> None:
        broken, well = NullReplica(status=503), NullReplica()
        async with gateway_over(broken, well, policy="round-robin", otlp_url=url) as gateway:
            headers = {"traceparent": PARENT, "X-Request-Id": "asked"}
            if streams:
                seen = await gateway.stream("x", max_tokens=3, headers=headers)
                assert seen.text == answer_text("x", 3)
                told = seen.headers["traceparent"]
            else:
                body = {"prompt": "x", "max_tokens": 3}
                async with gateway.session.post(gateway.url + "/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    told = answer.headers["traceparent"]
        asked = [dict(one.headers[-1]) for one in (broken, well)]
        [root] = [span for span in receiver.spans if span.name == "POST /{path}"]
        assert root.trace_id.hex() == PARENT.split("-")[1]
        assert root.parent_span_id.hex() == PARENT.split("-")[2]
        assert told == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
        first, second = (span for span in receiver.spans if span.name == "route")
        assert (first.status.code, second.status.code) == (2, 0), "the first replica refused"
        for span, replica, cause in ((first, "r0", "new"), (second, "r1", "retry")):
            assert span.parent_span_id == root.span_id
            assert asked[replica == "r1"]["traceparent"] == f"00-{root.trace_id.hex()}-{span.span_id.hex()}-01"
            said = {one.key: one.value.string_value for one in span.attributes}
            assert (said["millrace.route.replica"], said["millrace.route.cause"]) == (replica, cause)
            assert said["millrace.route.reason"]
            assert root.start_time_unix_nano - 1e6 <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano + 1e6

    with receiving_spans() as receiver:
        asyncio.run(check(f"http://127.0.0.1:{receiver.server_port}"))
