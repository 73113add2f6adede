"""Main module of the process that reads adapters: `python -m millrace.engine.adapters.reader_child`.

The first line on standard input has the settings, each further one a directory. The reply is a JSON object behind its
length, which says what was read or why it was not, and then the matrices. It exits when its input has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.errors import AdapterError
from millrace.models.adapters.files import Limits, read_files
from millrace.models.adapters.targets import AdapterTargets, TargetLinear

NICE = 10
LENGTH_BYTES = 8
"""Of the length, little-endian."""


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM):  # For the engine, which ends this process.
        signal.signal(one, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # It never takes a core from a step when it wakes.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    settings = json.loads(sys.stdin.buffer.readline())
    targets = AdapterTargets(tuple(None if one is None else _linear(one) for one in settings["linears"]))
    limits = Limits(settings["max_rank"], settings["max_bytes"], settings["keeps_bfloat16"])
    with contextlib.suppress(BrokenPipeError):  # The engine has ended.
        while line := sys.stdin.buffer.readline():
            _reply(Path(json.loads(line)["folder"]), targets, settings["dtype"], limits)


def _linear(one: dict[str, Any]) -> TargetLinear:
    return TargetLinear(tuple(one["modules"]), one["in_features"], tuple(one["out_sizes"]))


def _reply(folder: Path, targets: AdapterTargets, dtype: str, limits: Limits) -> None:
    try:
        packed, numbers = read_files(folder, targets, dtype, limits)
    except AdapterError as error:
        _write({"error": error.message})
    except Exception as error:
        _write({"error": f"{folder} could not be read: {error or type(error).__name__}"})
    else:
        _write(asdict(packed))
        sys.stdout.buffer.write(numbers.data.cast("B"))
        sys.stdout.buffer.flush()


def _write(message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    sys.stdout.buffer.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
