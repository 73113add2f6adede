"""Many adapters with room for few: throughput of a Zipf load against that with all of them on the device, and what a
stream of the base model notices of adapters that are being loaded.

The adapters have random matrices, which take as long as trained ones. Their weights are one file with many names; their
configs differ, so that each is an adapter of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from millrace.bench.figures import Figure, percentile
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.models.adapters.config import CONFIG_FILE, WEIGHTS_FILE
from millrace.models.adapters.targets import QKV, targets_of
from millrace.models.spec.families import spec_from_config
from millrace.params.sampling import SamplingParams
from millrace.sources.resolve import resolve_model

NUM_ADAPTERS, ROOM, RANK = 1000, 64, 8
EXPONENT = 1.0
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 192, 16, 16
KV_TOKENS = 16384
"""Of each of the two models that are there at once."""
NUM_LOADED, STREAM_TOKENS = 8, 96
"""In one of the rounds."""
NUM_ROUNDS = 4
LATE_MS = 50.0


def adapter_figures(source: str, settings: dict[str, Any], rounds: int = 3) -> Iterator[Figure]:
    """Both models are there all the time and take turns, so other work on the machine slows both."""
    with tempfile.TemporaryDirectory() as folder:
        names = make_adapters(Path(folder), source)
        asked = _drawn(names)
        few, many = (_open(source, settings, Path(folder), names, room) for room in (ROOM, NUM_ADAPTERS))
        with few, many:
            for llm in (few, many):
                _run(llm, asked)  # From here on all that are asked for are in host memory.
            rates = [(_rate(few, asked), _rate(many, asked)) for _ in range(rounds)]
            load = f"Zipf load of {len(set(asked))} adapters"
            for label, number in ((f"room for {ROOM}", 0), ("all on the device", 1)):
                yield Figure(load, label, median(rate[number] for rate in rates), "tokens/s", len(asked))
            ratios = [one / other for one, other in rates]
            note = f"{min(ratios):.2f} to {max(ratios):.2f}; bar: 0.8"
            yield Figure(load, "ratio", median(ratios), "", rounds, note=note)
            yield from _gaps(few, sorted(set(names) - set(asked)))


def make_adapters(folder: Path, source: str) -> list[str]:
    """Rank 8 on queries and values."""
    from safetensors.numpy import save_file

    random, tensors = np.random.default_rng(0), {}
    linears = targets_of(spec_from_config(resolve_model(source).config)).linears
    for linear in linears[QKV::4]:
        if linear is None:
            raise ConfigError("The model has layers without attention; measure another.", param="model.source")
        for module, outputs in zip(linear.modules, linear.out_sizes, strict=True):
            if not module.endswith(("q_proj", "v_proj")):
                continue
            for which, shape in (("A", (RANK, linear.in_features)), ("B", (outputs, RANK))):
                values = 0.02 * random.standard_normal(shape, np.float32)
                tensors[f"base_model.model.{module}.lora_{which}.weight"] = values
    save_file(tensors, folder / WEIGHTS_FILE)
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    for name in names:
        (folder / name).mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "base_model_name_or_path": name}
        (folder / name / CONFIG_FILE).write_text(json.dumps(config))
        os.link(folder / WEIGHTS_FILE, folder / name / WEIGHTS_FILE)
    return names


def _open(source: str, settings: dict[str, Any], folder: Path, names: list[str], room: int) -> LLM:
    adapters = {name: folder / name for name in names}
    own = {"adapters": adapters, "max_adapters": room, "adapter_memory": 8.0}
    return LLM(source, **settings | own | {"kv_tokens": settings.get("kv_tokens") or KV_TOKENS})


def _drawn(names: list[str]) -> list[str]:
    weights = 1.0 / np.arange(1, len(names) + 1) ** EXPONENT
    drawn = np.random.default_rng(1).choice(len(names), NUM_REQUESTS, p=weights / weights.sum())
    return [names[number] for number in drawn]


def _rate(llm: LLM, asked: list[str]) -> float:
    began = time.perf_counter()
    _run(llm, asked)
    return len(asked) * OUTPUT_TOKENS / (time.perf_counter() - began)


def _run(llm: LLM, asked: list[str]) -> None:
    prompts, params = [], []
    for number, name in enumerate(asked):
        prompts.append([1 + (number * 31 + place * 7) % 1000 for place in range(PROMPT_TOKENS)])
        params.append(SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, adapter=name))
    llm.generate(prompts, params, progress=False)


def _gaps(llm: LLM, absent: list[str]) -> Iterator[Figure]:
    """Gaps of a stream of the base model beside requests of adapters that were never read, and then of the same ones,
    which are on the device by then, in alternation."""
    loading, there = list[float](), list[float]()
    for number in range(NUM_ROUNDS):
        names = absent[number * NUM_LOADED :][:NUM_LOADED]
        loading += _stream_beside(llm, names)
        there += _stream_beside(llm, names)
    what = f"Gap of a stream beside {NUM_LOADED} adapters"
    for label, gaps in (("while they are loaded", loading), ("once they are there", there)):
        for metric, value in (("p50", percentile(gaps, 50)), ("p99", percentile(gaps, 99)), ("longest", max(gaps))):
            yield Figure(what, f"{metric}, {label}", value, "ms", len(gaps))
    note = f"bar: {LATE_MS:g} ms"
    yield Figure(what, "p99, added", percentile(loading, 99) - percentile(there, 99), "ms", note=note)
    yield Figure(what, "longest, added", max(loading) - max(there), "ms", note=note)


def _stream_beside(llm: LLM, names: list[str]) -> list[float]:
    """Milliseconds between the tokens of a stream, beside one request after the other."""

    def ask() -> None:
        for name in names:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, adapter=name)
            llm.generate([[1, 2, 3]], params, progress=False)

    others = threading.Thread(target=ask, name="others")
    times = []
    params = SamplingParams(temperature=0.0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    for _ in llm.stream([1, 2, 3, 4], params):
        times.append(time.perf_counter())
        if len(times) == 4:
            others.start()
    others.join()
    return [1e3 * float(gap) for gap in np.diff(times[4:])]
