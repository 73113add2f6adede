"""Throughput of an encoder on texts of mixed lengths, alone or in turns with sentence-transformers and ONNX Runtime.

A reference runs in a process of its own, with the interpreter that has it installed and as many threads.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from millrace.bench.encoding.shapes import write_shape
from millrace.bench.figures import Figure
from millrace.config import Config
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.models.weights.onnx_weights import OnnxWeights
from millrace.sources.encoders.encoder_files import read_encoder
from millrace.sources.resolve import ModelFiles, resolve_model

ROUNDS = 2
LEAST_WORDS = 6
WORDS = tuple(
    "the sea river house light music garden winter summer paper stone cloud bread horse letter window forest".split()
)
_READ = """
import json, sys, time
request = json.load(open(sys.argv[1]))
texts, threads = request["texts"], request["threads"]
"""
_SENTENCE_TRANSFORMERS = (
    _READ
    + """
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(threads)
dtype = getattr(torch, request["reference_dtype"])
model = SentenceTransformer(request["model"], device=request["device"], model_kwargs={"dtype": dtype})
embed = model.encode
"""
)
_TRANSFORMERS = (
    _READ
    + """
import torch
from transformers import AutoModel, PreTrainedTokenizerFast
torch.set_num_threads(threads)
device, dtype = request["device"], getattr(torch, request["reference_dtype"])
tokenizer = PreTrainedTokenizerFast.from_pretrained(request["model"])
model = AutoModel.from_pretrained(request["model"], dtype=dtype).to(device).eval()

@torch.inference_mode()
def embed(texts):
    \"\"\"Sorted by length and in batches of 32, as sentence-transformers does it; then the mean, of length 1.\"\"\"
    texts, vectors = sorted(texts, key=len, reverse=True), []
    for first in range(0, len(texts), 32):
        batch, limit = texts[first : first + 32], request["max_tokens"]
        given = tokenizer(batch, padding=True, truncation=True, max_length=limit, return_tensors="pt").to(device)
        states, mask = model(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1)
        mean = (states * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(mean, dim=1))
    return torch.cat(vectors).float().cpu()
"""
)
_ONNX_RUNTIME = (
    _READ
    + """
import numpy as np
import onnxruntime
from tokenizers import Tokenizer
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(request["onnx"], options, providers=["CPUExecutionProvider"])
inputs = {one.name for one in session.get_inputs()}
tokenizer = Tokenizer.from_file(request["model"] + "/tokenizer.json")
tokenizer.enable_truncation(request["max_tokens"])
tokenizer.enable_padding()

def embed(texts):
    \"\"\"Sorted by length and in batches of 32, as sentence-transformers does it; then the mean, of length 1.\"\"\"
    texts = sorted(texts, key=len, reverse=True)
    for first in range(0, len(texts), 32):
        found = tokenizer.encode_batch(texts[first : first + 32])
        mask = np.array([one.attention_mask for one in found], np.int64)
        given = {"input_ids": np.array([one.ids for one in found], np.int64), "attention_mask": mask}
        given["token_type_ids"] = np.zeros_like(mask)
        states = session.run(None, {name: given[name] for name in inputs})[0]
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
"""
)
_MEASURE = """
embed(texts[:8])
began = time.perf_counter()
embed(texts)
print(json.dumps(time.perf_counter() - began))
"""


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    program: str
    dtype: str = "float32"
    """Their default. On a GPU they are measured in the type that Millrace computes in, too."""


def mixed_texts(count: int, max_words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(LEAST_WORDS, max_words))) for _ in range(count)]


def shape_figures(config: Config, shape: str, count: int, reference: str) -> Iterator[Figure]:
    """Of random weights in this shape."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / shape
        write_shape(shape, folder, WORDS)
        model = replace(config.model, source=str(folder))
        for figure in encode_figures(replace(config, model=model), count, reference):
            yield replace(figure, workload=f"{shape}, random: {figure.workload}")


