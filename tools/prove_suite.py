"""Runs the tests several times on a clean clone and prints a table: whether the suite is green without luck.

    python tools/prove_suite.py --runs 2
    python tools/prove_suite.py --runs 2 --busy                 every core is kept busy by something else
    python tools/prove_suite.py --runs 1 --less-memory 4GiB     so much memory is taken by something else

`make prove` is all three. The set-up, the lint and the model are done once, before the first run. Logs are kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUSY = "while True: pass"
HOLD = "import sys, time; held = b'\\1' * int(sys.argv[1]); print('held', flush=True); time.sleep(1e9)"
UNITS = {"MiB": 2**20, "GiB": 2**30}
PART = re.compile(r"^── (\w+): \d+ passed, .*, (\d+ min \d+ s)$", re.MULTILINE)
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
AGAIN = re.compile(r"^(\d+) passed on the second try:", re.MULTILINE)
NAMES = re.compile(r"^(?:FAILED|RERUN) (tests/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """One run, as its log and its exit status tell."""

    status: int
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    again: int = 0
    parts: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = field(default=())
    """Tests that failed, or passed on their second try."""

    @property
    def is_green(self) -> bool:
        return self.status == 0 and self.passed > 0 and self.failed == self.again == 0


def outcome_of(log: str, status: int, seconds: float) -> Outcome:
    counts, again = COUNTS.findall(log), AGAIN.findall(log)
    passed, failed, skipped = map(int, counts[-1]) if counts else (0, 0, 0)
    names = tuple(dict.fromkeys(NAMES.findall(log)))
    second = int(again[-1]) if again else 0
    return Outcome(status, seconds, passed, failed, skipped, second, tuple(PART.findall(log)), names)


@contextmanager
def beside(*programs: Sequence[str], says: bool = False) -> Iterator[None]:
    """These run for as long as the block; with `says`, it begins when each has printed a line."""
    started = [subprocess.Popen(program, stdout=subprocess.PIPE) for program in programs]
    try:
        for one in started:
            if says and one.stdout is not None and not one.stdout.readline():
                raise SystemExit("The memory could not be taken: the machine has too little. Name less.")
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def run(command: Sequence[str], folder: Path, log: Path, *, busy: bool = False, less_memory: int = 0) -> Outcome:
    spinning = [[sys.executable, "-c", BUSY]] * ((os.cpu_count() or 1) if busy else 0)
    holding = [[sys.executable, "-c", HOLD, str(less_memory)]] if less_memory else []
    with beside(*spinning), beside(*holding, says=True), log.open("wb") as out:
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
    return outcome_of(log.read_text(errors="replace"), done.returncode, time.monotonic() - began)


def table_of(outcomes: Sequence[Outcome]) -> str:
    rows = [("run", "result", "time", "passed", "failed", "second tries", "skipped", "parts")]
    for number, one in enumerate(outcomes, 1):
        parts = ", ".join(f"{name} {duration}" for name, duration in one.parts)
        shown = f"{int(one.seconds) // 60} min {int(one.seconds) % 60} s"
        counts = (str(one.passed), str(one.failed), str(one.again), str(one.skipped))
        rows.append((str(number), "green" if one.is_green else "red", shown, *counts, parts or "none ended"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"run {number}: {name}" for number, one in enumerate(outcomes, 1) for name in one.names]
    return "\n".join(lines)


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 4GiB or 512MiB")
    return int(found[1]) * UNITS[found[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests several times on a clean clone of HEAD.")
    parser.add_argument("--runs", type=int, default=1, help="how often (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="tests that run at a time (default: 2)")
    parser.add_argument("--busy", action="store_true", help="keep every core busy with something else")
    parser.add_argument("--less-memory", type=size, default=0, metavar="SIZE", help="take this much memory, as 4GiB")
    parser.add_argument("--logs", type=Path, help="where logs go (default: a folder of their own, which is named)")
    given = parser.parse_args()
    logs = given.logs or Path(tempfile.mkdtemp(prefix="prove-suite-"))
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        print(f"Set-up and lint of a clean clone. Logs: {logs}", flush=True)
        ready = run(["make", "lint", "fetch"], clone, logs / "setup.log")
        if ready.status:
            print(f"The set-up failed after {ready.seconds:.0f} s: read {logs / 'setup.log'}", file=sys.stderr)
            return 1
        for number in range(1, given.runs + 1):
            command = ["tools/run_tests", str(given.workers)]
            log = logs / f"run-{number}.log"
            outcomes.append(run(command, clone, log, busy=given.busy, less_memory=given.less_memory))
            print(table_of(outcomes), end="\n\n", flush=True)
    return 0 if all(one.is_green for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
