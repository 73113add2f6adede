"""A real server of three models, two of them loaded at once: loading under load, eviction, and a killed engine."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.served import MODEL, Served, serving, wait_until
from helpers.tiny_server import tiny_source

from millrace.bench.local_server import descendants
from millrace.supervise.engine_child import ENGINE_NAME

pytestmark = pytest.mark.live

# A stream of the first model lasts while engines of the others come and go, so only that one is a real model.
SETTINGS = f"""
[server]
max_loaded = 2
[models.a]
source = "{MODEL}"
[models.b]
source = "{{tiny}}"
max_context = 1024
[models.c]
source = "{{tiny}}"
aliases = ["gpt-4o"]
"""


def answer(served: Served, model: str) -> int:
    asked = {"model": model, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
    return served.request("POST", "/v1/completions", asked)[0]


def status(served: Served) -> dict[str, str]:
    return {one["id"]: one["status"] for one in served.request("GET", "/v1/models")[1]["data"]}


def engines(served: Served) -> set[int]:
    """By name: a spare has the same command line, and its own name only once its interpreter is up."""

    def name(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""

    return {pid for pid in descendants(served.process.pid) if name(pid) == ENGINE_NAME}


def test_models_are_loaded_evicted_and_replaced_while_another_streams(tmp_path: Path) -> None:
    settings = tmp_path / "several.toml"
    settings.write_text(SETTINGS.format(tiny=tiny_source(tmp_path)))
    with serving("--fronts", "2", "--config", str(settings)) as served:
        assert len(engines(served)) == 1
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: answer(served, "b"), range(8))) == {200}
        first_two = engines(served)
        assert len(first_two) == 2, "eight requests through two fronts loaded the model once"

        stream = served.open_stream(model="a", max_tokens=4000)
        events = iter(stream)
        next(events)
        assert answer(served, "gpt-4o") == 200
        wait_until(lambda: len(engines(served)) == 2, "the evicted engine has ended")
        [of_c] = engines(served) - first_two
        assert status(served) == {"a": "loaded", "b": "unloaded", "c": "loaded", "gpt-4o": "loaded"}

        os.kill(of_c, signal.SIGKILL)
        wait_until(lambda: len(engines(served) - first_two - {of_c}) == 1, "a new engine for c")
        wait_until(lambda: all(answer(served, "c") == 200 for _ in range(4)), "c answers through both fronts")
        assert "choices" in next(events), "the stream of a goes on"
        stream.close()
        wait_until(
            lambda: served.request("POST", "/v1/models/a/unload")[1]["status"] == "unloaded", "a is idle and unloaded"
        )
        assert answer(served, "a") == 200
