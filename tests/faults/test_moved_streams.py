"""Streams of a real engine that are cut and continued by their token ids, in float32 to the same text."""

from __future__ import annotations

import base64
import http.client
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers.served import Served, serving
from helpers.tiny_server import NAME, tiny_options

pytestmark = pytest.mark.live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LETTERS = {"type": "string", "minLength": 4, "maxLength": 4}
LIST = {"type": "array", "items": LETTERS, "minItems": 3, "maxItems": 3}
CALL = {"type": "object", "properties": {"cities": LIST}, "required": ["cities"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CALL, "strict": True}}]
FREE = {"model": NAME, "max_tokens": 24, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
ASKED = [{"role": "user", "content": "Say it"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "l", "schema": LIST}}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**FREE, "prompt": "greedy", "temperature": 0}),
    (COMPLETIONS, {**FREE, "prompt": "drawn", "temperature": 1.1, "frequency_penalty": 0.7, "repetition_penalty": 1.1}),
    (COMPLETIONS, {**FREE, "prompt": "seeded", "seed": 7, "min_tokens": 12, "logprobs": 1}),
    (CHAT, {**FREE, "messages": ASKED, "response_format": SCHEMA, "max_tokens": 200}),
    (CHAT, {**FREE, "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
]
MARK = re.compile(rb"^: (?:tokens ([\d ]+)|end (\d+))\n", re.MULTILINE)
SENT = {"X-Millrace-Resume": "1700000000", "Content-Type": "application/json"}


def frames_of(served: Served, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    connection.request("POST", path, json.dumps(body), {**SENT, **headers})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    assert answer.status == 200, data
    return [frame + b"\n\n" for frame in data.split(b"\n\n")[:-1]]


def encoded(ids: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode()


def shown(frames: list[bytes]) -> bytes:
    plain = MARK.sub(b"", b"".join(frames))
    return re.sub(rb'"cached_tokens":\d+', b"", plain)


def test_streams_that_move_at_any_token_say_the_same(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--tool-format", "hermes") as served:
        for number, (path, body) in enumerate(CASES):
            name = {"X-Request-Id": f"moved-{number}"}
            whole = frames_of(served, path, body, name)
            marks = [at for at, frame in enumerate(whole) if frame.startswith(b": tokens")]
            assert len(marks) > 10, body
            for cut in marks[:: max(1, len(marks) // 8)]:
                ids = [int(word) for words, _ in MARK.findall(b"".join(whole[:cut])) for word in words.split()]
                after = frames_of(served, path, body, {**name, "X-Millrace-Resume-Tokens": encoded(ids)})
                assert shown(whole[:cut] + after) == shown(whole), (body, cut)
        explained = served.request("GET", "/v1/requests/moved-0/explain")[1]["sequences"][-1]["resumed"]
        assert "Another server generated" in explained["why"]
        # Tokens that the grammar does not allow end the answer with an error, and nothing else.
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        headers = {**SENT, "X-Millrace-Resume-Tokens": encoded([65, 66, 67])}
        connection.request("POST", CHAT, json.dumps(CASES[3][1]), headers)
        assert b'"error"' in connection.getresponse().read()
        connection.close()
        assert served.request("GET", "/ready")[0] == 200
