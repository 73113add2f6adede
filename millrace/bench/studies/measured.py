"""What measured studies share: what they are given, and where they ran."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.simulate.studies.findings import Findings

MINUTES = 10.0
"""Default time limit of studies that have one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`model`: some studies take several, separated by commas. `data`: a file that the study needs and that does not
    ship with Millrace. `minutes`: time limit; parts that would end later are left out, but never the first one."""

    model: str
    samples: int
    seed: int = 0
    data: Path | None = None
    minutes: float = MINUTES

    @property
    def models(self) -> list[str]:
        return [name for name in self.model.split(",") if name]


@dataclass(frozen=True, slots=True)
class MeasuredStudy:
    """`samples`: by default; what a sample is, the method says. `has_limit`: it takes `--minutes`."""

    title: str
    question: str
    method: str
    model: str
    samples: int
    run: Callable[[Asked], Findings]
    has_limit: bool = False


class TimeLimit:
    """Tells whether more work would end in time, judged by the slowest so far."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + 60 * minutes
        self._slowest = 0.0
        """Seconds per unit of work."""

    def fits(self, units: float = 1.0) -> bool:
        """The first work always does."""
        return not self._slowest or self._clock() + self._slowest * units <= self._end

    @contextmanager
    def work(self, units: float = 1.0) -> Iterator[None]:
        began = self._clock()
        yield
        self._slowest = max(self._slowest, (self._clock() - began) / units)

    def rounds(self, at_most: int) -> Iterator[int]:
        for number in range(at_most):
            if not self.fits():
                return
            with self.work():
                yield number


def rounds_said(done: int, asked: Asked) -> str:
    """For a conclusion."""
    limit = "" if done == asked.samples else f" of {asked.samples}; the others would not have ended in time"
    return f" {done} round{'s' if done > 1 else ''}{limit}."


def machine() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} core{'s' if cores > 1 else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "a CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")


def where(began_load: float) -> str:
    """Machine, date, and how busy it was. `began_load`: its load when the study began."""
    low, high = sorted((began_load, os.getloadavg()[0]))
    is_busy = high > 1.5 * (os.cpu_count() or 1)  # The study itself keeps all cores busy.
    rough = " (other work kept it busy: times are rough, and ratios may be too)" if is_busy else ""
    return f"{machine()}, {datetime.now(UTC):%Y-%m-%d}, load {low:.1f} to {high:.1f}{rough}"


def chat_ids(llm: LLM, text: str, *, answer: str = "") -> list[int]:
    """The prompt of a conversation with one message. `answer`: how the reply begins."""
    return llm.tokenizer.encode(
        llm.chat_template.render([{"role": "user", "content": text}]) + answer, add_special=False
    )


def ratio_of_medians(values: Sequence[float], base: Sequence[float]) -> float:
    """Of measurements in turns: the median of the ratios, so that a slow phase of the machine affects both."""
    return float(median(one / other for one, other in zip(values, base, strict=True)))


def need_data(asked: Asked, what: str) -> Path:
    if asked.data is None:
        raise ConfigError(f"This study needs {what}: give it with --data FILE.", param="data")
    return asked.data
