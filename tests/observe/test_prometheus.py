"""A real Prometheus (Debian's package) reads our page and answers the dashboard's queries."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.served import wait_until
from serve.front_under_test import MODEL, Front, endless, running_front
from serve.wire import CHAT, get, post

from millrace.config import Config, replace
from millrace.observe.slo.dashboard import panels
from millrace.observe.slo.objective import parse_objectives
from millrace.serve.describe.sampler import take_sample

pytestmark = pytest.mark.live

SLOS = "ttft p95 < 500 ms; standard: itl p99 < 80 ms"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is not installed")


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    config = replace(Config(), server__port=0, observe__slos=SLOS)
    with running_front(endless, config=config) as running:
        yield running


def chat(front: Front) -> None:
    message = {"role": "user", "content": "hi"}
    post(front.port, CHAT, {"model": MODEL, "messages": [message], "max_tokens": 6})
    front.call(lambda: take_sample(front.state, 0.0))


@needs_promtool
def test_the_page_passes_promtool(front: Front) -> None:
    chat(front)
    page = get(front.port, "/metrics").body
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr.decode()


def test_vllm_names_are_added_on_request(front: Front) -> None:
    chat(front)
    assert b"vllm:" not in get(front.port, "/metrics").body
    page = get(front.port, "/metrics?names=vllm").body.decode()
    assert 'vllm:num_requests_running{model_name="null"}' in page
    assert 'vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="null"}' in page
    assert get(front.port, "/metrics?names=tgi").status == 400


@contextmanager
def prometheus(front: Front, directory: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = directory / "prometheus.yml"
    settings.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"  - {{job_name: millrace, static_configs: [{{targets: ['127.0.0.1:{front.port}']}}]}}\n"
    )
    storage = f"--storage.tsdb.path={directory / 'data'}"
    command = ["prometheus", f"--config.file={settings}", storage, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def ask(url: str, query: str) -> list[Any]:
    with urllib.request.urlopen(f"{url}/api/v1/query?query={urllib.parse.quote(query)}", timeout=60) as answer:
        body = json.loads(answer.read())
    assert body["status"] == "success", query
    return list(body["data"]["result"])


def scraped(url: str, front: Front, wanted: int) -> bool:
    try:
        chat(front)
        found = ask(url, "sum(count_over_time(millrace_engine_steps_total[1m]))")
    except OSError:
        return False
    return bool(found) and float(found[0]["value"][1]) >= wanted


@needs_prometheus
def test_prometheus_scrapes_and_answers_every_query_of_the_dashboard(front: Front, tmp_path: Path) -> None:
    with prometheus(front, tmp_path) as url:
        wait_until(lambda: scraped(url, front, wanted=3), "Prometheus has scraped the front")
        empty = []
        for panel in panels(parse_objectives(SLOS)):
            for query, _ in panel.queries:
                if not ask(url, query):
                    empty.append(query)
    unused = ("millrace_errors_total",)  # No request failed.
    assert [query for query in empty if not any(name in query for name in unused)] == []
