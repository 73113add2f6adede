"""Formats of the KV cache beside each other: bytes, time of a decode step over a long context, and what they lose."""

from __future__ import annotations

import contextlib
import random
import time
from statistics import median

from millrace.bench.micro.formats import perplexity, read_text
from millrace.bench.studies.answers import found_needles
from millrace.bench.studies.measured import Asked, MeasuredStudy, ratio_of_medians
from millrace.config import KvDtype
from millrace.errors import EngineUnavailable
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

FORMATS: tuple[KvDtype, ...] = ("full", "packed", "float16", "fp8", "int8", "int4")
CONTEXT, ROWS, SHORT, LONG = 1024, 4, 4, 20
"""Of the timed steps: tokens before each row, rows, and tokens of both answers."""
KV_TOKENS = 8192
WINDOW, WINDOWS, NEEDLE_LENGTHS = 512, 4, (512,)
GIB = 1 << 30


def kv_formats(asked: Asked) -> Findings:
    """All formats are open at once and take turns, so that a slow phase of the machine affects all."""
    text = read_text(asked.data)
    refused: list[str] = []
    rows: list[tuple[object, ...]] = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, LLM] = {}
        for kv_dtype in FORMATS:
            try:
                llm = LLM(asked.model, progress=False, kv_dtype=kv_dtype, kv_tokens=KV_TOKENS, max_running=ROWS)
                opened[kv_dtype] = stack.enter_context(llm)
            except EngineUnavailable as error:
                if "memory.kv_dtype is" not in str(error):
                    raise
                refused.append(kv_dtype)
        times: dict[str, list[float]] = {name: [] for name in opened}
        for number in range(asked.samples):
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
    sizes, losses = [float(str(row[1])) for row in rows], [float(str(row[5])) for row in rows]
    asks = 3 * len(NEEDLE_LENGTHS) * asked.samples
    missing = f" Not on this machine: {', '.join(refused)}." if refused else ""
    return Findings(
        (
            "format",
            "bytes per token",
            "tokens per GiB",
            f"step of {ROWS} rows, ms",
            f"against {rows[0][0]}",
            "perplexity",
            f"needles of {asks}",
        ),
        rows,
        [plot("Perplexity against bytes per token", [Line("formats", sizes, losses, dots=True)], "bytes", "")],
        f"From {rows[0][0]} to {rows[-1][0]} a token takes {sizes[0] / sizes[-1]:.1f} times fewer bytes, and the"
        f" perplexity changes from {losses[0]:.2f} to {losses[-1]:.2f}.{missing}",
    )


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
        " tokens each; `--samples` rounds, medians. Perplexity of the text of `millrace bench` in windows of"
        f" {WINDOW:,} tokens. Needles: numbers found in texts of {' and '.join(map(str, NEEDLE_LENGTHS))} tokens, at"
        " three depths, `--samples` of each.",
        "smollm2-135m-instruct",
        2,
        kv_formats,
    )
}
