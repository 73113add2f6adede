"""What each coding agent reads from its environment and its command line.

Nothing is written to the agent's own configuration: what is said here holds for one run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_OUTPUT = 8192
"""Tokens of one answer. Agents ask for up to 32,000, which the server refuses where the context is no longer."""
TIMEOUT_MS = 3_600_000
"""For one request: on a CPU the prompt of an agent takes minutes."""
NO_KEY = "millrace"
"""Sent where the server needs no key: agents refuse to start without one."""
CODEX_FEATURES = ("multi_agent", "goals", "skill_search", "apps", "plugins")
"""Bring tools beside those that run a command and change files."""
QWEN_TOOLS = ("run_shell_command", "read_file", "edit")
QWEN_OTHER_TOOLS = ("notebook_edit", "get_goal", "update_goal")
"""Present although it is started with QWEN_TOOLS alone."""
OPENCODE_TOOLS = ("bash", "read", "edit")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that an agent is to use."""

    url: str
    model: str
    context: int
    """Tokens."""
    api_key: str = ""
    few_tools: bool = False
    """True if the agent is to have only the tools that run a command and read and edit files."""

    @property
    def max_output(self) -> int:
        """Tokens of one answer, so that most of the context is left to the conversation."""
        return min(MAX_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class Start:
    """How to start an agent for one run."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CodingAgent:
    title: str
    program: str
    package: str
    """On npm."""
    start: Callable[[Endpoint], Start] = field(repr=False)


def _claude(endpoint: Endpoint) -> Start:
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    tiers = tuple(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "HAIKU", "FABLE"))
    return Start(
        {
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.api_key or NO_KEY,
            "ANTHROPIC_API_KEY": "",  # The user's own key is for another server.
            **dict.fromkeys((*models, *tiers), endpoint.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output),
            # A line at the head of the prompt that changes with each version of the agent.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(TIMEOUT_MS),
        },
        ("--tools", "Bash", "Read", "Edit", "--strict-mcp-config") if endpoint.few_tools else (),
    )


def _codex(endpoint: Endpoint) -> Start:
    provider = {
        "name": "Millrace",
        "base_url": f"{endpoint.url}/v1",
        "wire_api": "responses",
        "env_key": "MILLRACE_API_KEY",
        "stream_idle_timeout_ms": TIMEOUT_MS,
    }
    settings = {
        "model": endpoint.model,
        "model_provider": "millrace",
        **{f"model_providers.millrace.{name}": value for name, value in provider.items()},
        "model_context_window": endpoint.context,
        "web_search": "disabled",
        **{f"features.{name}": False for name in CODEX_FEATURES if endpoint.few_tools},
    }
    # The values are TOML, in which these strings and numbers look as in JSON.
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Start({"MILLRACE_API_KEY": endpoint.api_key or NO_KEY}, tuple(options))


def _qwen(endpoint: Endpoint) -> Start:
    tools = ("--bare", "--core-tools", *QWEN_TOOLS, "--exclude-tools", *QWEN_OTHER_TOOLS) if endpoint.few_tools else ()
    return Start(
        {
            "OPENAI_BASE_URL": f"{endpoint.url}/v1",
            "OPENAI_API_KEY": endpoint.api_key or NO_KEY,
            "OPENAI_MODEL": endpoint.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output),
            "QWEN_CODE_API_TIMEOUT_MS": str(TIMEOUT_MS),
            # By default it gives up after four minutes without a chunk, and comments are none.
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(TIMEOUT_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(TIMEOUT_MS),
        },
        (*tools, "--auth-type", "openai", "--openai-base-url", f"{endpoint.url}/v1", "--model", endpoint.model),
    )


def _opencode(endpoint: Endpoint) -> Start:
    limit = {"context": endpoint.context, "output": endpoint.max_output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Millrace",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.api_key or NO_KEY, "timeout": TIMEOUT_MS},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
    }
    name = f"millrace/{endpoint.model}"
    settings: dict[str, object] = {"model": name, "small_model": name, "provider": {"millrace": provider}}
    if endpoint.few_tools:
        settings["tools"] = {"*": False, **dict.fromkeys(OPENCODE_TOOLS, True)}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


AGENTS: Mapping[str, CodingAgent] = {
    "claude": CodingAgent("Claude Code", "claude", "@anthropic-ai/claude-code", _claude),
    "codex": CodingAgent("Codex CLI", "codex", "@openai/codex", _codex),
    "qwen": CodingAgent("Qwen Code", "qwen", "@qwen-code/qwen-code", _qwen),
    "opencode": CodingAgent("opencode", "opencode", "opencode-ai", _opencode),
}
