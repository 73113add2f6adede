"""A stream of every dialect is cut after any frame and continued on another front, to the same bytes."""

from __future__ import annotations

import base64
import itertools
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front
from serve.wire import CHAT, COMPLETIONS, Reply, post

from millrace.config import Config, replace
from millrace.link.messages import NewRequest, unpack_tokens

pytestmark = pytest.mark.live

ASKED = [{"role": "user", "content": "Hi"}]
TEXT = "Grüße: the sea is wide, and 日本 is far away."
USAGE = {"stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASKED, **USAGE}),
    "choices": (CHAT, {"messages": ASKED, "n": 3, **USAGE}),
    "stop string": (CHAT, {"messages": ASKED, "stop": ["far"], **USAGE}),
    "length": (CHAT, {"messages": ASKED, "max_tokens": 9, **USAGE}),
    "completions": (COMPLETIONS, {"prompt": "Hi", "logprobs": 2, "echo": True, **USAGE}),
    "prompts": (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, **USAGE}),
    "messages": ("/v1/messages", {"messages": ASKED, "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "Hi"}),
}
SENT = {"X-Millrace-Resume": "1700000000", "X-Request-Id": "req-of-the-gateway"}
VARIES = re.compile(rb'"(?:created_at|completed_at|cached_tokens|cache_read_input_tokens|input_tokens)":\d+')
MARK = re.compile(rb"^: (?:tokens(?:/(\d+))? ([\d ]+)|end (\d+))\n", re.MULTILINE)


def script(request: NewRequest) -> Iterator[int]:
    """Every choice says something else, which depends on its seed."""
    assert request.params.seed is not None
    said = f"{request.params.seed % 1000}: {TEXT}".encode()
    return itertools.chain(said, [299])


@pytest.fixture(scope="module")
def fronts() -> Iterator[tuple[Front, Front]]:
    with running_front(script) as first, running_front(script) as second:
        yield first, second


def frames_of(reply: Reply) -> list[bytes]:
    assert reply.status == 200, reply.body
    return [frame + b"\n\n" for frame in reply.body.split(b"\n\n")[:-1]]


def unmarked(frames: list[bytes]) -> bytes:
    return MARK.sub(b"", b"".join(frames))


def tokens_header(frames: list[bytes], num_choices: int) -> str:
    """What a gateway sends that has forwarded these frames."""
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    ended: set[int] = set()
    for index, words, end in MARK.findall(b"".join(frames)):
        if end:
            ended.add(int(end))
        else:
            ids[int(index or 0)] += map(int, words.split())
    parts = [base64.b64encode(struct.pack(f"<{len(one)}I", *one)).decode() for one in ids]
    return ",".join(part + "!" * (index in ended) for index, part in enumerate(parts))


def cuts_of(frames: list[bytes]) -> list[int]:
    """All frames of a token are sent together, and so are those before the first one and after the end."""
    marks = [number for number, frame in enumerate(frames) if frame.startswith(b":")]
    return marks if b"event: response." in frames[-1] else [*marks, marks[-1] + 1]


def by_choice(frames: list[bytes]) -> list[bytes]:
    """In which order the choices of a step are sent is not part of an answer, nor when it began and ended, nor
    what each replica had in its cache."""

    def index(frame: bytes) -> int:
        found = re.search(rb'"choices":\[\{"index":(\d+)', frame)
        return int(found[1]) if found else -1 if frame == frames[0] else 1000

    shown = [VARIES.sub(b"", MARK.sub(b"", frame)) for frame in frames]
    return sorted(shown, key=index)


@pytest.mark.parametrize("name", CASES)
def test_a_stream_cut_after_any_frame_goes_on_to_the_same_bytes(fronts: tuple[Front, Front], name: str) -> None:
    path, body = CASES[name]
    body = {"model": MODEL, "stream": True, **body}
    first, second = fronts
    whole = frames_of(post(first.port, path, body, SENT))
    num_choices = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    assert len(whole) > 8
    for cut in cuts_of(whole)[:: 1 if num_choices == 1 else 7]:
        before = whole[:cut]
        header = {**SENT, "X-Millrace-Resume-Tokens": tokens_header(before, num_choices)}
        after = frames_of(post(second.port, path, body, header))
        assert by_choice(before + after) == by_choice(whole), (cut, header)


def test_marks_change_nothing_but_comments(fronts: tuple[Front, Front]) -> None:
    body = {"model": MODEL, "stream": True, "messages": ASKED, "seed": 5, **USAGE}
    plain = post(fronts[0].port, CHAT, body).body
    marked = unmarked(frames_of(post(fronts[0].port, CHAT, body, SENT)))
    ids = re.compile(rb'"(?:id|created)":[^,]+,')
    assert ids.sub(b"", marked) == ids.sub(b"", plain)
    assert b": tokens" not in plain


def test_tool_calls_and_their_ids_go_on(fronts: tuple[Front, Front]) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"where": "at the sea", "n": 3}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    config = replace(Config(), server__port=0, model__tool_format="hermes")

    def says(request: NewRequest) -> list[int]:
        return [*b"I look. ", *call.encode(), 299]

    with running_front(says, config=config) as first, running_front(says, config=config) as second:
        for path, body in (
            (CHAT, {"messages": ASKED, "tools": tools, **USAGE}),
            ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "look", "parameters": {}}]}),
        ):
            body = {"model": MODEL, "stream": True, **body}
            whole = frames_of(post(first.port, path, body, SENT))
            assert b"look" in unmarked(whole)
            for cut in cuts_of(whole):
                header = {**SENT, "X-Millrace-Resume-Tokens": tokens_header(whole[:cut], 1)}
                after = frames_of(post(second.port, path, body, header))
                assert by_choice(whole[:cut] + after) == by_choice(whole), cut


