"""Every command that answers at once: in a terminal of 80 columns, with NO_COLOR, without a terminal, as JSON, and into
a closed pipe. Never a traceback, always the promised exit code."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, post

from millrace.cli import EXIT_CLOSED_PIPE, main
from millrace.config import Config, replace
from millrace.serve.describe.sampler import take_sample

pytestmark = pytest.mark.live

COLUMNS = 80
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Case:
    arguments: str
    """{url}, {keys}, {audit} and {request} stand for things of the fixture."""
    code: int = 0
    has_json: bool = True
    is_wide: bool = False
    """Machine-readable: lines are not folded."""


CASES = [
    Case("--help", has_json=False),
    Case("serve --help", has_json=False),
    Case("bench --help", has_json=False),
    Case("models"),
    Case("ls"),
    Case("ps"),
    Case("show llama3.1-8b"),
    Case("show no-such-model", code=1, has_json=False),
    Case("alias"),
    Case("config"),
    Case("version"),
    Case("doctor --offline --port 0"),
    Case("help run", has_json=False),
    Case("completion bash", has_json=False, is_wide=True),
    Case("keys list {keys}"),
    Case("keys list /no/such/file", code=2, has_json=False),
    Case("top --once --url {url}"),
    Case("top --once --url http://127.0.0.1:9", code=1, has_json=False),
    Case("explain {request} --url {url}"),
    Case("explain unknown --url {url}", code=1, has_json=False),
    Case("trace {request} --url {url}"),
    Case("trace", code=2, has_json=False),
    Case("cost --url {url} --price 2"),
    Case("cost --bill {audit}", has_json=False, is_wide=True),
    Case("slo show --url {url}"),
    Case("slo rules --slos 'ttft p95 < 1 s'", has_json=False, is_wide=True),
    Case("reload no-such-server", code=1, has_json=False),
    Case("stop no-such-server", code=1, has_json=False),
    Case("rm no-such-model", code=1, has_json=False),
    Case("pull no-such-model", code=1, has_json=False),
    Case("no-such-command", code=2, has_json=False),
    Case("serve --no-such-option", code=2, has_json=False),
]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("terminals")
    keys, audit = folder / "keys.toml", folder / "audit.jsonl"
    main(["keys", "add", str(keys), "--tenant", "acme", "--json"])
    config = replace(Config(), server__port=0, observe__slos="ttft p95 < 500 ms", observe__audit_log=str(audit))
    with running_front(saying("hello"), config=config) as front:
        yield {"url": front.url, "keys": str(keys), "audit": str(_audit(folder)), "request": _request(front)}


def _request(front: Front) -> str:
    answer = post(front.port, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    front.call(lambda: take_sample(front.state, 0.0))
    explained = {"id": "r", "request_id": "r", "state": "ended", "priority": "standard", "sequences": []}

    async def query(kind: str, name: str, tenant: str | None) -> bytes:
        return json.dumps(explained).encode() if name != "unknown" else b""

    front.state.client.query = query  # type: ignore[method-assign, assignment]
    return str(answer.json["id"])


def _audit(folder: Path) -> Path:
    path = folder / "billed.jsonl"
    record = {"time": "2026-11-17", "tenant": "a", "status": 200, "prompt_tokens": 9, "output_tokens": 5}
    path.write_text(json.dumps({**record, "reasoning_tokens": 2, "model": "m"}) + "\n")
    return path


def words(case: Case, things: dict[str, str]) -> list[str]:
    import shlex

    return shlex.split(case.arguments.format(**things))


@contextmanager
def standard_output(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> Iterator[io.StringIO]:
    """Standard output is this descriptor, standard error a string."""
    problems = io.StringIO()
    with os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", closefd=True) as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", problems)
        try:
            yield problems
        finally:
            monkeypatch.undo()


def on_terminal(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    screen, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(screen, 65536):
                seen.extend(data)
        except OSError:
            pass  # The last writer has closed it.

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm-256color")
    with standard_output(monkeypatch, terminal) as problems:
        code = exit_code(arguments)
    reader.join(60)
    os.close(screen)
    return code, seen.decode(errors="replace").replace("\r\n", "\n"), problems.getvalue()


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse's --help.
        return int(ended.code or 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.arguments)
def test_in_a_terminal_of_80_columns(case: Case, things: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, screen, problems = on_terminal(words(case, things), monkeypatch)
    assert code == case.code, problems
    assert "Traceback" not in screen + problems
    assert bool(problems) == (case.code != 0), "one sentence on standard error exactly when it failed"
    if not case.is_wide:
        plain = ESCAPE.sub("", screen).splitlines()
        assert [line for line in plain if len(line) > COLUMNS] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.arguments)
def test_without_colour_json_and_closed_pipe(
    case: Case, things: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert exit_code(words(case, things)) == case.code
    shown = capsys.readouterr()
    assert not ESCAPE.search(shown.out + shown.err)
    if case.has_json:
        assert exit_code([*words(case, things), "--json"]) == case.code
        for line in capsys.readouterr().out.splitlines():
            json.loads(line)
    reader, writer = os.pipe()
    os.close(reader)
    with standard_output(monkeypatch, writer) as problems:
        code = exit_code(words(case, things))
    assert code in (case.code, EXIT_CLOSED_PIPE)
    assert "Traceback" not in problems.getvalue()
    assert case.code or not problems.getvalue()
