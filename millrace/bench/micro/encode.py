"""Throughput of an encoder on texts of mixed lengths, alone or in turns with sentence-transformers.

The reference runs in a process of its own, with the interpreter that has it installed.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from millrace.bench.figures import Figure
from millrace.config import Config
from millrace.errors import ConfigError
from millrace.llm import LLM

ROUNDS = 2
LEAST_WORDS = 6
_WORDS = (
    "the sea river house light music garden winter summer paper stone cloud bread horse letter window forest".split()
)
_REFERENCE = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer
request = json.load(open(sys.argv[1]))
torch.set_num_threads(request["threads"] or torch.get_num_threads())
model = SentenceTransformer(request["model"], device=request["device"])
model.encode(request["texts"][:8])
began = time.perf_counter()
model.encode(request["texts"])
print(json.dumps(time.perf_counter() - began))
"""


def mixed_texts(count: int, max_words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=rng.randint(LEAST_WORDS, max_words))) for _ in range(count)]


def encode_figures(config: Config, count: int, reference: str) -> Iterator[Figure]:
    """`reference`: a Python interpreter with sentence-transformers; "" for none."""
    source, run = config.model.source, config.run
    with LLM(source, device=run.device, threads=run.threads, dtype=config.model.dtype, progress=False) as llm:
        # Each word is one token of most vocabularies; truncation makes both sides read the same tokens.
        texts = mixed_texts(count, max(LEAST_WORDS, llm.max_context - 2))
        num_tokens = sum(min(len(llm.tokenizer.encode(text)), llm.max_context) for text in texts)
        llm.embed(texts[:8], truncate=True)
        ours, theirs = [], []
        for _ in range(ROUNDS if reference else 1):
            began = time.perf_counter()
            llm.embed(texts, truncate=True)
            ours.append(time.perf_counter() - began)
            if reference:
                device = "cpu" if llm.device.startswith("cpu") else "cuda"
                theirs.append(_reference_s(reference, source, texts, run.threads, device))
    yield Figure("encode", "texts_per_s", count / min(ours), "texts/s")
    yield Figure("encode", "tokens_per_s", num_tokens / min(ours), "tok/s")
    if theirs:
        yield Figure("sentence-transformers", "texts_per_s", count / min(theirs), "texts/s")
        yield Figure("encode", "ratio", min(theirs) / min(ours), "x")


def _reference_s(python: str, model: str, texts: list[str], threads: int, device: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"model": model, "texts": texts, "threads": threads, "device": device}))
        command = [python, "-c", _REFERENCE, str(request)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"--reference {python} could not run sentence-transformers: {last}", param="reference")
    return float(json.loads(found.stdout.strip().splitlines()[-1]))
