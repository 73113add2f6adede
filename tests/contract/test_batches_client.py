"""Files and batches with the stock `openai` client, also across restarts of the server."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.front_under_test import END, MODEL, Front, endless, running_front, saying
from serve.null_engine import Script
from serve.wire import eventually, get, post, request

from millrace.config import Config, replace
from millrace.link.messages import NewRequest, unpack_tokens
from millrace.observe.audit import AuditLog
from millrace.observe.cost.billing import Prices, bills

pytestmark = pytest.mark.live

TEXT = "fine"
CHAT = "/v1/chat/completions"


def config_in(directory: Path, **changes: Any) -> Config:
    return replace(Config(), server__port=0, server__drain_timeout_s=0.2, server__data_dir=str(directory), **changes)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT), max_context=256) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def client_of(front: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 20, **fields}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def upload(client: openai.OpenAI, lines: list[dict[str, Any]] | bytes) -> str:
    data = lines if isinstance(lines, bytes) else b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return client.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[dict[str, Any]] | bytes, endpoint: Any = CHAT) -> str:
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h").id


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    over = ("completed", "failed", "cancelled", "expired")
    eventually(lambda: client.batches.retrieve(batch_id).status in over)
    return client.batches.retrieve(batch_id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_batches_and_background_responses_are_billed(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    config = config_in(tmp_path / "data")
    with running_front(saying(TEXT), config=config) as front, client_of(front) as client:
        front.state.audit = AuditLog(str(log))
        wrong = chat_line(3, max_tokens=0)
        ended(client, begin(client, [chat_line(1), chat_line(2), wrong]))
        response = client.responses.create(model=MODEL, input="hi", background=True)
        eventually(lambda: client.responses.retrieve(response.id).status == "completed")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    made = [record for record in records if record["method"] == "BACKGROUND"]
    assert [record["path"] for record in made] == [CHAT, CHAT, "/v1/responses"]
    assert {(record["model"], record["status"], record["finish"]) for record in made} == {(MODEL, 200, "stop")}
    assert made[2]["request_id"] == response.id
    [bill], broken = bills(log.read_text().splitlines(), Prices(output=1e6))
    assert (bill.requests, bill.failed, broken) == (3, 0, 0)
    assert bill.usd == bill.output_tokens == sum(record["output_tokens"] for record in made) > 0


def test_lines_with_bad_words_and_allowed_tokens(front: Front, client: openai.OpenAI) -> None:
    lines = [chat_line(1, bad_words=["ab"], allowed_token_ids=[97, END]), chat_line(2, allowed_token_ids=[300])]
    batch = ended(client, begin(client, lines))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert any(one.params.bad_word_ids == ((97, 98),) for one in front.engine.received)
    [wrong] = lines_of(client, batch.error_file_id)
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "allowed_token_ids"


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_files(client: openai.OpenAI) -> None:
    data = b"\x00\xff" * 300_000
    file = client.files.create(
        file=("a b.bin", data), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "a b.bin", "user_data", "processed")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert file.id in [one.id for one in client.files.list()]
    assert file.id not in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.content(file.id).content == data
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_in_pages(client: openai.OpenAI) -> None:
    made = {client.files.create(file=b"x", purpose="evals").id for _ in range(5)}
    pages = client.files.list(purpose="evals", limit=2)
    assert len(pages.data) == 2
    assert {file.id for file in pages} == made


FORM = "multipart/form-data; boundary=b"


def form(*parts: tuple[str, str]) -> bytes:
    shown = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{body}\r\n" for head, body in parts)
    return (shown + "--b--\r\n").encode()


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (b"{}", "application/json", 400, None),
        (b"junk", FORM, 400, None),
        (form(('name="purpose"', "batch")), FORM, 400, "file"),
        (form(('name="file"; filename="x"', "data")), FORM, 400, "purpose"),
        (form(('name="purpose"', "party"), ('name="file"; filename="x"', "data")), FORM, 400, "purpose"),
        (form(('name="purpos"', "batch"), ('name="file"; filename="x"', "data")), FORM, 400, "purpos"),
        (form(('name="purpose"', "b" * 5000)), FORM, 400, "purpose"),
        (form(('name="file"', "a"), ('name="file"', "b"), ('name="purpose"', "batch")), FORM, 400, "file"),
        (
            form(('name="file"', "a"), ('name="purpose"', "batch"), ('name="expires_after[anchor]"', "never")),
            FORM,
            400,
            "expires_after.anchor",
        ),
    ],
)
def test_bad_uploads(front: Front, body: bytes, kind: str, status: int, param: str | None) -> None:
    reply = request(front.port, "POST", "/v1/files", body, {"Content-Type": kind})
    assert reply.status == status, reply.body
    assert reply.error["param"] == param
    assert not list(front.state.store.files.glob(".*")), "no temporary file is left"


def test_an_upload_over_the_limit_is_refused_before_it_is_read(front: Front) -> None:
    headers = {"Content-Type": FORM, "Content-Length": str(600 << 20), "Expect": "100-continue"}
    reply = request(front.port, "POST", "/v1/files", None, headers)
    assert reply.status == 413
    assert "536870912" in reply.error["message"]


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_batch(client: openai.OpenAI, front: Front) -> None:
    bad = chat_line(3, temperature=-1)
    batch_id = begin(client, [chat_line(1), chat_line(2), bad, chat_line(4, n=2)])
    batch = ended(client, batch_id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    output = lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["line-1", "line-2", "line-4"]
    for line in output:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    [error] = lines_of(client, batch.error_file_id)
    assert error["custom_id"] == "line-3"
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.output_tokens == 4 * (len(TEXT) + 1)
    assert {one.priority for one in front.engine.received[-4:]} == {2}
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_batches_of_other_endpoints(client: openai.OpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    batch = ended(client, begin(client, [line], "/v1/completions"))
    assert lines_of(client, batch.output_file_id)[0]["response"]["body"]["choices"][0]["text"] == TEXT
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "x"}}
    batch = ended(client, begin(client, [line], "/v1/responses"))
    answer = lines_of(client, batch.output_file_id)[0]["response"]["body"]
    assert client.responses.retrieve(answer["id"]).output_text == TEXT


def test_an_invalid_input_file(client: openai.OpenAI) -> None:
    lines = [chat_line(1), chat_line(1), {**chat_line(2), "url": "/v1/completions"}, {**chat_line(3), "method": "GET"}]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"custom_id": 5}\nnot json\n'
    batch = ended(client, begin(client, data))
    assert batch.status == "failed"
    assert [error.line for error in batch.errors.data] == [2, 3, 4, 5, 6]
    assert ended(client, begin(client, b"\n\n")).errors.data[0].code == "empty_file"


def test_a_line_cannot_stream(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, [chat_line(1, stream=True)]))
    assert lines_of(client, batch.error_file_id)[0]["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after.seconds"),
        ({"endpont": "x"}, 400, "endpont"),
    ],
)
def test_bad_batches(client: openai.OpenAI, front: Front, fields: dict[str, Any], status: int, param: str) -> None:
    file_id = upload(client, [chat_line(1)])
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    reply = post(front.port, "/v1/batches", {**good, **fields})
    assert reply.status == status, reply.body
    assert reply.error["param"] == param


def test_unknown_batches(client: openai.OpenAI, front: Front) -> None:
    for reply in (get(front.port, "/v1/batches/batch_x"), post(front.port, "/v1/batches/batch_x/cancel", {})):
        assert reply.status == 404
    assert get(front.port, "/v1/batches?limit=0").error["param"] == "limit"
    assert get(front.port, "/v1/batches?after=batch_x").error["param"] == "after"
    assert get(front.port, "/v1/batches?lmit=1").error["code"] == "unknown_field"
    done = ended(client, begin(client, [chat_line(1)]))
    assert post(front.port, f"/v1/batches/{done.id}/cancel", {}).status == 409
    assert done.id in [batch.id for batch in client.batches.list(limit=2)]


def test_cancel(tmp_path: Path) -> None:
    with running_front(endless, step_s=0.01, config=config_in(tmp_path, server__batch_lines=2)) as front:
        client = client_of(front)
        batch_id = begin(client, [chat_line(number, max_tokens=4000) for number in range(5)])
        eventually(lambda: front.call(lambda: len(front.engine.rows)) == 2)
        assert client.batches.cancel(batch_id).status == "cancelling"
        batch = ended(client, batch_id)
        assert batch.status == "cancelled"
        assert front.call(lambda: len(front.engine.rows)) == 0
        lines = lines_of(client, batch.error_file_id)
        assert [line["custom_id"] for line in lines] == [f"line-{number}" for number in range(5)]
        assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}


def test_expiry(tmp_path: Path) -> None:
    with running_front(endless, step_s=0.01, config=config_in(tmp_path)) as front:
        client = client_of(front)
        batch_id = begin(client, [chat_line(1, max_tokens=4000)])
        eventually(lambda: front.call(lambda: len(front.engine.rows)) == 1)
    with sqlite3.connect(tmp_path / "store.sqlite3") as database:
        database.execute("UPDATE batches SET expires_at = created_at")
    with running_front(endless, step_s=0.01, config=config_in(tmp_path)) as front:
        client = client_of(front)
        batch = ended(client, batch_id)
        assert batch.status == "expired"
        assert lines_of(client, batch.error_file_id)[0]["error"]["code"] == "batch_expired"


def echoing(request: NewRequest) -> list[int]:
    return [*unpack_tokens(request.prompt).tolist(), END]


def until_completed(client: openai.OpenAI, batch_id: str, least: int) -> None:
    def completed() -> int:
        counts = client.batches.retrieve(batch_id).request_counts
        return counts.completed if counts is not None else 0

    eventually(lambda: completed() >= least)


@pytest.mark.parametrize("stops", [1, 3])
def test_a_restart_neither_loses_nor_repeats_lines(tmp_path: Path, stops: int) -> None:
    """The server is stopped `stops` times during the batch; answered lines are not run again."""
    total = 60
    config = config_in(tmp_path, server__batch_lines=3)
    num_answered, batch_id = 0, ""

    def four_answers() -> Script:
        numbers = count()
        return lambda request: echoing(request) if next(numbers) < 4 else endless(request)

    for _ in range(stops):
        with running_front(four_answers(), step_s=0.01, config=config) as front:
            client = client_of(front)
            batch_id = batch_id or begin(client, [chat_line(number, max_tokens=4000) for number in range(total)])
            until_completed(client, batch_id, num_answered + 4)
        with sqlite3.connect(tmp_path / "store.sqlite3") as database:
            [[num_answered]] = database.execute("SELECT count(*) FROM batch_lines WHERE status = 1").fetchall()
    with running_front(echoing, config=config) as front:
        client = client_of(front)
        batch = ended(client, batch_id)
        assert len(front.engine.received) == total - 4 * stops, "only the remaining lines are generated"
        output = lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"line-{number}" for number in range(total)]
        for number, line in enumerate(output):
            assert f"number {number}" in line["response"]["body"]["choices"][0]["message"]["content"]
        assert batch.request_counts.completed == total


def test_a_crash_while_results_are_written(tmp_path: Path) -> None:
    """An interrupted `finalizing` is repeated."""
    with running_front(saying(TEXT), config=config_in(tmp_path)) as front:
        client = client_of(front)
        batch_id = begin(client, [chat_line(1), chat_line(2)])
        batch = ended(client, batch_id)
        whole = lines_of(client, batch.output_file_id)
    with sqlite3.connect(tmp_path / "store.sqlite3") as database:
        database.execute("UPDATE batches SET status = 'finalizing', outcome = 'completed'")
        for number, line in enumerate(whole, 1):
            result = json.dumps(line).encode() + b"\n"
            row = (batch_id, number, line["custom_id"], 0, 0, 1, result)
            database.execute("INSERT INTO batch_lines VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    with running_front(saying(TEXT), config=config_in(tmp_path)) as front:
        client = client_of(front)
        batch = ended(client, batch_id)
        assert lines_of(client, batch.output_file_id) == whole
        assert front.engine.received == []


def test_two_servers_on_one_directory_run_each_line_once(tmp_path: Path) -> None:
    config = config_in(tmp_path, server__batch_lines=2)
    with running_front(echoing, step_s=0.001, config=config) as one, running_front(echoing, config=config) as two:
        client = client_of(two)
        batch = ended(client, begin(client_of(one), [chat_line(number) for number in range(10)]))
        assert batch.request_counts.completed == 10
        assert len(one.engine.received) + len(two.engine.received) == 10


# ── /v1/requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_running_requests_are_listed(tmp_path: Path) -> None:
    with running_front(endless, step_s=0.01, config=config_in(tmp_path)) as front:
        client = client_of(front)
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"X-Request-Id": "mine"},
        )
        first = next(iter(stream))
        [running] = get(front.port, "/v1/requests").json["data"]
        assert running["id"] == first.id
        assert running["request_id"] == "mine"
        assert running["path"] == CHAT
        assert running["priority"] == "standard"
        assert get(front.port, f"/v1/requests/{first.id}").json["prompt_tokens"] == running["prompt_tokens"]
        assert get(front.port, "/v1/requests/unknown").status == 404
        stream.close()
        eventually(lambda: get(front.port, "/v1/requests").json["data"] == [])
