"""Where the time of a cold start goes: processes that say when each stage was over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from millrace.bench.errors import BenchError
from millrace.bench.studies.measured import Asked, MeasuredStudy
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings
from millrace.sources.resolve import resolve_model

STAGES = (
    "interpreter",
    "import of torch",
    "import of Millrace",
    "engine's imports, files, plan",
    "weights",
    "KV pool and engine",
    "first token",
    "second first token",
)
LIMIT_S = 300.0
SCRIPT = """
import json, sys, time
at = [time.time()]
import torch
at.append(time.time())
from millrace.llm import LLM
at.append(time.time())
seen = []
llm = LLM(sys.argv[1], on_loading=lambda stage: seen.append((stage.what, time.time())))
ready = time.time()
weights = [when for what, when in seen if what == "weights"] or [ready]
at += [weights[0], weights[-1], ready]
for prompt in ("A cold start", "Another prompt"):
    llm.generate(prompt, temperature=0.0, max_tokens=1, progress=False)
    at.append(time.time())
llm.close()
print(json.dumps(at))
"""


def cold_start(asked: Asked) -> Findings:
    found: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    weights = resolve_model(asked.model).weights
    for _ in range(asked.samples):
        forget(weights)
        for runs in found.values():
            runs.append(stages(asked.model))
    medians = {kind: [median(column) for column in zip(*runs, strict=True)] for kind, runs in found.items()}
    totals = {kind: [sum(run[:-1]) for run in runs] for kind, runs in found.items()}
    rows: list[tuple[object, ...]] = [
        (stage, medians["cold"][at], medians["warm"][at]) for at, stage in enumerate(STAGES)
    ]
    rows.append(("until the first token", median(totals["cold"]), median(totals["warm"])))
    warm = medians["warm"][:-1]
    largest = max(range(len(warm)), key=warm.__getitem__)
    lines = [Line(kind, range(len(STAGES)), values) for kind, values in medians.items()]
    share, read_s = 100 * sum(warm[:4]) / sum(warm), medians["cold"][4]
    return Findings(
        ("stage", "weights not in memory, s", "weights in the file cache, s"),
        rows,
        [plot("Seconds by stage, in the table's order", lines, "stage", "s")],
        f"The first token of a new process comes after {median(totals['warm']):.1f} s, of which interpreter, imports"
        f" and plan take {share:.0f}% and the weights {warm[4]:.2f} s ({read_s:.2f} s"
        f" if they were not in memory). The longest stage is {STAGES[largest]!r} with {warm[largest]:.1f} s. Python and"
        f" its first imports take {sum(warm[:3]):.1f} s before a model is known; a spare process has"
        " that behind it (`--spare-engine`).",
    )


def forget(files: Sequence[Path]) -> None:
    """Ask the kernel to drop the files' clean pages, where no other process maps them."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def stages(model: str) -> list[float]:
    """Seconds of each stage of one new process."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise BenchError(f"A process that loads {model} failed: {done.stderr.strip().splitlines()[-1:]}")
    times = [began, *json.loads(done.stdout.splitlines()[-1])]
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


STUDIES = {
    "cold-start": MeasuredStudy(
        "A cold start, broken down",
        "Where does the time go until a new process gives its first token?",
        "`--samples` new processes with the weights dropped from the file cache, each followed by one that finds them"
        " there; medians. Compiled native code is kept from earlier starts.",
        "smollm2-135m-instruct",
        5,
        cold_start,
    )
}