def test_lines_of_json_name_their_tokens_in_a_field(fronts: tuple[Front, Front]) -> None:
    import json

    body = {"model": MODEL, "messages": ASKED}
    lines = [json.loads(line) for line in post(fronts[0].port, "/api/chat", body, SENT).body.splitlines()]
    cut = 7
    ids = [one for line in lines[:cut] for one in line["millrace_tokens"]]
    tokens = base64.b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode()
    header = {**SENT, "X-Millrace-Resume-Tokens": tokens}
    after = [json.loads(line) for line in post(fronts[1].port, "/api/chat", body, header).body.splitlines()]
    said = "".join(line["message"]["content"] for line in lines)
    assert "".join(line["message"]["content"] for line in lines[:cut] + after) == said
    assert after[-1]["eval_count"] == lines[-1]["eval_count"]


def test_the_engine_gets_the_tokens_and_many_lines_of_them(fronts: tuple[Front, Front]) -> None:
    import http.client

    ids = [97 + number % 26 for number in range(3000)]
    text = base64.b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode()
    connection = http.client.HTTPConnection("127.0.0.1", fronts[1].port, timeout=60)
    connection.putrequest("POST", CHAT)
    body = b'{"model": "%b", "stream": true, "max_tokens": 3500, "messages": [{"role": "user", "content": "Hi"}]}'
    data = body % MODEL.encode()
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(data)))
    for start in range(0, len(text), 6000):
        connection.putheader("X-Millrace-Resume-Tokens", text[start : start + 6000])
    connection.endheaders(data)
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    connection.close()
    resumed = fronts[1].engine.received[-1].resumed
    assert resumed is not None
    assert unpack_tokens(resumed.output).tolist() == ids


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"X-Millrace-Resume-Tokens": "###"}, 400, "base64"),
        ({"X-Millrace-Resume-Tokens": "AAA="}, 400, "base64"),
        ({"X-Millrace-Resume-Tokens": "//////////8="}, 400, "vocabulary"),
        ({"X-Millrace-Resume-Tokens": ","}, 400, "2 parts"),
        ({"X-Millrace-Resume-Tokens": "YQAAAA==", "X-Forwarded-For": "1.2.3.4"}, 403, "gateway"),
        ({"X-Millrace-Resume": "yes"}, 400, "Unix time"),
    ],
)
def test_what_is_no_continuation_is_refused(
    fronts: tuple[Front, Front], headers: dict[str, str], status: int, said: str
) -> None:
    reply = post(fronts[0].port, CHAT, {"model": MODEL, "messages": ASKED, "stream": True}, headers)
    assert reply.status == status, reply.body
    assert said in reply.error["message"]


def test_more_tokens_than_the_answer_may_have_are_refused(fronts: tuple[Front, Front]) -> None:
    header = {"X-Millrace-Resume-Tokens": base64.b64encode(struct.pack("<3I", 97, 98, 99)).decode()}
    body = {"model": MODEL, "messages": ASKED, "stream": True, "max_tokens": 2}
    assert "may have 2" in post(fronts[0].port, CHAT, body, header).error["message"]
    whole = post(fronts[0].port, CHAT, {**body, "stream": False, "max_tokens": 20}, header)
    assert (whole.status, whole.error["param"]) == (400, "X-Millrace-Resume-Tokens")


def test_a_client_that_is_no_gateway_gets_no_marks_and_a_gateway_key_gives_them() -> None:
    config = replace(Config(), server__port=0, server__gateway_key="between us")
    body = {"model": MODEL, "messages": ASKED, "stream": True}
    with running_front(script, config=config) as front:
        assert b": tokens" not in post(front.port, CHAT, body, SENT).body
        assert b": tokens" not in post(front.port, CHAT, body, {**SENT, "X-Millrace-Gateway-Key": "guess"}).body
        assert b": tokens" in post(front.port, CHAT, body, {**SENT, "X-Millrace-Gateway-Key": "between us"}).body
