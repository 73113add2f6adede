"""Weights of four bits with activations of 8 bits, against the same weights with wider activations."""

from __future__ import annotations

import time
from typing import Any

from millrace.bench.micro.formats import perplexity, read_text, step_ms
from millrace.bench.studies.measured import Asked, MeasuredStudy, ratio_of_medians
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
    for _ in range(asked.samples):
        for name, settings in VARIANTS.items():
            with LLM(asked.model, progress=False, kv_dtype="full", max_running=16, **settings) as llm:
                steps[name].append([*(step_ms(llm, batch) for batch in BATCHES), prompt_ms(llm)])
                if name not in losses:
                    sizes[name] = llm.ready.memory_plan.get("weights", 0) / 2**20
                    losses[name] = perplexity(llm, text, WINDOW, WINDOWS)[0]
    rows, first = [], steps[next(iter(VARIANTS))]
    for name, rounds in steps.items():
        times = [sorted(column)[len(column) // 2] for column in zip(*rounds, strict=True)]
        against = ratio_of_medians([sum(one) for one in rounds], [sum(one) for one in first])
        rows.append((name, sizes[name], *times, against, losses[name]))
    base, wide = rows[0], rows[1]
    lines = [
        Line(f"batch {batch}", range(len(rows)), [row[2 + at] for row in rows]) for at, batch in enumerate(BATCHES)
    ]
    return Findings(
        (
            "products",
            "weights MiB",
            *(f"step of {batch}, ms" for batch in BATCHES),
            f"prompt of {PROMPT}, ms",
            "times",
            "perplexity",
        ),
        rows,
        [plot("Decode step, in the table's order", lines, "products", "ms")],
        f"INT8 activations change the perplexity from {wide[6]:.2f} to {base[6]:.2f}, and float32 activations take"
        f" {wide[5]:.2f} times as long (sum of the three times, median of the rounds' ratios)."
        + (
            " INT8 products stay the default of a CPU without AMX."
            if wide[5] > 1
            else " INT8 products did not pay here."
        ),
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
        "The same GGUF file in turns with each kind of product; `--samples` rounds, medians. Perplexity of the text of"
        " `millrace bench` (two windows of 512 tokens).",
        "smollm2-135m-instruct",
        3,
        w4a8,
    )
}
