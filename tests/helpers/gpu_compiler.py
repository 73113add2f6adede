"""Compiling kernels for a GPU on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys


def output_of(script: str, *arguments: object) -> str:
    """Output of a script that compiles kernels, run in a process in which Triton compiles instead of interpreting,
    followed by the end of its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout + done.stderr[-3000:]
