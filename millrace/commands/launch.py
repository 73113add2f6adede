"""`millrace launch AGENT`: starts a coding agent that uses a server on this machine, and the server if none runs."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError

from millrace.config import child_environment, client_api_key, load_config
from millrace.errors import MillraceError, NotFound
from millrace.terminal.agents.coding_agents import AGENTS, CodingAgent, Endpoint, Start
from millrace.terminal.server_options import get_json

USAGE = "millrace launch AGENT [--model MODEL] [options] [-- arguments of the agent]"
EXAMPLES = """\
agents (npm has all of them): claude, codex, qwen, opencode

Uses the server on this port. If there is none, starts one and stops it when
the agent ends. The agent's own configuration is not changed: server and model
are given in its environment and its arguments, for this run. docs/agents.md
says what was tried with which model.

examples:
  millrace launch claude                                 Claude Code, with the model that is served
  millrace launch codex --model qwen3-8b                 starts `millrace serve qwen3-8b` first
  millrace launch qwen -- -p "List the files here."      what follows -- is for the agent
  millrace launch qwen --few-tools                       less to read for a small model or a CPU
  millrace launch claude --print                         show variables and command, start nothing
  millrace launch opencode --url http://10.0.0.5:8000    a server on another machine"""

DEFAULT_MODEL = "qwen2.5-coder-1.5b"
"""The smallest model known by name that calls tools and whose context holds an agent's prompt."""
LEAST_CONTEXT = 16384
"""Tokens that the prompt of an agent takes before the user has said anything, rounded up."""
ASSUMED_CONTEXT = 32768
"""Shown by --print while no server runs that could tell."""
START_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=list(AGENTS), metavar="AGENT", help=f"one of: {', '.join(AGENTS)}")
    started = f"the server's first; {DEFAULT_MODEL} if none runs"
    parser.add_argument("--model", default="", metavar="MODEL", help=f"model to use (default: {started})")
    parser.add_argument("--port", type=int, metavar="N", help="port of the server on this machine (default: 8000)")
    parser.add_argument("--url", default="", metavar="URL", help="use this server, and start none")
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key (default: MILLRACE_API_KEY)")
    parser.add_argument(
        "--few-tools", action="store_true", help="only tools that run a command, read and edit: a shorter prompt"
    )
    parser.add_argument(
        "--print", "--dry-run", dest="only_print", action="store_true", help="show what would be started, and exit"
    )
    parser.set_defaults(after_dashes=[])


def run(args: argparse.Namespace) -> int:
    agent = AGENTS[args.agent]
    port = args.port or load_config(None, {}).config.server.port
    url = args.url.rstrip("/").removesuffix("/v1") or f"http://127.0.0.1:{port}"
    api_key = args.api_key or client_api_key()
    if args.only_print:
        _print(agent, url, args, api_key)
        return 0
    if shutil.which(agent.program) is None:
        raise NotFound(
            f"{agent.title} is not installed: there is no program '{agent.program}'."
            f" Install it with: npm install -g {agent.package}"
        )
    with _served(url, args.model, api_key, port=0 if args.url else port) as endpoint:
        if endpoint.context < LEAST_CONTEXT:
            print(
                f"The context of {endpoint.model} is {endpoint.context:,} tokens; {agent.title} alone may need"
                f" {LEAST_CONTEXT:,}.",
                file=sys.stderr,
            )
        return _run_agent(agent, agent.start(replace(endpoint, few_tools=args.few_tools)), args.after_dashes)


@contextmanager
def _served(url: str, model: str, api_key: str, *, port: int) -> Iterator[Endpoint]:
    """The server at `url`; if none runs there and `port` is not 0, one that is started and stopped at the end."""
    models = _models(url, api_key, may_be_absent=bool(port))
    if models is not None:
        yield _endpoint(url, model, api_key, models)
        return
    from millrace.bench.local_server import ServerProcess
    from millrace.terminal.model_download import obtain_model
    from millrace.terminal.status_line import StatusLine

    model = model or DEFAULT_MODEL
    obtain_model(model)
    with ServerProcess(_serve_command(model, port), port, start_timeout_s=START_TIMEOUT_S) as server:
        with StatusLine() as line:
            line.show(f"starting a server of {model} on {url}")
            asyncio.run(server.wait_ready())
        # The name under which it serves a model may be shorter than its source.
        yield _endpoint(url, "", api_key, _models(url, api_key) or [])


def _serve_command(model: str, port: int) -> list[str]:
    return [sys.executable, "-m", "millrace", "serve", model, "--port", str(port)]


def _models(url: str, api_key: str, *, may_be_absent: bool = False) -> list[dict[str, Any]] | None:
    """The models that the server lists; None if there is no server and there need not be one."""
    try:
        listed = get_json(url, "/v1/models", api_key)["data"]
    except MillraceError as error:
        is_absent = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, HTTPError)
        if may_be_absent and is_absent:
            return None
        raise
    assert isinstance(listed, list)
    return listed


def _endpoint(url: str, model: str, api_key: str, models: Sequence[dict[str, Any]]) -> Endpoint:
    found = next((one for one in models if model in ("", one["id"])), None)
    if found is None:
        names = ", ".join(one["id"] for one in models) or "no model"
        raise NotFound(
            f"The server on {url} serves {names}, not '{model}'. Leave --model out, or choose another --port"
            " to start a server of it."
        )
    return Endpoint(url, found["id"], found.get("max_model_len") or ASSUMED_CONTEXT, api_key)


def _run_agent(agent: CodingAgent, start: Start, more: Sequence[str]) -> int:
    """The agent's exit code. Ctrl-C is the agent's, and SIGTERM is passed on: this process waits for it to end."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Unlike SIG_IGN, not inherited by the agent.
    command = [agent.program, *start.arguments, *more]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))  # Until there is somebody to tell.
    with subprocess.Popen(command, env=child_environment(**start.variables)) as child:
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        if told:
            child.terminate()
        code = child.wait()
    return code if code >= 0 else 128 - code


def _print(agent: CodingAgent, url: str, args: argparse.Namespace, api_key: str) -> None:
    model = args.model
    models = _models(url, api_key, may_be_absent=not args.url)
    if models is None:
        model = model or DEFAULT_MODEL
        print(f"# No server runs on {url}. This one would be started, with a context of its own:")
        print(f"# millrace serve {model} --port {url.rpartition(':')[2]}")
        models = [{"id": model}]
    start = agent.start(replace(_endpoint(url, model, api_key, models), few_tools=args.few_tools))
    for name, value in start.variables.items():
        print(f"export {name}={shlex.quote(value)}")
    print(shlex.join([agent.program, *start.arguments, *args.after_dashes]))
