"""What measured studies share: what they are given, and where they ran."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.simulate.studies.findings import Findings


@dataclass(frozen=True, slots=True)
class Asked:
    """`data`: a file that the study needs and that does not ship with Millrace."""

    model: str
    samples: int
    seed: int = 0
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class MeasuredStudy:
    """`samples`: by default; what a sample is, the method says."""

    title: str
    question: str
    method: str
    model: str
    samples: int
    run: Callable[[Asked], Findings]


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
