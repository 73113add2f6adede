"""Compiling kernels for a GPU on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys


def said_by(script: str, *arguments: object) -> str:
    """What a script says that compiles kernels, in an interpreter where Triton is not Triton's own interpreter; behind
    it what went wrong, if something did."""
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
