"""Profiles running processes with `py-spy`, which samples their stacks from outside."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLES_PER_S = 200
GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class HotFunctions:
    """Hottest functions of one process by share of samples: `own` time, and `all` time including callees."""

    own: tuple[tuple[str, float], ...]
    all: tuple[tuple[str, float], ...]
    samples: int
    problem: str = ""


def sample_processes(pids: Mapping[str, int], seconds: float) -> dict[str, HotFunctions]:
    """Sample all processes at once. If py-spy is missing or not permitted, `problem` says so."""
    program = shutil.which("py-spy")
    if program is None:
        return {name: HotFunctions((), (), 0, "py-spy is not installed") for name in pids}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name.replace(" ", "-") for name in pids}
        running = {name: _start(program, pid, seconds, files[name]) for name, pid in pids.items()}
        return {name: _result(process, files[name], seconds) for name, process in running.items()}


def _start(program: str, pid: int, seconds: float, file: Path) -> subprocess.Popen[str]:
    options = ["--format", "raw", "--nonblocking", "--rate", str(SAMPLES_PER_S), "--duration", str(int(seconds))]
    return subprocess.Popen(
        [program, "record", "--pid", str(pid), "--output", str(file), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _result(process: subprocess.Popen[str], file: Path, seconds: float) -> HotFunctions:
    try:
        _, problem = process.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return HotFunctions((), (), 0, "py-spy timed out")
    if not file.is_file():
        return HotFunctions((), (), 0, " ".join(problem.split())[-300:])
    return hottest(file.read_text(encoding="utf-8", errors="replace").splitlines())


def hottest(stacks: Sequence[str], most: int = 25) -> HotFunctions:
    """`stacks`: lines of semicolon-separated frames, outermost first, followed by a count."""
    own: Counter[str] = Counter()
    called: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if not count.isdecimal():
            continue
        frames = [_without_line(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in dict.fromkeys(frames):
            called[frame] += int(count)
    total = max(1, own.total())
    return HotFunctions(
        tuple((name, count / total) for name, count in own.most_common(most)),
        tuple((name, count / total) for name, count in called.most_common(most)),
        own.total(),
    )


def _without_line(frame: str) -> str:
    """`name (file.py:12)` becomes `name (file.py)`: count functions, not lines."""
    before, colon, after = frame.rpartition(":")
    return f"{before})" if colon and after.rstrip(")").isdecimal() else frame
