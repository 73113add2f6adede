"""Weights of four bits with activations of 8 bits, against the same weights with wider activations."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from millrace.bench.micro.formats import perplexity, read_text, step_ms
from millrace.bench.studies.measured import Asked, MeasuredStudy, TimeLimit, ratio_of_medians, rounds_said
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.simulate.studies.findings import Findings

BATCHES, PROMPT, WINDOW, WINDOWS = (1, 16), 512, 512, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "4-bit weights, INT8 activations": {"quantization": "int8", "dtype": "float32"},
    "4-bit weights, float32 activations": {"quantization": "none", "dtype": "float32"},
    "weights and activations in bfloat16": {"quantization": "none", "dtype": "bfloat16"},
}
"""All with a KV cache in the full type, so that only the products differ."""


def w4a8(asked: Asked) -> Findings:
    text = read_text(asked.data)
    steps: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    sizes, losses = dict[str, float](), dict[str, float]()
    for _ in TimeLimit(asked.minutes).rounds(asked.samples):
        for name, settings in VARIANTS.items():
            with LLM(asked.model, progress=False, kv_dtype="full", max_running=16, **settings) as llm:
                steps[name].append([*(step_ms(llm, batch) for batch in BATCHES), prompt_ms(llm)])
                if name not in losses:
                    sizes[name] = llm.ready.memory_plan.get("weights", 0) / 2**20
                    losses[name] = perplexity(llm, text, WINDOW, WINDOWS)[0]
    rows, first = [], [list(column) for column in zip(*steps[next(iter(VARIANTS))], strict=True)]
    for name, rounds in steps.items():
        columns = list(zip(*rounds, strict=True))
        ratios = [ratio_of_medians(column, base) for column, base in zip(columns, first, strict=True)]
        rows.append((name, sizes[name], *map(median, columns), *ratios, losses[name]))
    lines = [
        Line(f"batch {batch}", range(len(rows)), [row[2 + at] for row in rows]) for at, batch in enumerate(BATCHES)
    ]
    cases = (*(f"step of {batch}" for batch in BATCHES), f"prompt of {PROMPT}")
    return Findings(
        ("products", "weights MiB", *(f"{case}, ms" for case in cases), *(f"{case}, times" for case in cases),
         "perplexity"),
        rows,
        [plot("Decode step, in the table's order", lines, "products", "ms")],
        _conclusion(rows[0], rows[1]) + rounds_said(len(next(iter(steps.values()))), asked),
    )  # fmt: skip


def _conclusion(int8: tuple[Any, ...], wide: tuple[Any, ...]) -> str:
    one, many, prompt = wide[5:8]
    return (
        f"INT8 activations change the perplexity from {wide[-1]:.2f} to {int8[-1]:.2f}. With float32 activations a step"
        f" of {BATCHES[0]} takes {one:.2f} times as long, one of {BATCHES[1]} {many:.2f} times, and a prompt"
        f" {prompt:.2f} times (medians of the rounds' ratios)."
        + (
            " INT8 products stay the default of a CPU without AMX."
            if min(one, many, prompt) > 1
            else " INT8 products did not pay everywhere here."
        )
    )


def prompt_ms(llm: LLM, rounds: int = 3) -> float:
    """Of one prompt, the first of which warms up."""
    times = []
    for number in range(rounds):
        prompt = [(97 * number + 13 * at) % (llm.ready.vocab_size - 100) + 50 for at in range(PROMPT)]
        began = time.perf_counter()
        llm.generate([prompt], temperature=0.0, max_tokens=1, progress=False)
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[1:])


STUDIES = {
    "w4a8": MeasuredStudy(
        "Weights of 4 bits with activations of 8 bits",
        "What do INT8 activations give, and what do they cost?",
        "The same GGUF file in turns with each kind of product; `--samples` rounds, or as many as `--minutes`"
        " allow, medians. Perplexity of the text of `millrace bench` (two windows of 512 tokens).",
        "smollm2-135m-instruct",
        3,
        w4a8,
        has_limit=True,
    )
}
