"""`millrace launch`: what the agent is told, the server that is started for it, and what is said if it is missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running
from helpers.ports import free_port
from helpers.served import wait_until
from helpers.tiny_server import tiny_source

from millrace.cli import main
from millrace.terminal.agents.coding_agents import AGENTS, Endpoint

pytestmark = pytest.mark.live

AGENT = """\
#!{python}
import json, os, sys, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/models"
with urllib.request.urlopen(url, timeout=60) as answer:
    models = json.load(answer)["data"]
said = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "models": models}}
open({out!r}, "w").write(json.dumps(said))
sys.exit(3)
"""
HERE = Endpoint("http://127.0.0.1:8000", "a-model", 32768)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """`launch` takes these signals until its process ends, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `claude` that writes what it was told to a file, and exits with 3."""
    out, program = tmp_path / "said.json", tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable, out=str(out)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another server")
    return out


def test_a_running_server_is_used_and_the_agents_exit_code_returned(agent: Path) -> None:
    with running(FakeServer(models=("one", "two"))) as server:
        code = main(["launch", "claude", "--url", server.url, "--model", "two", "--", "-p", "hi", "--model", "x"])
    said = json.loads(agent.read_text())
    assert code == 3
    assert said["arguments"] == ["-p", "hi", "--model", "x"]
    assert said["environment"]["ANTHROPIC_BASE_URL"] == server.url
    assert said["environment"]["ANTHROPIC_MODEL"] == "two"
    assert said["environment"]["ANTHROPIC_API_KEY"] == ""


def test_a_server_is_started_and_stopped_where_none_runs(agent: Path, tmp_path: Path) -> None:
    port = free_port()
    assert main(["launch", "claude", "--port", str(port), "--model", tiny_source(tmp_path)]) == 3
    said = json.loads(agent.read_text())
    assert [one["id"] for one in said["models"]] == [said["environment"]["ANTHROPIC_MODEL"]]
    assert said["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(said["models"][0]["max_model_len"])
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10)


def test_sigterm_ends_the_agent_and_the_server(agent: Path, tmp_path: Path) -> None:
    program, port = tmp_path / "bin" / "claude", free_port()
    program.write_text(f"#!/bin/sh\necho $$ > {agent}\nexec /bin/sleep 600\n")
    command = [sys.executable, "-m", "millrace", "launch", "claude", "--port", str(port)]
    launched = subprocess.Popen([*command, "--model", tiny_source(tmp_path)])
    try:
        wait_until(lambda: agent.exists() and agent.read_text().endswith("\n"), "the agent runs", 120.0)
        launched.terminate()
        assert launched.wait(60) == 128 + signal.SIGTERM
    finally:
        launched.kill()
    assert not Path(f"/proc/{agent.read_text().strip()}").exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10)


def test_a_server_of_another_model_is_named(agent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(models=("one",))) as server:
        assert main(["launch", "claude", "--url", server.url, "--model", "two"]) == 1
    assert f"{server.url} serves one, not 'two'" in capsys.readouterr().err
    assert not agent.exists()


def test_an_agent_that_is_missing_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "codex"]) == 1
    assert "Codex CLI is not installed" in (said := capsys.readouterr().err)
    assert said.endswith("npm install -g @openai/codex\n")


def test_print_shows_variables_and_command_without_agent_or_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    port = free_port()
    assert main(["launch", "qwen", "--print", "--port", str(port), "--", "-p", "List the files."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"# millrace serve qwen2.5-coder-1.5b --port {port}"
    assert f"export OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in lines
    assert lines[-1].startswith("qwen --auth-type openai ")
    assert lines[-1].endswith("-p 'List the files.'")


def test_an_unreachable_url_is_an_error(agent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "claude", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "is not reachable" in capsys.readouterr().err


def test_the_settings_of_codex_are_toml() -> None:
    arguments = AGENTS["codex"].start(HERE).arguments
    assert set(arguments[::2]) == {"-c"}
    settings = tomllib.loads("\n".join(arguments[1::2]))
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], settings["model_context_window"]) == (HERE.model, HERE.context)
    assert (provider["base_url"], provider["wire_api"]) == (f"{HERE.url}/v1", "responses")


def test_the_settings_of_opencode_name_the_provider_and_model() -> None:
    settings = json.loads(AGENTS["opencode"].start(HERE).variables["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = settings["model"].partition("/")
    assert settings["provider"][provider]["models"][model]["limit"]["context"] == HERE.context


@pytest.mark.parametrize("name", AGENTS)
def test_a_key_reaches_the_agent_in_its_environment_alone(name: str) -> None:
    start = AGENTS[name].start(Endpoint(HERE.url, HERE.model, HERE.context, api_key="mr-secret"))
    assert "mr-secret" in "".join(start.variables.values())
    assert "mr-secret" not in "".join(start.arguments)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_waits_an_hour_for_a_prompt_on_a_slow_machine(name: str) -> None:
    start = AGENTS[name].start(HERE)
    assert "3600000" in " ".join((*start.variables.values(), *start.arguments))


@pytest.mark.parametrize("context", [4096, 32768, 131072])
def test_an_answer_leaves_most_of_the_context_to_the_conversation(context: int) -> None:
    assert 0 < Endpoint(HERE.url, HERE.model, context).max_output <= min(context // 4, 8192)


@pytest.mark.parametrize("name", AGENTS)
def test_few_tools_are_the_three_that_run_read_and_edit(name: str) -> None:
    """Otherwise the prompt of a small model's agent is long, and it calls what the task does not need."""
    start = AGENTS[name].start(replace(HERE, few_tools=True))
    if name == "claude":
        assert start.arguments[:4] == ("--tools", "Bash", "Read", "Edit")
        assert start.arguments[-1].startswith("--"), "a list at the end would take the user's prompt for a tool"
    if name == "qwen":
        words = " ".join(start.arguments)
        assert (
            "--core-tools run_shell_command read_file edit --exclude-tools notebook_edit get_goal update_goal" in words
        )
    if name == "codex":
        settings = tomllib.loads("\n".join(start.arguments[1::2]))
        assert settings["features"]["multi_agent"] is False
    if name == "opencode":
        settings = json.loads(start.variables["OPENCODE_CONFIG_CONTENT"])
        assert settings["tools"] == {"*": False, "bash": True, "read": True, "edit": True}


def test_few_tools_reach_the_agent(agent: Path) -> None:
    with running(FakeServer(models=("one",))) as server:
        assert main(["launch", "claude", "--url", server.url, "--few-tools", "--", "-p", "hi"]) == 3
    assert json.loads(agent.read_text())["arguments"] == [
        *("--tools", "Bash", "Read", "Edit", "--strict-mcp-config", "-p", "hi")
    ]
