"""Formats of weights beside each other: time of a decode step by batch, memory, and perplexity of a text.

Models are checkpoints, or with `formats` shapes with random weights, which have no perplexity. Each runs in this
process, one after the other. A step's time is the difference between a long and a short answer
of the same requests, so that prompts and warm-up do not count.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from millrace.bench.figures import Figure
from millrace.bench.gpu.models import known_shapes, shape_path
from millrace.bench.http.perplexity import TEXT_FILE, cut
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.models.weight_formats import DescribedSource
from millrace.models.weights import open_weights
from millrace.sources.resolve import RANDOM_FORMAT, resolve_model

PLAIN = "plain"
PROMPT, SHORT, LONG, ROUNDS = 16, 8, 40, 3
"""Tokens of a prompt and of both answers; measurements of which the median counts."""


@dataclass(frozen=True, slots=True)
class FormatRun:
    """What to measure. `windows`: at most so many windows of `window` tokens of the text; 0 for all. `formats`: the
    models are shapes (`bench/gpu/models.py`), each with random weights in each of these; `plain` for weights in the
    model's dtype."""

    models: Sequence[str]
    batches: Sequence[int]
    text: Path | None = None
    window: int = 512
    windows: int = 0
    formats: Sequence[str] = ()


def format_figures(run: FormatRun, **settings: Any) -> Iterator[Figure]:
    if run.formats:
        yield from _shape_figures(run, settings)
        return
    text = read_text(run.text)
    for model in run.models:
        with _opened(model, run, settings) as llm:
            yield from _step_figures(llm, model, run)
            value, scored = perplexity(llm, text, run.window, run.windows)
            yield Figure(model, "perplexity", value, "", requests=scored, note=f"{scored} tokens")


def _shape_figures(run: FormatRun, settings: Mapping[str, Any]) -> Iterator[Figure]:
    shapes = known_shapes()
    for name in run.models:
        config = json.loads(shape_path(name, shapes).read_text(encoding="utf-8"))
        for kind in run.formats:
            with TemporaryDirectory() as folder:
                file = Path(folder, "config.json")
                file.write_text(json.dumps(config if kind == PLAIN else {**config, RANDOM_FORMAT: kind}))
                with _opened(f"random:{file}", run, settings) as llm:
                    yield from _step_figures(llm, f"{name} {kind}", run)


def _opened(model: str, run: FormatRun, settings: Mapping[str, Any]) -> LLM:
    return LLM(model, progress=False, max_running=max(run.batches), **settings)


def _step_figures(llm: LLM, label: str, run: FormatRun) -> Iterator[Figure]:
    weights = llm.ready.memory_plan.get("weights", 0)
    yield Figure(label, "weights", weights / 2**30, "GiB", note=_label(llm))
    for batch in run.batches:
        yield Figure(label, f"decode step, batch {batch}", step_ms(llm, batch), "ms", requests=batch)


def read_text(file: Path | None) -> str:
    """A text file, perhaps compressed by gzip; by default the text that ships with Millrace."""
    if file is None:
        return TEXT_FILE.read_text(encoding="utf-8")
    try:
        raw = file.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as a text: {error}. Give a file of UTF-8 text, or such a file compressed by gzip."
        ) from error


def step_ms(llm: LLM, batch: int) -> float:
    """Milliseconds of a step that decodes `batch` rows."""
    draw = random.Random(batch)
    top = llm.ready.vocab_size

    def seconds(tokens: int) -> float:
        prompts = [[draw.randrange(top) for _ in range(PROMPT)] for _ in range(batch)]
        began = time.perf_counter()
        llm.generate(prompts, temperature=0.0, max_tokens=tokens, ignore_eos=True, progress=False)
        return time.perf_counter() - began

    seconds(SHORT)
    pairs = [(seconds(SHORT), seconds(LONG)) for _ in range(ROUNDS)]
    return 1e3 * median(long - short for short, long in pairs) / (LONG - SHORT)


def perplexity(llm: LLM, text: str, window: int, windows: int) -> tuple[float, int]:
    """Per token, and the number of scored tokens. The first token of a window has no context and is not scored."""
    size = min(window, llm.max_context - 1)
    parts = cut(llm.tokenizer.encode(text), size)
    total, scored = 0.0, 0
    for part in parts[: windows or None]:
        found = llm.generate([part], temperature=0.0, max_tokens=0, prompt_logprobs=0, progress=False)[0]
        logprobs = [token.logprob for token in found.prompt_logprobs or () if token is not None]
        total += math.fsum(logprobs)
        scored += len(logprobs)
    if not scored:
        raise ConfigError("The text has too few tokens to score. Give a longer one with --text.")
    return math.exp(-total / scored), scored


def _label(llm: LLM) -> str:
    """The formats of the model's matrices, largest first."""
    source = open_weights(resolve_model(llm.config.model.source, offline=True))
    if not isinstance(source, DescribedSource):
        return "random weights"
    sizes: Counter[str] = Counter()
    for name in source.names():
        if len(source.shape(name)) > 1:
            sizes[source.stored_label(name)] += source.stored_bytes(name)
    return ", ".join(f"{label} {size / 2**20:.0f} MiB" for label, size in sizes.most_common())
