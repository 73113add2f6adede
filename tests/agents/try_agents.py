"""Runs coding agents headless on a tiny repository against a real model, and judges the protocol: `make test-agents`.

Each agent gets a home directory of its own and few tools, and may run only harmless commands. Its requests are changed
on the way: answers are greedy and short, and the first must call the tool that runs a command, so that calls and
results are exchanged whatever the model's wit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.verdict import CHAT, MESSAGES, RESPONSES, calls, problems
from agents.wire_log import WireLog

from millrace.bench.local_server import LocalServer

TASK = "Run ls to list the files, change Hello to Good morning in greeting.py, then run: python3 greeting.py"
SYSTEM = "You are a coding agent. Work with the tools, one call at a time."
MAX_TURNS = 6
"""Calls of a model that does not stop by itself. Codex has no such option: then its requests forbid calls."""
HEADLESS: dict[str, tuple[str, ...]] = {
    "claude": (
        *("-p", TASK, "--system-prompt", SYSTEM, "--max-turns", str(MAX_TURNS)),
        *("--allowedTools", "Bash(ls:*)", "Bash(python3 greeting.py)", "Read", "Edit"),
    ),
    "codex": (
        *("exec", "--sandbox", "workspace-write", "-c", 'model_instructions_file="../instructions.md"'),
        TASK,
    ),
    "opencode": ("run", TASK),
    "qwen": (
        *("--system-prompt", SYSTEM, "--max-session-turns", str(MAX_TURNS), "--approval-mode", "auto-edit"),
        *("--allowed-tools", "run_shell_command(ls)", "run_shell_command(python3 greeting.py)"),
        *("-p", TASK),
    ),
}
"""Arguments with which an agent does a task without a terminal."""
OPENCODE = {
    "permission": {
        "*": "deny",
        "read": "allow",
        "edit": "allow",
        "bash": {"ls": "allow", "python3 greeting.py": "allow"},
    },
    "agent": {"build": {"prompt": SYSTEM}},
    "autoupdate": False,
    "share": "disabled",
}
"""Its configuration: it has no options for these."""
SHELLS = {"Bash", "bash", "exec_command", "run_shell_command"}
"""Names of the tools that run a command."""
LIMITS = {MESSAGES: "max_tokens", CHAT: "max_tokens", RESPONSES: "max_output_tokens"}
MAX_TOKENS = 512


class ShortAnswers:
    """Makes answers greedy and short, requires a command in the first one, and after some turns forbids calls, so that
    an agent ends whose model would call tools for ever."""

    def __init__(self) -> None:
        self._num_turns = 0

    def __call__(self, path: str, body: Any) -> Any:
        if path not in LIMITS:
            return body
        changed = {**body, "temperature": 0, LIMITS[path]: MAX_TOKENS}
        names = [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or ()]
        shell = next((name for name in names if name in SHELLS), None)
        if shell is None:
            return changed
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            return {**changed, "tool_choice": {"type": "none"} if path == MESSAGES else "none"}
        if self._num_turns > 1:
            return changed
        function = {"function": {"name": shell}} if path == CHAT else {"name": shell}
        return {**changed, "tool_choice": {"type": "tool" if path == MESSAGES else "function", **function}}


def place_for_homes(logs: Path) -> Path:
    """Beside the logs, but not below /tmp: Codex makes no sandbox for a home directory there, so it runs no command."""
    beside = logs.parent.resolve()
    if not beside.is_relative_to(Path(tempfile.gettempdir()).resolve()):
        return beside
    place = Path.home() / ".cache" / "millrace" / "agents"
    place.mkdir(parents=True, exist_ok=True)
    return place


def make_repository(directory: Path) -> Path:
    """A git repository with two files; beside it a home directory and Codex's instructions."""
    repository = directory / "repository"
    repository.mkdir()
    (directory / "home" / ".config" / "opencode").mkdir(parents=True)
    (directory / "home" / ".config" / "opencode" / "opencode.json").write_text(json.dumps(OPENCODE))
    (directory / "instructions.md").write_text(SYSTEM)
    (repository / "greeting.py").write_text('print("Hello")\n')
    (repository / "README.md").write_text("# A greeting\n")
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", *command], cwd=repository, check=True)
    return repository


async def run_agent(name: str, url: str, programs: Path, repository: Path, timeout_s: float) -> tuple[int | None, str]:
    """Exit code, or None after the timeout, and what the agent printed."""
    home = repository.parent / "home"
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    environment["PWD"] = str(repository)  # opencode works where it says.
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millrace", "launch", name, "--few-tools", "--url", url, "--", *HEADLESS[name]),
        cwd=repository,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), timeout_s)
    except TimeoutError:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = await child.communicate()
        return None, output.decode("utf-8", "replace")
    return child.returncode, output.decode("utf-8", "replace")


async def try_agent(name: str, url: str, programs: Path, logs: Path, timeout_s: float) -> bool:
    """Prints the verdict; True if the protocol held."""
    with tempfile.TemporaryDirectory(prefix="try-", dir=place_for_homes(logs)) as directory:
        repository = make_repository(Path(directory))
        async with WireLog(url, ShortAnswers()) as log:
            code, output = await run_agent(name, log.url, programs, repository, timeout_s)
        edited = "Good morning" in (repository / "greeting.py").read_text()
    log.write(logs / f"{name}.jsonl")
    (logs / f"{name}.txt").write_text(output, encoding="utf-8")
    found = problems(log.exchanges)
    if code is None:
        found.append(f"The agent had not ended after {timeout_s:g} s.")
    called = sum(len(calls(one)) for one in log.exchanges)
    if not called:
        found.append("No tool was called, although a call was required.")
    print(
        f"{name}: {len(log.exchanges)} requests, {called} tool calls, file {'edited' if edited else 'not edited'},"
        f" exit code {code}: {'the protocol held' if not found else 'PROBLEMS'}",
        flush=True,
    )
    for problem in found:
        print(f"  {problem}", flush=True)
    return not found


@contextlib.contextmanager
def served(model: str, url: str) -> Iterator[str]:
    if url:
        yield url
        return
    with LocalServer([model], start_timeout_s=900.0) as server:
        asyncio.run(server.wait_ready())
        yield server.url


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(HEADLESS)} (default: all)")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="model to serve (default: %(default)s)")
    parser.add_argument("--url", default="", help="use this server, and start none")
    parser.add_argument("--programs", type=Path, default=Path(".agents/node_modules/.bin"), help="where the agents are")
    parser.add_argument("--logs", type=Path, default=Path(".agents/logs"), help="where the wire logs go")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each agent (default: 900)")
    args = parser.parse_args(arguments)
    names = args.agents or list(HEADLESS)
    args.logs.mkdir(parents=True, exist_ok=True)
    with served(args.model, args.url) as url:
        held = [asyncio.run(try_agent(name, url, args.programs.resolve(), args.logs, args.timeout)) for name in names]
    print(f"{sum(held)} of {len(names)} agents: the protocol held. Wire logs: {args.logs}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
