"""Compiling kernels for a GPU on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys


def variables() -> dict[str, str]:
    """Environment of a process in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


def command(script: str, *arguments: object) -> list[str]:
    """Runs a script; forked from a process that has imported torch (helpers/starter.py)."""
    return [sys.executable, "-m", "helpers.gpu_compiler", script, *map(str, arguments)]


def output_of(script: str, *arguments: object) -> str:
    """Output of a script that compiles kernels, followed by the end of its standard error."""
    done = subprocess.run(
        command(script, *arguments), env=variables(), capture_output=True, text=True, timeout=240, check=False
    )
    return done.stdout + done.stderr[-3000:]


if __name__ == "__main__":
    del sys.argv[0]
    exec(sys.argv[0], {"__name__": "__main__"})
