"""`millrace run`: where options may stand, text from pipes, and the use of a server that runs already."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running

from millrace.cli import main
from millrace.config import Config, replace
from millrace.errors import ModelError
from millrace.terminal.running_servers import announced, server_of

pytestmark = pytest.mark.live


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer(models=("smollm2-135m-instruct",), answer=("A", "B"))) as fake:
        yield fake


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make `text` the standard input, as a pipe."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    monkeypatch.setattr("sys.stdin", os.fdopen(reader, encoding="utf-8"))


def asked(server: FakeServer) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in server.requests[-1]["messages"]]


def test_dash_after_options_reads_the_pipe(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "A long text")
    assert main(["run", "smollm2-135m-instruct", "--url", server.url, "--system", "Summarise this.", "-"]) == 0
    assert capsys.readouterr().out == "AB\n"
    assert asked(server) == [("system", "Summarise this."), ("user", "A long text")]


@pytest.mark.parametrize("options_first", [True, False])
def test_prompt_stands_before_or_after_options(
    server: FakeServer, options_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "")
    options, words = ["--url", server.url, "--temperature", "0"], ["smollm2-135m-instruct", "Hello there"]
    assert main(["run", *options, *words] if options_first else ["run", words[0], *options, words[1]]) == 0
    assert asked(server) == [("user", "Hello there")]


@pytest.mark.parametrize(("prompt", "sent"), [(["summarise"], "The text.\n\nsummarise"), ([], "The text.")])
def test_piped_text_comes_before_the_prompt_or_is_it(
    server: FakeServer, prompt: list[str], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "The text.\n")
    assert main(["run", "smollm2-135m-instruct", *prompt, "--url", server.url]) == 0
    assert asked(server) == [("user", sent)]


@pytest.fixture
def listed(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """The fake server as `millrace ps` lists one that serves smollm2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = replace(Config(), model__source="smollm2")
    with announced({}, None, ["smollm2"]) as announcement:
        announcement.write("smollm2-135m-instruct", server.url, "cpu", config, {"smollm2-135m-instruct": config})
        yield server


def test_run_asks_a_server_that_has_the_model(
    listed: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "")
    assert main(["run", "smollm2-135m", "hi"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "AB\n"
    assert shown.err == f"Using the server on {listed.url} (process {os.getpid()}).\n"
    assert listed.requests[-1]["model"] == "smollm2-135m-instruct"


def test_model_in_a_chat_leaves_the_server_for_another_model(
    listed: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server was found for the first model; another one is looked for anew."""
    opened: list[str] = []

    def open_local(config: Config) -> None:
        opened.append(config.model.source)
        raise ModelError("not in this test")

    monkeypatch.setattr("millrace.terminal.local_backend.LocalBackend", open_local)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/model gemma-3-270m\n"))
    assert main(["run", "smollm2"]) == 1
    assert opened == ["gemma-3-270m"]
    assert "AB" in capsys.readouterr().out


def test_a_server_is_found_by_any_name_of_its_model(listed: FakeServer, tmp_path: Path) -> None:
    for source in ("smollm2", "smollm2-135m", "SmolLM2", "smollm2-135m-instruct"):
        assert server_of(source, has_key=False) is not None, source
    (tmp_path / "smollm2-135m-instruct").mkdir()
    for other in ("gemma-3-270m", str(tmp_path / "smollm2-135m-instruct")):
        assert server_of(other, has_key=False) is None, other


def test_run_with_settings_of_the_engine_loads_the_model_itself(
    listed: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "")
    assert main(["run", "smollm2", "--offline", "hi"]) == 1
    assert "not on this machine" in capsys.readouterr().err
    assert listed.requests == []


def test_ps_names_each_setting_once(listed: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's own settings, and of a model only what differs from them."""
    assert main(["ps", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["settings"]["model"]["source"] == "smollm2"
    assert record["models"] == {"smollm2-135m-instruct": {}}
    assert record["url"] == listed.url
