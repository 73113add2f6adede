"""A server killed during a batch finishes it after a restart, each line exactly once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from contract.real_server import TINY, RealServer, real_server, tiny_model
from serve.wire import CHAT, eventually, get, post, request

pytestmark = pytest.mark.live

LINES = 40


def start_batch(server: RealServer) -> str:
    body = {"model": TINY, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {**body, "messages": [say(n)]}}
        for n in range(LINES)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines)
    parts = [('name="purpose"', "batch"), ('name="file"; filename="a.jsonl"', data)]
    form = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n" for head, text in parts)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file = request(server.port, "POST", "/v1/files", (form + "--b--\r\n").encode(), headers).json
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch_id: str = post(server.port, "/v1/batches", asked).json["id"]
    return batch_id


def say(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"line {number}"}


def completed(server: RealServer, batch_id: str) -> int:
    return int(get(server.port, f"/v1/batches/{batch_id}").json["request_counts"]["completed"])


def test_batch_continues_after_kill_and_restart(tmp_path: Path) -> None:
    options = (*tiny_model(tmp_path), "--batch-lines", "2")
    server = RealServer(*options)
    try:
        batch_id = start_batch(server)
        eventually(lambda: completed(server, batch_id) >= 3, within_s=60)
        before = completed(server, batch_id)
        server.signal(signal.SIGKILL)
        server.wait()
    finally:
        server.kill()
    with real_server(*options) as again:
        assert completed(again, batch_id) >= before, "completed lines stay completed"
        eventually(lambda: get(again.port, f"/v1/batches/{batch_id}").json["status"] == "completed", within_s=60)
        batch = get(again.port, f"/v1/batches/{batch_id}").json
        output = get(again.port, f"/v1/files/{batch['output_file_id']}/content").body.decode().splitlines()
        assert [json.loads(line)["custom_id"] for line in output] == [f"c{n}" for n in range(LINES)]
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        for line in (json.loads(output[0]), json.loads(output[-1])):
            number = int(line["custom_id"][1:])
            body = {"model": TINY, "temperature": 0, "max_tokens": 100, "ignore_eos": True, "messages": [say(number)]}
            alone = post(again.port, CHAT, body).json["choices"][0]["message"]["content"]
            assert line["response"]["body"]["choices"][0]["message"]["content"] == alone
