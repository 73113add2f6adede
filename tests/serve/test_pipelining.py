"""Several requests in one segment, some of them broken: every request before the broken one gets its normal answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, connected, get, raw_post, read_all

pytestmark = pytest.mark.live

GARBAGE = b"\x00\xff not HTTP at all\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=128) as running:
        yield running
        assert get(running.port, "/ready").status == 200


def answers(front: Front, *segments: bytes) -> list[tuple[int, Any]]:
    """Status and JSON body of every answer until the server closes the connection."""
    with connected(front.port) as sock:
        for segment in segments:
            sock.sendall(segment)
        rest = read_all(sock)
    found = []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        length = int(headers[b"content-length"])
        found.append((int(lines[0].split()[1]), json.loads(rest[:length])))
        rest = rest[length:]
    return found


def statuses(front: Front, *segments: bytes) -> list[int]:
    return [status for status, _ in answers(front, *segments)]


def test_a_request_followed_by_garbage(front: Front) -> None:
    [health, error] = answers(front, HEALTH + GARBAGE)
    assert health == (200, {"status": "ok"})
    assert error[0] == 400
    assert error[1]["error"]["code"] == "malformed_http"


def test_a_body_followed_by_garbage(front: Front) -> None:
    [answer, error] = answers(front, raw_post(CHAT, BODY) + GARBAGE)
    assert answer[0] == 200
    assert answer[1]["choices"][0]["message"]["content"] == "fine"
    assert error[0] == 400


@pytest.mark.parametrize("first", [HEALTH, raw_post(CHAT, BODY)], ids=["get", "post"])
@pytest.mark.parametrize("second", [HEALTH, raw_post(CHAT, BODY)], ids=["get", "post"])
def test_two_requests_followed_by_garbage(front: Front, first: bytes, second: bytes) -> None:
    assert statuses(front, first + second + GARBAGE) == [200, 200, 400]


def test_a_body_that_ends_in_a_later_segment_with_a_request_and_garbage(front: Front) -> None:
    request = raw_post(CHAT, BODY)
    assert statuses(front, request[:-10], request[-10:] + HEALTH + GARBAGE) == [200, 200, 400]


def test_a_chunked_body_followed_by_garbage(front: Front) -> None:
    data = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    assert statuses(front, head.encode() + body + GARBAGE) == [200, 400]


def test_garbage_alone(front: Front) -> None:
    assert statuses(front, GARBAGE) == [400]


def test_a_blank_line_inside_a_body_does_not_end_it(front: Front) -> None:
    data = json.dumps(BODY).encode() + b"\r\n\r\n\r\n"
    assert statuses(front, raw_post(CHAT, data) + HEALTH + GARBAGE) == [200, 200, 400]


def test_valid_requests_are_answered_in_order(front: Front) -> None:
    last = HEALTH.replace(b"Host: test", b"Host: test\r\nConnection: close")
    assert statuses(front, raw_post(CHAT, BODY) * 3 + HEALTH + last) == [200] * 5
