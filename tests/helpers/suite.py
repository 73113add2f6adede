"""What every test run does: fixed seeds, first failures of second tries, a guard around the parallel part."""

from __future__ import annotations

import os
import random
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("FUZZ_SEED", "0"))
FUZZ = "FUZZ_SIZE" in os.environ
TAIL_LINES = 40
"""Lines of a failed test's log that the closing summary repeats."""
PROGRAMS_OF_THE_PARALLEL_PART = frozenset(
    {"c++", "g++", "clang++", "gcc", "cc", "clang", "ldconfig", "ld", "uname", "lscpu"}
)
"""Compilers and questions to the system: they end by themselves and wait for nobody."""


def examples(count: int) -> int:
    """Generated cases of a property: `count` in `make test`, many more in `make fuzz`, which explores."""
    return 10 * count if FUZZ else count


def seed_generators(seed: int) -> None:
    """The same numbers for each test, whichever tests ran before it in this process."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def send_at_once(config: pytest.Config) -> None:
    """A worker tells the plugin for second tries about each test in two small packets. The second would wait for the
    first one's acknowledgement: 40 ms for each of 9,000 tests."""
    counts = getattr(config, "failures_db", None)  # pytest-rerunfailures' own; only that of a worker has a connection
    if hasattr(counts, "sock"):
        counts.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Outcomes:
    """Counts the outcomes, prints first failures of tests that passed on their second try, and writes a summary.

    `path` receives the counts and the end of each failed test's log, for whoever joins several parts of a run.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.first_tries: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # pytest-rerunfailures' own outcome
            self.first_tries[report.nodeid] = text_of(report)
        elif report.failed:
            self.failures[report.nodeid] = text_of(report)
        elif report.skipped and report.nodeid not in self.failures:
            self.counts["skipped"] += 1
        elif report.passed and report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = text_of(report)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        second_tries = {name: text for name, text in self.first_tries.items() if name not in self.failures}
        if second_tries:
            terminalreporter.section(f"{len(second_tries)} passed on the second try: each has a defect to find")
            for name, text in second_tries.items():
                terminalreporter.line(f"RERUN {name}")
                terminalreporter.line(last_lines(text))
        if self.path is not None:
            self.path.write_text(self.summary(second_tries))

    def summary(self, second_tries: dict[str, str]) -> str:
        """First line: passed, failed, skipped and second tries as numbers. Then the failures."""
        counts = (self.counts["passed"], len(self.failures), self.counts["skipped"], len(second_tries))
        lines = [" ".join(map(str, counts))]
        for word, tests in (("RERUN", second_tries), ("FAILED", self.failures)):
            for name, text in tests.items():
                lines += [f"{word} {name}", last_lines(text), ""]
        return "\n".join(lines) + "\n"


def text_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    return "\n".join((report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)))


def last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join("    " + line for line in lines[-TAIL_LINES:])


def can_have(source: str, marks: str) -> bool:
    """Whether a test file may have tests that `marks`, an expression of pytest's `-m`, selects. Importing a file takes
    longer than reading it."""
    words = [word for word in marks.split(" and ") if word in ("live", "alone", "real_models")]
    if not all(f"mark.{word}" in source for word in words):
        return False
    return "not live" not in marks.split(" and ") or not _ALL_LIVE.search(source)


_ALL_LIVE = re.compile(r"^pytestmark = .*mark\.live", re.MULTILINE)


class LiveGuard:
    """Fails a test that starts a program or listens on a socket without the marker `live`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.lock = threading.Lock()
        sys.addaudithook(self.on_event)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            program = os.path.basename(os.fsdecode(arguments[0]))
            if program.split("-")[0] not in PROGRAMS_OF_THE_PARALLEL_PART:
                self.note(f"started {program}")
        elif event == "socket.bind":
            self.note(f"bound a socket to {arguments[1]!r}")

    def note(self, what: str) -> None:
        with self.lock:
            self.seen.append(what)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.seen.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        # Tests on a GPU start Triton's compiler; `make test-gpu` runs them apart.
        if self.seen and item.get_closest_marker("live") is None and item.get_closest_marker("gpu") is None:
            pytest.fail(f"This test {self.seen[0]}. Mark it: pytestmark = pytest.mark.live", pytrace=False)
        return result
