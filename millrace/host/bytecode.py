"""Bytecode of what an engine imports, where the installation comes without.

Images are often built without bytecode and told not to write any: then every process compiles torch's Python sources
again, which on a host with an H200 is 2.8 of the 4.2 s that the import takes. An engine's process keeps it in
Millrace's cache instead.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from importlib import util
from pathlib import Path

from millrace.config import cache_dir
from millrace.host.cores import usable_cores

CORES_TO_COMPILE = 8
"""From so many cores on a first start has the sources compiled side by side, ahead of their import."""
LIMIT_S = 60.0
_HARDLY_IMPORTED = r"/(_dynamo|_inductor|_numpy|_vendor|onnx|testing)/"


def keep_bytecode(environment: dict[str, str], package: str = "torch") -> threading.Thread | None:
    """Let a process with this environment find and leave bytecode in our cache, if the package has none and would get
    none. Returns what waits until it has been compiled ahead, if that is done."""
    spec = util.find_spec(package)
    if spec is None or not spec.origin or "PYTHONPYCACHEPREFIX" in environment:
        return None
    origin = Path(spec.origin)
    is_written = not environment.get("PYTHONDONTWRITEBYTECODE") and os.access(origin.parent, os.W_OK)
    if is_written or os.path.exists(util.cache_from_source(spec.origin)):
        return None
    kept = cache_dir() / "bytecode"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(kept)
    is_first = not (kept / origin.parent.relative_to(origin.anchor)).exists()
    if not is_first or usable_cores() < CORES_TO_COMPILE:
        return None
    compiling = threading.Thread(target=_compile, args=(origin.parent, environment), name="bytecode", daemon=True)
    compiling.start()
    return compiling


def _compile(package: Path, environment: dict[str, str]) -> None:
    """A second or two. Whatever goes wrong, an import compiles what it does not find."""
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", _HARDLY_IMPORTED, str(package)]
    quiet = subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=LIMIT_S, check=False)
