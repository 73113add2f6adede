"""Environment variables, and the directories that follow from them. No other module reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.errors import ConfigError

ENVIRONMENT_PREFIX = "MILLRACE_"
CONFIG_VARIABLE = "MILLRACE_CONFIG"
API_KEY_VARIABLE = "MILLRACE_API_KEY"
CAPABILITY_VARIABLE = "MILLRACE_CUDA_CAPABILITY"
_OTHER_VARIABLES = (CONFIG_VARIABLE, API_KEY_VARIABLE, CAPABILITY_VARIABLE, "MILLRACE_OPENAI_OPENAPI")
"""Variables that are no settings: the settings file, the key of our client commands, a limit on what is used of a GPU,
and those of the test suite."""


def settings_file() -> Path | None:
    """The TOML file that MILLRACE_CONFIG names."""
    name = os.environ.get(CONFIG_VARIABLE)
    return Path(name) if name else None


def setting_variables() -> list[tuple[str, str]]:
    """Names and texts of the `MILLRACE_*` variables that should be settings, by name."""
    return [
        (name, text)
        for name, text in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _OTHER_VARIABLES
    ]


def client_api_key() -> str:
    """The API key that `chat`, `ps` and other client commands send unless one is given."""
    return os.environ.get(API_KEY_VARIABLE, "")


def cuda_capability_limit() -> tuple[int, int] | None:
    """The compute capability that `MILLRACE_CUDA_CAPABILITY` names (`8.0`), None if it is not set. Kernels for later
    GPUs are not used, so that a newer GPU can test what an older one would run."""
    text = os.environ.get(CAPABILITY_VARIABLE, "")
    if not text:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"{CAPABILITY_VARIABLE} is {text!r}; it must be a compute capability, such as 8.0.")
    return int(major), int(minor)


def cache_dir() -> Path:
    """Directory of downloaded models: `millrace` in the user's cache directory (XDG_CACHE_HOME if it is absolute)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "millrace"


def settings_dir() -> Path:
    """Directory of the user's own settings, such as aliases (XDG_CONFIG_HOME if it is absolute)."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "millrace"


def data_dir() -> Path:
    """Directory of clients' stored data: `millrace` in the user's data directory (XDG_DATA_HOME if it is absolute)."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "millrace"


def allows_colour() -> bool:
    """False if `NO_COLOR` is set (https://no-color.org) or the terminal is dumb."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process that is configured through it."""
    return {**os.environ, **changes}


def adopt_environment(pid: int) -> None:
    """Use the `MILLRACE_*` variables of another process instead of our own, to see the settings as it would."""
    items = (item.partition("=") for item in Path(f"/proc/{pid}/environ").read_text("utf-8", "replace").split("\0"))
    theirs = {name: value for name, _, value in items if name.startswith(ENVIRONMENT_PREFIX)}
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        del os.environ[name]
    os.environ.update(theirs)
