"""Every example in README, docs and `--help` runs, against one server of the default model.

What cannot run here is in a list with its reason; its options are still checked by the parser of its command.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.examples import (
    DOCUMENTED,
    Example,
    Workshop,
    check_arguments,
    commands_in,
    help_examples,
    python_examples,
    shell_examples,
)
from helpers.pages import PAGES, name_of, without_blocks
from helpers.served import wait_until

from millrace.cli import COMMANDS
from millrace.serve import api_routes

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

CANNOT_RUN = {
    r"^(source .venv/|pip |python -m venv |peers\S*/bin/pip |git |docker |npm |systemctl |cmake )": "sets up a machine",
    r"^(llama-server|vllm|VLLM_\w+=|peers\S*/bin/python)\b": "another engine",
    r'"model": "(sparse|colbert)"': "further models are tested in tests/serve/test_encoders_served.py",
    r'"model": "(minilm|reranker|classifier)"': "further models are tested in tests/real_models/test_real_encoders.py",
    r"^python examples/rag\.py": "needs two encoders; the page says what it printed",
    r"^for turn in|^python (tools/|-m millrace\.bench)": "measures for minutes",
    r"^millrace (bench|faults|train-drafter|train-adapter|merge)\b": "takes minutes, or a GPU",
    r"^millrace load (?!.*--seconds \d\b)": "sends requests for a minute, or reads files that this would write",
    r"^millrace profile\b": "waits for steps of other requests",
    r"^millrace serve\b": "the server of these tests stands for it",
    r"^millrace stop\b": "ends the server of these tests, which their fixture does",
    r"^millrace top *(#.*)?$|^millrace top *refresh": "runs until Ctrl-C",
    r"^millrace (run|chat|generate|pull|rm|kv|simulate)\b.*(llama|qwen|gemma|org/)": "another model than the default",
    r"^millrace (doctor|train-drafter|train-adapter) \./my-model": "a directory of the reader's",
    r"^millrace gateway (?!replay)": "a gateway serves until Ctrl-C; tests/gateway starts some",
    r"^millrace gateway replay|\bmillrace replay ": "reads what a gateway or an engine recorded",
    r"^millrace router ask ": "needs two models; tests/model_router asks a small server",
    r"^millrace up (?!.*--check)|^millrace (status|restart|down) ": "needs a fleet that runs, as in tests/fleet",
    r"^millrace calibrate|^millrace study \S|^millrace tune ": "measures or simulates for minutes",
    r"^millrace (simulate|capacity) .*--rate": "simulates minutes of requests, as tests/simulate does shortly",
    r"^millrace postmortem .*--since": "asks for an hour that has passed",
    r"/v1/kv/events": "streams until Ctrl-C",
    r'"model": "(reranker|classifier|sparse|colbert|\S*MiniLM\S*)"': "a model that these tests do not serve",
    r"^millrace canary ": "needs two versions of an adapter",
    r"^millrace create": "reads a Modelfile; tests/contract/test_created_models.py has one",
    r"^millrace launch(?!.* --print)": "starts a program that npm installs",
    r"^millrace models --check": "asks the hub",
    r"smollm2-135m-instruct:pirate": "tests/serve/test_adapters_served.py makes adapters",
    r"^millrace keys remove": "the hash is made up",
    r"completion zsh": "needs zsh",
    r"/api/delete": "would delete a model, and this one is not there",
}
"""Patterns of commands, each with the reason why no such command is run. The options are checked all the same."""

CODE_ONLY = {"docs/contributing/": "a part of a file of Millrace"}
"""Beginnings of names of Python blocks that are no programs."""

NEVER_RUN = {
    "serve": "the fixture runs it",
    "stop": "the fixture runs it",
    "bench": "tests/bench runs its parts",
    "faults": "tests/faults runs them shortly",
    "train-drafter": "tests/training runs it on a tiny model",
    "train-adapter": "tests/training runs it on a tiny model",
    "merge": "tests/training runs it on a tiny model",
    "canary": "tests/serve/test_adapters_served.py asks its endpoints",
    "create": "tests/contract creates models",
    "rm": "tests/commands deletes a model of its own",
    "gateway": "tests/gateway starts some",
    "status": "tests/fleet starts fleets",
    "restart": "tests/fleet starts fleets",
    "down": "tests/fleet starts fleets",
    "calibrate": "tests/simulate calibrates a tiny model",
    "tune": "tests/simulate tunes a few settings",
    "replay": "tests/simulate replays a log of its own",
}
"""Commands of which no example is run, with what runs them instead."""

ENCODERS = "tests/serve/test_encoders_served.py asks encoders"
ADAPTERS = "tests/serve/test_adapters_served.py makes adapters"
NEVER_ASKED = {
    **{f"POST {path}": ENCODERS for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")},
    **{f"POST {path}": ENCODERS for path in ("/v1/classify", "/classify", "/v1/sparse-vector", "/v1/multi-vector")},
    **{f"POST /api/{path}": "tests/contract/test_created_models.py" for path in ("copy", "blobs/{digest}")},
    **{f"{method} /v1/adapters": ADAPTERS for method in ("GET", "POST")},
    **{f"{method} /v1/adapters/{{name}}": ADAPTERS for method in ("GET", "DELETE")},
    **{f"{method} /v1/adapters/{{name}}/canary": ADAPTERS for method in ("POST", "DELETE")},
    "POST /v1/adapters/{name}/canary/promote": ADAPTERS,
    **{f"POST /v1/{what}_lora_adapter": ADAPTERS for what in ("load", "unload")},
    **{f"{method} /v1/created": "tests/gateway/test_kept_things.py has two replicas" for method in ("GET", "POST")},
    "GET /v1/created/files/{digest}": "tests/gateway/test_kept_things.py has two replicas",
    "GET /v1/stored": "tests/gateway/test_moved_past.py has two replicas",
    "POST /v1/stored": "tests/gateway/test_moved_past.py has two replicas",
    "POST /v1/kv/blocks": "tests/gateway/test_kv_between_replicas.py has two replicas",
    "GET /v1/kv/events": "tests/faults/test_kv_events_served.py reads its stream",
}

SHELL = [*shell_examples(), *help_examples()]
PYTHON = list(python_examples())


def why_not(command: str) -> str | None:
    return next((reason for pattern, reason in CANNOT_RUN.items() if re.search(pattern, command)), None)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A workshop whose server is started as README does, and ended by `millrace stop`."""
    made = Workshop(tmp_path_factory.mktemp("examples"))
    log = made.folder / "server.log"
    (made.folder / "export.key").write_text("0123456789abcdef" * 2)
    options = ("--port", "0", "--kv-tokens", "16384", "--audit-log", str(made.folder / "audit.jsonl"))
    options += ("--kv-export-key", "export.key")
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["millrace", "serve", "smollm2", *options], stdout=out, stderr=out, env=made.environment, cwd=made.folder
        )
    try:
        found = re.compile(r"^Serving .*http://[^ :]+:(\d+)", re.MULTILINE)
        wait_until(lambda: process.poll() is not None or bool(found.search(log.read_text())), "it serves", 180)
        serving = found.search(log.read_text())
        assert serving, log.read_text()
        made.port = int(serving[1])
        yield made
        made.run("millrace stop")
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.parametrize("example", SHELL, ids=lambda example: example.name)
def test_shell_example(workshop: Workshop, example: Example) -> None:
    for command in example.commands:
        if why_not(command):
            check_arguments(command)
        else:
            workshop.run(command)