def encode_figures(config: Config, count: int, reference: str) -> Iterator[Figure]:
    """`reference`: a Python interpreter with sentence-transformers, and with onnxruntime for an ONNX file on a CPU; ""
    for none."""
    source, run = config.model.source, config.run
    precision: dict[str, Any] = {"dtype": config.model.dtype, "quantization": config.model.quantization}
    with (
        tempfile.TemporaryDirectory() as scratch,
        LLM(source, device=run.device, threads=run.threads, progress=False, **precision) as llm,
    ):
        # Each word is one token of most vocabularies; truncation makes all sides read the same tokens.
        texts = mixed_texts(count, max(LEAST_WORDS, llm.max_context - 2))
        num_tokens = sum(min(len(llm.tokenizer.encode(text)), llm.max_context) for text in texts)
        files, is_cpu = resolve_model(source), llm.device.startswith("cpu")
        request = Path(scratch) / "request.json"
        described = {
            "texts": texts,
            "model": str(_folder_for_references(files, Path(scratch)) if reference else files.path),
            "onnx": str(files.weights[0]),
            "max_tokens": llm.max_context,
            "threads": run.threads or torch.get_num_threads(),
            "device": "cpu" if is_cpu else "cuda",
        }
        peers = _references(reference, files, is_cpu) if reference else []
        described_files = read_encoder(files)
        classifies = described_files is not None and described_files.task in ("classify", "tag")
        if classifies and reference:
            raise ConfigError("--reference compares embedders; leave it out for a classifier.", param="reference")
        encode = partial(llm.classify if classifies else llm.embed, truncate=True)
        encode(texts[:8])
        ours: list[float] = []
        theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for _ in range(ROUNDS if reference else 1):
            began = time.perf_counter()
            encode(texts)
            ours.append(time.perf_counter() - began)
            for peer in peers:
                request.write_text(json.dumps({**described, "reference_dtype": peer.dtype}))
                theirs[peer.name].append(_reference_s(reference, peer, request))
    yield Figure("encode", "texts_per_s", count / min(ours), "texts/s")
    yield Figure("encode", "tokens_per_s", num_tokens / min(ours), "tok/s")
    for name, seconds in theirs.items():
        yield Figure(name, "texts_per_s", count / min(seconds), "texts/s")
        yield Figure("encode", f"ratio_to_{name}", min(seconds) / min(ours), "x")


def _references(python: str, files: ModelFiles, is_cpu: bool) -> list[_Reference]:
    """transformers stands for sentence-transformers where only it is installed and pooling is a mean."""
    has = subprocess.run([python, "-c", "import sentence_transformers"], capture_output=True, check=False)
    described = read_encoder(files)
    is_mean = described is not None and described.pooling == ("mean",) and not described.dense and described.normalises
    name, program = "sentence-transformers", _SENTENCE_TRANSFORMERS
    if has.returncode and is_mean and files.kind != "gguf":
        has = subprocess.run([python, "-c", "import transformers"], capture_output=True, check=False)
        if not has.returncode:
            name, program = "transformers", _TRANSFORMERS
    found = [_Reference(name, program)]
    if not is_cpu:
        found.append(_Reference(f"{name}, float16", program, "float16"))
    if files.kind == "onnx" and is_cpu:
        found.append(_Reference("onnxruntime", _ONNX_RUNTIME))
    return found


def _folder_for_references(files: ModelFiles, scratch: Path) -> Path:
    """sentence-transformers reads no ONNX file without more packages, so it gets the same weights as safetensors."""
    if files.kind != "onnx":
        return files.path
    folder = scratch / "model"
    shutil.copytree(files.path, folder, ignore=shutil.ignore_patterns("*.onnx", "*.verified"))
    source = OnnxWeights(files.weights[0])
    tensors = {name: source.get(name).contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _reference_s(python: str, peer: _Reference, request: Path) -> float:
    command = [python, "-c", peer.program + _MEASURE, str(request)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"--reference {python} could not run {peer.name}: {last}", param="reference")
    return float(json.loads(found.stdout.strip().splitlines()[-1]))
