"""Examples of the documentation and of `--help`: found, told apart into those that can run here, and run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.example_files import write_files
from helpers.pages import PAGES, ROOT, blocks, name_of

from millrace.cli import COMMANDS, HELP, command_parser, module_of
from millrace.config import cache_dir
from millrace.terminal.foreign_names import COMMANDS as SYNONYMS

DOCUMENTED = "127.0.0.1:8000"
"""Address of the server in every example."""

ASKS_A_SERVER = (
    "cache warm",
    "cache ls",
    "cache show",
    "cache rm",
    "top",
    "trace",
    "explain",
    "profile",
    "cost",
    "slo",
    "load",
    "launch",
)
"""Commands that ask the server at the documented address unless `--url` names another."""

ANSWER_ID = "chatcmpl-123"
"""Stands for the id of an answer; `my-request` is the X-Request-Id of the same request."""

ASKED = (
    f"curl http://{DOCUMENTED}/v1/chat/completions -H 'Content-Type: application/json' -H 'X-Request-Id: my-request'"
    """ -d '{"model": "smollm2", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}'"""
)
"""The request that examples trace and explain, sent before each of them: an engine that is unloaded forgets it."""

ASK = """
import json, os, socket, sys
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect(sys.argv[1])
socket.send_fds(asking, [json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
code = int(asking.recv(16))
os._exit(code if code >= 0 else 128 - code)
"""
"""The program `millrace` of the workshop: asks the tests to start it here, with these streams, and ends as it ends."""


@dataclass(frozen=True)
class Example:
    name: str
    commands: tuple[str, ...]


def shell_examples() -> Iterator[Example]:
    for page in PAGES:
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8"), "bash"), 1):
            yield Example(f"{name_of(page)}:{number}", tuple(commands_in(block)))


def help_examples() -> Iterator[Example]:
    yield Example("millrace --help", tuple(_in_help(HELP)))
    for name in COMMANDS:
        text = importlib.import_module(module_of(name)).EXAMPLES
        yield Example(f"millrace {name} --help", tuple(_in_help(text)))


def python_examples() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if name_of(page) == "docs/python-api.md":
            continue  # Signatures, not examples.
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8"), "python"), 1):
            yield f"{name_of(page)}:python:{number}", block


def commands_in(block: str) -> Iterator[str]:
    """The commands of a block of shell code, each with the lines that it continues on."""
    command = ""
    for line in block.splitlines():
        command = f"{command}\n{line}" if command else line
        if line.endswith("\\") or _is_open(command):
            continue
        if shlex.split(command, comments=True):
            yield command
        command = ""
    assert not command, f"unfinished: {command}"


def _is_open(command: str) -> bool:
    if len(re.findall(r"\bdo$", command, re.MULTILINE)) > len(re.findall(r"\bdone\b", command)):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def _in_help(text: str) -> Iterator[str]:
    """Lines of `--help` that begin with a program; two spaces end a command."""
    for line in text.splitlines():
        if re.match(r"  (?:millrace|cat|echo|source) ", line):
            yield re.split(r"\s{2,}", line.strip())[0]


def calls_of_millrace(command: str) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of each `millrace` in a line of shell code, without redirections."""
    plain = re.sub(r"<\(|\)$|[\d&]?>>? ?[\w./~-]+", " ", command)
    call: list[str] | None = None
    for word in [*shlex.split(plain, comments=True), ";"]:
        if word in ("|", "&", "&&", ";"):
            if call:
                yield SYNONYMS.get(call[0], call[0]), call[1:]
            call = None
        elif call is not None:
            call.append(word.removesuffix(";"))
        elif word == "millrace":
            call = []


def check_arguments(command: str) -> None:
    """Raises unless the parsers of the commands take their arguments."""
    for name, arguments in calls_of_millrace(command):
        assert name in COMMANDS, command
        command_parser(importlib.import_module(module_of(name)), name).parse(arguments)


class Workshop:
    """A directory in which commands run: `millrace` and `curl` on the path, nothing of the user's own written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.answer_id = ""
        self.ran: set[str] = set()
        """Names of the `millrace` commands that ended well."""
        (folder / "bin").mkdir()
        starts = folder / "starts"
        self._starts = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._starts.bind(str(starts))
        self._starts.listen(16)
        threading.Thread(target=self._start_all, name="starts", daemon=True).start()
        self._program("millrace", f'exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(ASK)} {starts} "$@"')
        self._program("curl", 'exec curl --fail-with-body --silent --show-error "$@"')
        write_files(folder)
        cache = folder / "cache" / "millrace"
        cache.mkdir(parents=True)
        for entry in cache_dir().iterdir():
            if entry.name != "run":  # Lists the servers of this user, which are none of the examples' business.
                (cache / entry.name).symlink_to(entry)
        self.environment = {
            **os.environ,
            **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_WAIT_POLICY": "PASSIVE",
            "NO_COLOR": "1",
        }
        self.environment["HOME"] = str(folder)
        (folder / ".config" / "fish" / "completions").mkdir(parents=True)

    def _start_all(self) -> None:
        """Start each `millrace` that a command calls; as a program of this process it starts quickly."""
        while True:
            connection, _ = self._starts.accept()
            threading.Thread(target=self._start, args=(connection,), daemon=True).start()

    def _start(self, connection: socket.socket) -> None:
        with connection:
            data, (stdin, stdout, stderr), _, _ = socket.recv_fds(connection, 1 << 20, 3)
            arguments, folder, variables = json.loads(data)
            command = [sys.executable, "-m", "millrace", *arguments]
            try:
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=variables
                )
            finally:
                for descriptor in (stdin, stdout, stderr):
                    os.close(descriptor)
            connection.send(str(process.wait()).encode())

    def _program(self, name: str, line: str) -> None:
        path = self.folder / "bin" / name
        # `curl` finds the real one behind this folder.
        text = f'#!/bin/sh\nPATH="${{PATH#{self.folder / "bin"}:}}"\n{line}\n'
        path.write_text(text)
        path.chmod(0o755)

    def adapted(self, command: str) -> str:
        """The command with the address of the server that runs here."""
        command = command.replace(DOCUMENTED, f"127.0.0.1:{self.port}").replace(ANSWER_ID, self.answer_id)
        if "--url" not in command:
            asking = rf"\bmillrace ({'|'.join(ASKS_A_SERVER)})\b"
            command = re.sub(asking, rf"millrace \1 --url http://127.0.0.1:{self.port}", command)
        return re.sub(r"^make ", f"make -n -C {ROOT} ", command)

    def run(self, command: str) -> str:
        if command != ASKED and (ANSWER_ID in command or "my-request" in command):
            self.answer_id = json.loads(self.run(ASKED))["id"]
        script = f"set -euo pipefail\n{self.adapted(command)}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        self.ran.update(name for name, _ in calls_of_millrace(command))
        return done.stdout
