"""Writes a model in the form that engines without GGUF read: `python tools/dequantise.py MODEL.gguf OUT_DIR`.

MODEL is anything `millrace serve` takes. OUT_DIR receives config.json, one safetensors file with every weight in the
asked number type, and the tokenizer. For comparisons with other engines on equal weights (docs/peers.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace.models.weights.open import open_weights
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.tokenizer import Tokenizer, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args()
    files = resolve_model(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    write_weights(files, args.out, args.dtype)
    write_tokenizer(load_tokenizer(files), args.out)
    print(f"{files.name} in {args.dtype}: {args.out}")


def write_weights(files: ModelFiles, out: Path, dtype: str) -> None:
    source = open_weights(files)
    wanted = getattr(torch, dtype)
    tensors = {name: source.get(name, dtype=wanted).contiguous() for name in source.names()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {**files.config, "torch_dtype": dtype}
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    (out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    named = {**tokenizer.special_tokens}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
