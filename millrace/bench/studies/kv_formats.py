"""Formats of the KV cache beside each other: bytes, time of a decode step over a long context, and what they lose."""

from __future__ import annotations

import contextlib
import random
import time
from statistics import median
from typing import Any

from millrace.bench.micro.formats import perplexity, read_text
from millrace.bench.studies.answers import found_needles
from millrace.bench.studies.measured import Asked, MeasuredStudy, TimeLimit, ratio_of_medians, rounds_said
from millrace.config import KvDtype
from millrace.errors import EngineUnavailable
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

FORMATS: tuple[KvDtype, ...] = ("full", "packed", "float16", "fp8", "int8", "int4")
CONTEXT, ROWS, SHORT, LONG = 1024, 2, 4, 20
"""Of the timed steps: tokens before each row, rows, and tokens of both answers."""
KV_TOKENS = 4096
WINDOW, WINDOWS, NEEDLE_LENGTHS = 512, 2, (512,)
GIB = 1 << 30


def kv_formats(asked: Asked) -> Findings:
    """Models share the time."""
    rows: list[tuple[object, ...]] = []
    lines, said = list[Line](), list[str]()
    for model in asked.models:
        found, conclusion = _formats_of(model, asked)
        rows += [(model, *row) for row in found]
        lines.append(Line(model, [float(row[1]) for row in found], [float(row[5]) for row in found], dots=True))
        said.append(f"{model}: {conclusion}")
    asks = 3 * len(NEEDLE_LENGTHS) * asked.samples
    return Findings(
        ("model", "format", "bytes per token", "tokens per GiB", f"step of {ROWS} rows, ms", "against the first",
         "perplexity", f"needles of {asks}"),
        rows,
        [plot("Perplexity against bytes per token", lines, "bytes", "")],
        " ".join(said),
    )  # fmt: skip


def _formats_of(model: str, asked: Asked) -> tuple[list[tuple[Any, ...]], str]:
    """Rows, and what they show. All formats are open at once and take turns, so that a slow phase of the machine
    affects all."""
    text, limit = read_text(asked.data), TimeLimit(asked.minutes / len(asked.models))
    rows: list[tuple[Any, ...]] = []
    with contextlib.ExitStack() as stack:
        opened, refused = _opened(model, stack)
        times: dict[str, list[float]] = {name: [] for name in opened}
        for number in limit.rounds(asked.samples):
            for name, llm in opened.items():
                times[name].append(long_step_ms(llm, number))
        first = next(iter(times.values()))
        for name, llm in opened.items():
            pool = next(size for part, size in llm.ready.memory_plan.items() if part.startswith("KV pool"))
            token_bytes, draw, found = pool / KV_TOKENS, random.Random(asked.seed), 0
            for length in NEEDLE_LENGTHS:
                found += sum(found_needles(llm, draw, length, asked.samples)[1])
            value, _ = perplexity(llm, text, WINDOW, WINDOWS)
            against = ratio_of_medians(times[name], first)
            rows.append((name, token_bytes, GIB / token_bytes, median(times[name]), against, value, found))
    missing = f" Not on this machine or for this model: {', '.join(refused)}." if refused else ""
    fewer = rows[0][1] / rows[-1][1]
    return rows, (
        f"from {rows[0][0]} to {rows[-1][0]} a token takes {fewer:.1f} times fewer bytes, and the perplexity changes"
        f" from {rows[0][5]:.2f} to {rows[-1][5]:.2f}.{missing}{rounds_said(len(first), asked)}"
    )


def _opened(model: str, stack: contextlib.ExitStack) -> tuple[dict[str, LLM], list[str]]:
    """By format, and the formats that are refused."""
    opened: dict[str, LLM] = {}
    refused: list[str] = []
    for kv_dtype in FORMATS:
        try:
            llm = LLM(model, progress=False, kv_dtype=kv_dtype, kv_tokens=KV_TOKENS, max_running=ROWS)
            opened[kv_dtype] = stack.enter_context(llm)
        except EngineUnavailable as error:
            if "memory.kv_dtype is" not in str(error):
                raise
            refused.append(kv_dtype)
    return opened, refused


def long_step_ms(llm: LLM, number: int) -> float:
    """Milliseconds of a decode step behind a long context, which is computed before."""
    draw = random.Random(number)
    prompts = [[draw.randrange(50, llm.ready.vocab_size) for _ in range(CONTEXT)] for _ in range(ROWS)]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(prompts, temperature=0.0, max_tokens=tokens, ignore_eos=True, progress=False)
        return time.perf_counter() - began

    seconds(SHORT)
    return 1e3 * (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT)


STUDIES = {
    "kv-quality": MeasuredStudy(
        "KV formats: bytes, speed and loss",
        "What does each format of the KV cache save, and what does it lose?",
        f"The same model with each format that the machine has, in turns. Steps decode {ROWS} rows behind {CONTEXT:,}"
        " tokens each; `--samples` rounds, or as many as `--minutes` allow, medians. Perplexity of the text of"
        f" `millrace bench` in {WINDOWS} windows of {WINDOW:,} tokens. Needles: numbers found in texts of"
        f" {' and '.join(map(str, NEEDLE_LENGTHS))} tokens, at three depths, `--samples` of each.",
        "smollm2-135m-instruct",
        2,
        kv_formats,
        has_limit=True,
    )
}
