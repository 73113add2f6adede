"""Parses peers given on the command line as `NAME=URL[,pid=N]`, and finds which kind of engine a name means."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from millrace.errors import ConfigError

MILLRACE, LLAMA, VLLM, OPENVINO = "millrace", "llama.cpp", "vllm", "openvino"
KINDS = (MILLRACE, LLAMA, VLLM, OPENVINO)
"""The engines that bars refer to, by the name used in tables."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_FORM = "NAME=URL or NAME=URL,pid=N, such as vllm=http://127.0.0.1:8001,pid=4242"


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A server that is already running."""

    name: str
    url: str
    pid: int = 0
    """Its process id, to measure memory and idle CPU use; 0 = unknown."""


def parse_peer(text: str) -> PeerSpec:
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"--peer is '{text}'; expected {_FORM}.")
    url, *options = rest.split(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--peer {name} has the URL '{url}'; expected {_FORM}.")
    pid = 0
    for option in options:
        key, _, value = option.partition("=")
        if key != "pid" or not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--peer {name} has '{option}' after its URL; expected {_FORM}.")
        pid = int(value)
    return PeerSpec(name, url.rstrip("/"), pid)


def parse_peer_args(text: str) -> tuple[str, list[str]]:
    """Parse `NAME=ARGUMENTS`: arguments to add to the command that starts a peer."""
    name, equals, rest = text.partition("=")
    if not equals or name not in KINDS[1:]:
        known = ", ".join(KINDS[1:])
        raise ConfigError(f"--peer-args is '{text}'; expected NAME=ARGUMENTS, where NAME is one of {known}.")
    try:
        return name, shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"--peer-args of {name} cannot be parsed: {error}.") from error


def kind_of(name: str) -> str:
    """The kind of engine a name means: `vllm`, `vllm-eager` and `my-vLLM` are all vLLM; '' if unknown."""
    lowered = name.lower()
    for kind, sign in ((VLLM, "vllm"), (OPENVINO, "openvino"), (LLAMA, "llama"), (MILLRACE, "millrace")):
        if sign in lowered:
            return kind
    return ""
