"""Mechanisms switched off one at a time, and what determinism costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from millrace.bench.micro.formats import read_text, step_ms
from millrace.bench.studies.formats import prompt_ms
from millrace.bench.studies.measured import Asked, MeasuredStudy, TimeLimit, ratio_of_medians, rounds_said
from millrace.config import Config, MemoryConfig, ModelConfig, RunConfig
from millrace.llm import LLM
from millrace.load.svg import Line, plot
from millrace.run.facts import RunnerFacts
from millrace.run.shapes.padded import PaddedShapes
from millrace.simulate.real_engine import RealEngine
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.studies.findings import Findings

ROWS, KV_TOKENS, NOT_MEASURED = (1, 8, 32), 32768, "not measured yet"
OUTPUT, SUFFIX, PREFIX = 32, 48, 1536
"""Tokens that each row decodes; of the prompt that follows a cached prefix, and of that prefix."""


def _no_overlap(facts: RunnerFacts) -> RunnerFacts:
    return replace(facts, steps_in_flight=1)


def _always_overlap(facts: RunnerFacts) -> RunnerFacts:
    return replace(facts, slow_step_s=float("inf"))


def _no_split(facts: RunnerFacts) -> RunnerFacts:
    shapes = facts.shapes
    return replace(facts, shapes=shapes.without_split() if isinstance(shapes, PaddedShapes) else shapes)


CHANGES: dict[str, tuple[str, bool, Callable[[RunnerFacts], RunnerFacts]]] = {
    "as shipped": ("both", True, lambda facts: facts),
    "no overlap of steps": ("both", True, _no_overlap),
    "overlap of slow steps too": ("cpu", True, _always_overlap),
    "no CUDA graphs": ("gpu", False, lambda facts: facts),
    "no split of long contexts (FlashDecoding)": ("gpu", True, _no_split),
}
"""By name: devices that have it, graphs or not, and the change of what the runner declares."""


def mechanisms(asked: Asked) -> Findings:
    device = "gpu" if torch.cuda.is_available() else "cpu"
    names = [name for name, (kind, _, _) in CHANGES.items() if kind in ("both", device)]
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in TimeLimit(asked.minutes).rounds(asked.samples):
        for name in names if number % 2 == 0 else names[::-1]:
            _, graphs, change = CHANGES[name]
            engine = RealEngine(_config(asked.model, graphs=graphs), change)
            try:
                times[name].append(_times(engine))
            finally:
                engine.close()
    rows: list[tuple[object, ...]] = []
    for name in names:
        base = list(zip(*times["as shipped"], strict=True))
        columns = list(zip(*times[name], strict=True))
        ratios = [ratio_of_medians(column, first) for column, first in zip(columns, base, strict=True)]
        rows.append((name, *(median(column) for column in columns), *ratios[1:3]))
    rows += [(name, *[NOT_MEASURED] * 6) for name in CHANGES if name not in names]
    measured = {str(row[0]): row for row in rows}
    lines = [Line(name, ROWS, [float(str(value)) for value in measured[name][1:4]]) for name in names]
    off = measured["no overlap of steps"]
    return Findings(
        ("", *(f"step of {count}, ms" for count in ROWS), f"TTFT after a prefix of {PREFIX}, ms",
         f"times as shipped, {ROWS[1]} rows", f"{ROWS[2]} rows"),
        rows,
        [plot("Decode step by rows", lines, "rows", "ms", log_x=True)],
        f"Without overlap a step of {ROWS[1]} rows takes {off[5]:.2f} times as long and one of {ROWS[2]} rows"
        f" {off[6]:.2f} times."
        + (_cpu_conclusion(measured) if device == "cpu" else "")
        + rounds_said(len(times["as shipped"]), asked),
    )  # fmt: skip


def _cpu_conclusion(measured: dict[str, tuple[object, ...]]) -> str:
    always = measured["overlap of slow steps too"]
    return (
        f" Overlapping also steps of more than 50 ms gives {always[5]:.2f} and {always[6]:.2f} times the time. A CPU"
        " keeps one such step in flight, so that a request that arrives takes part in the next one. A CPU has no"
        " graphs, and no setting for its split of contexts; the GPU's rows come from the same command on a GPU."
    )


def _config(model: str, *, graphs: bool) -> Config:
    return Config(
        model=ModelConfig(source=model), memory=MemoryConfig(kv_tokens=KV_TOKENS), run=RunConfig(graphs=graphs)
    )


def _times(engine: RealEngine) -> list[float]:
    """Milliseconds: a decode step by rows, and the first token of a short prompt after a cached prefix."""
    found = []
    engine.run([SimulatedRequest(0.0, 16, 4)])
    for count in ROWS:
        done = engine.run([SimulatedRequest(0.0, 16, OUTPUT)] * count)
        found.append(1e3 * float(np.median(done.outcome.values("tpot"))))
    return [*found, _suffix_ms(engine)]


def _suffix_ms(engine: RealEngine) -> float:
    """Three prompts with the same beginning, one after the other; the first is not counted."""
    prompt = SimulatedRequest(0.0, PREFIX + SUFFIX, 1, prefix_tokens=PREFIX)
    replica = engine.replica()
    times = []
    for number in range(3):
        began = replica.now
        replica.submit(number, prompt)
        replica.run_until(float("inf"))
        times.append(1e3 * (replica.now - began))
    return float(median(times[1:]))


def determinism(asked: Asked) -> Findings:
    """Answers in a batch against answers alone, and the time of steps, with and without deterministic mode."""
    rows, kinds = list[tuple[object, ...]](), (False, True)
    times: dict[bool, list[list[float]]] = {kind: [] for kind in kinds}
    equal = dict[bool, tuple[int, int]]()
    for number in range(3):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            with LLM(asked.model, progress=False, deterministic=kind, max_running=32) as llm:
                times[kind].append([*(step_ms(llm, count) for count in ROWS), prompt_ms(llm)])
                if kind not in equal:
                    equal[kind] = _equal_answers(llm, asked.samples)
    for kind in kinds:
        columns = list(zip(*times[kind], strict=True))
        rows.append(("on" if kind else "off", *(median(column) for column in columns), *equal[kind]))
    on, off = (list(zip(*times[kind], strict=True)) for kind in (True, False))
    ratios = [ratio_of_medians(column, base) for column, base in zip(on, off, strict=True)]
    lines = [Line(f"deterministic mode {row[0]}", ROWS, [float(str(value)) for value in row[1:4]]) for row in rows]
    same, tokens = equal[False]
    conclusion = (
        f"Deterministic mode takes {ratios[0]:.2f}, {ratios[1]:.2f} and {ratios[2]:.2f} times the time of a step of"
        f" {ROWS[0]}, {ROWS[1]} and {ROWS[2]} rows, and {ratios[3]:.2f} times that of a prompt. Without it {same} of"
        f" {asked.samples} answers were the same in a batch as alone, with {tokens} of"
        f" {asked.samples * OUTPUT} tokens before the first difference; with it {equal[True][0]}."
    )
    heads = (
        "deterministic mode",
        *(f"step of {count}, ms" for count in ROWS),
        "prompt of 512, ms",
        "equal answers",
        "equal tokens",
    )
    return Findings(heads, rows, [plot("Decode step by rows", lines, "rows", "ms", log_x=True)], conclusion)


def _equal_answers(llm: LLM, count: int) -> tuple[int, int]:
    """Of greedy answers in a batch: how many are those of the same prompt alone, and their tokens before the first
    difference. Prompts have different lengths."""
    words = read_text(None).split()
    prompts = [" ".join(words[20 * at % len(words) :][: 8 + at]) for at in range(count)]
    told: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True, "progress": False}
    alone = [llm.generate(prompt, **told)[0].token_ids for prompt in prompts]
    batch = [one.token_ids for one in llm.generate(prompts, **told)]
    prefixes = [
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), OUTPUT)
        for pair in zip(alone, batch, strict=True)
    ]
    return sum(length == OUTPUT for length in prefixes), sum(prefixes)


STUDIES = {
    "mechanisms": MeasuredStudy(
        "Overlap, graphs and split contexts switched off",
        "What does each of these mechanisms give?",
        "The scheduler, cycle and runner without HTTP; `--samples` rounds, or as many as `--minutes` allow, in which"
        f" all variants take turns, medians of times and of the rounds' ratios. Rows decode {OUTPUT} tokens each.",
        "smollm2-135m-instruct",
        5,
        mechanisms,
        has_limit=True,
    ),
    "determinism": MeasuredStudy(
        "What determinism costs, and how often it matters",
        "How much slower is deterministic mode, and how many answers depend on the batch without it?",
        f"`--samples` greedy answers of {OUTPUT} tokens, each alone and all in one batch; times in three rounds.",
        "smollm2-135m-instruct",
        64,
        determinism,
    ),
}