@pytest.mark.parametrize(("name", "code"), PYTHON, ids=[name for name, _ in PYTHON])
def test_python_example(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: str
) -> None:
    if any(name.startswith(page) for page in CODE_ONLY):
        compile(code, name, "exec")
        return
    script = tmp_path / "example.py"
    script.write_text(code.replace(DOCUMENTED, f"127.0.0.1:{workshop.port}"), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example prints something"


def test_each_reason_is_needed() -> None:
    commands = [command for example in SHELL for command in example.commands]
    unused = [pattern for pattern in CANNOT_RUN if not any(re.search(pattern, command) for command in commands)]
    assert unused == []
    assert [page for page in CODE_ONLY if not any(name.startswith(page) for name, _ in PYTHON)] == []


def test_examples_are_fenced() -> None:
    """An indented block would not be found, and not be run."""
    indented = r"^ {4,}(?:curl|millrace|python3?|make|pip|from \w+ import|import) "
    found = {
        name_of(page): re.findall(indented, without_blocks(page.read_text(encoding="utf-8")), re.M) for page in PAGES
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_each_command_has_an_example() -> None:
    without = [example.name for example in SHELL if example.name.endswith("--help") and not example.commands]
    assert without == []


def test_commands_are_told_apart() -> None:
    commands = ["one a \\\n  b   # why", "two -d '{\n  \"x\": 1}'", "for x in 1 2; do\n  echo $x\ndone", "three"]
    assert list(commands_in("# only a comment\n" + "\n\n".join(commands) + "\n")) == commands


def test_each_command_and_endpoint_was_used(workshop: Workshop, request: pytest.FixtureRequest) -> None:
    collected = {item.name for item in request.session.items if item.path == request.path}
    expected = len(SHELL) + len(PYTHON)
    if sum(name.startswith(("test_shell_example[", "test_python_example[")) for name in collected) < expected:
        pytest.skip("needs all examples to have run before")
    assert set(COMMANDS) - workshop.ran == set(NEVER_RUN)
    lines = [json.loads(line) for line in (workshop.folder / "audit.jsonl").read_text().splitlines()]
    good = {(line["method"], line["path"]) for line in lines if line["status"] < 300}
    routes = [(method, route) for method in ("POST", "GET", "DELETE") for route in getattr(api_routes, method)]
    unused = {
        f"{method} {route}"
        for method, route in routes
        if not any(method == used and _matches(route, path) for used, path in good)
    }
    assert unused == set(NEVER_ASKED)


def _matches(route: str, path: str) -> bool:
    fixed = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}
    pattern = re.sub(r"\\\{\w+(?::.*?[+*])?\\\}", "[^/]+", re.escape(route))
    return re.fullmatch(pattern, path) is not None and (path == route or path not in fixed)
