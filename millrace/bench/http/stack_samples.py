"""Where a running process spends its time, from stacks that `py-spy` samples without disturbing it."""

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
class Hot:
    """Shares of the samples of one process in which a function was at work itself, and in which it was called."""

    own: tuple[tuple[str, float], ...]
    all: tuple[tuple[str, float], ...]
    samples: int
    problem: str = ""


def sample_processes(pids: Mapping[str, int], seconds: float) -> dict[str, Hot]:
    """Sample all of them at once for so long. Without py-spy, or where it may not look, the answer says so."""
    program = shutil.which("py-spy")
    if program is None:
        return {name: Hot((), (), 0, "py-spy is not installed") for name in pids}
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


def _result(process: subprocess.Popen[str], file: Path, seconds: float) -> Hot:
    try:
        _, problem = process.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Hot((), (), 0, "py-spy did not end")
    if not file.is_file():
        return Hot((), (), 0, " ".join(problem.split())[-300:])
    return hottest(file.read_text(encoding="utf-8", errors="replace").splitlines())


def hottest(stacks: Sequence[str], most: int = 25) -> Hot:
    """`stacks` are lines of frames, outermost first, separated by semicolons, and a count."""
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
    return Hot(
        tuple((name, count / total) for name, count in own.most_common(most)),
        tuple((name, count / total) for name, count in called.most_common(most)),
        own.total(),
    )


def _without_line(frame: str) -> str:
    """`name (file.py:12)` as `name (file.py)`: functions, not lines, are counted."""
    before, colon, after = frame.rpartition(":")
    return f"{before})" if colon and after.rstrip(")").isdecimal() else frame
