"""Keeps the bytecode of torch in our cache if the installation has none.

Container images often have no bytecode and set PYTHONDONTWRITEBYTECODE. Every process then compiles torch's sources
again: 2.8 of the 4.2 s that the import takes on a host with an H200.
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

MIN_CORES_TO_COMPILE = 8
"""With at least this many cores, the first start compiles the sources in parallel, before the import."""
LIMIT_S = 60.0
_SELDOM_IMPORTED = r"/(_dynamo|_inductor|_numpy|_vendor|onnx|testing)/"


def keep_bytecode(environment: dict[str, str], package: str = "torch") -> threading.Thread | None:
    """Point the environment of a child process at our bytecode cache if `package` has no bytecode and cannot write any.

    Returns the thread that compiles before the import, if one was started."""
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
    if not is_first or usable_cores() < MIN_CORES_TO_COMPILE:
        return None
    compiling = threading.Thread(target=_compile, args=(origin.parent, environment), name="bytecode", daemon=True)
    compiling.start()
    return compiling


def _compile(package: Path, environment: dict[str, str]) -> None:
    """Takes a second or two. Errors do not matter: the import compiles what is missing."""
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", _SELDOM_IMPORTED, str(package)]
    quiet = subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=LIMIT_S, check=False)
