"""What `millrace serve` prints: memory plan, curl line, warnings, status line."""

from __future__ import annotations

import io
import json
import shlex

import pytest
from msgspec.structs import replace

from millrace.commands.serve import draining_line
from millrace.link.messages import EngineReady
from millrace.terminal.colour import RED, coloured
from millrace.terminal.startup_message import (
    curl_line,
    memory_table,
    open_server_warning,
    reachable_url,
    ready_lines,
)
from millrace.terminal.status_line import StatusLine

READY = EngineReady(
    model_name="it's a model",
    max_context=8192,
    vocab_size=10,
    kv_tokens=1000,
    block_size=16,
    dtype="float32",
    device="cpu",
    memory_plan={"weights": 270 << 20, "KV pool, 1,000 tokens": 1 << 30},
    fingerprint="f",
)


@pytest.mark.parametrize("is_chat", [True, False])
def test_curl_line_is_one_valid_shell_line(is_chat: bool) -> None:
    line = curl_line("it's a model", "http://127.0.0.1:1", is_chat=is_chat)
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:2] == ["curl", f"http://127.0.0.1:1/v1/{'chat/' if is_chat else ''}completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert ("messages" in body) is is_chat


@pytest.mark.parametrize(
    ("task", "path", "field"),
    [
        ("embed", "embeddings", "input"),
        ("rank", "rerank", "query"),
        ("tag", "classify", "input"),
        ("multi", "multi-vector", "input"),
    ],
)
def test_curl_line_shows_what_an_encoder_does(task: str, path: str, field: str) -> None:
    words = shlex.split(curl_line("m", "http://127.0.0.1:1", is_chat=False, task=task))
    assert words[1] == f"http://127.0.0.1:1/v1/{path}"
    assert field in json.loads(words[words.index("-d") + 1])


def test_curl_line_sends_the_key_if_one_is_required() -> None:
    line = curl_line("m", "http://127.0.0.1:1", is_chat=True, needs_key=True)
    assert '-H "Authorization: Bearer $MILLRACE_API_KEY"' in line
    assert "Authorization" not in curl_line("m", "http://127.0.0.1:1", is_chat=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_loopback_needs_no_warning(host: str) -> None:
    assert open_server_warning(host) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", ""])
def test_server_without_keys_that_others_can_reach_gets_a_warning(host: str) -> None:
    assert "requires no API key" in open_server_warning(host)


def test_draining_line() -> None:
    assert draining_line(0, 30.0) == "Stopping: no requests are running."
    assert draining_line(1, 30.0).startswith("Draining: 1 request running, up to 30 s.")
    assert draining_line(1200, 0.5) == (
        "Draining: 1,200 requests running, up to 0.5 s. Press Ctrl-C again to stop now."
    )


def test_last_line_is_the_curl() -> None:
    assert list(ready_lines(READY, "http://h:1", 1.0, is_chat=True))[-1].startswith("curl http://h:1/")


def test_the_target_of_steps_is_printed_if_there_is_one() -> None:
    def lines(step_ms: float) -> str:
        return "\n".join(ready_lines(replace(READY, step_ms=step_ms), "http://h:1", 1.0, is_chat=True))

    assert "about 200 ms at most (--step-ms)" in lines(200.0)
    assert "--step-ms" not in lines(0.0)


def test_memory_table_lists_every_part() -> None:
    lines = list(memory_table(READY))
    assert lines[0] == "Memory on cpu, float32:"
    assert lines[1].split() == ["weights", "270", "MiB"]
    assert lines[2].endswith("1,024 MiB")
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://127.0.0.1:5"),
        ("::1", "http://[::1]:5"),
        ("10.0.0.1", "http://10.0.0.1:5"),
    ],
)
def test_url_is_reachable_from_this_machine(host: str, url: str) -> None:
    assert reachable_url(host, 5) == url


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_switched_off(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured("a", RED, FakeTerminal()) == "\033[31ma\033[0m"
    assert coloured("a", RED, io.StringIO()) == "a"
    monkeypatch.setenv(variable, value)
    assert coloured("a", RED, FakeTerminal()) == "a"


def test_status_line_is_redrawn_and_removed() -> None:
    out = FakeTerminal()
    with StatusLine(out) as line:
        line.show("weights", 1, 2)
        line.show("weights", 2, 2)
    assert " 50%" in out.getvalue()
    assert "100%" in out.getvalue()
    assert out.getvalue().endswith("\r\033[K")
    assert "\n" not in out.getvalue()


def test_status_line_without_terminal_prints_each_task_once() -> None:
    out = io.StringIO()
    with StatusLine(out) as line:
        for done in range(5):
            line.show("weights", done, 5)
        line.show("warm-up")
    assert out.getvalue() == "weights …\nwarm-up …\n"
