"""Converts a quantised model to plain weights for engines that cannot read it: `python tools/dequantise.py MODEL OUT`.

MODEL is anything `millrace serve` takes. OUT is a directory for config.json, one safetensors file in the chosen dtype
and the tokenizer. If MODEL is a GGUF file, OUT may be a .gguf file, which gets all matrices in float16. Used to compare
engines on equal weights (docs/peers.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="a directory, or a .gguf file")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the weights in a directory (default: bfloat16)",
    )
    args = parser.parse_args()
    files = resolve_model(args.model)
    if args.out.suffix == ".gguf":
        if files.kind != "gguf":
            parser.error(f"{args.model} is not a GGUF file; OUT must be a directory.")
        write_gguf(files.path, args.out)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        write_weights(files, args.out, args.dtype)
        write_tokenizer(load_tokenizer(files), args.out)
    print(f"{files.name}: {args.out}")


def write_weights(files: ModelFiles, out: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    from millrace.models.weights.open import open_weights

    source = open_weights(files)
    wanted = getattr(torch, dtype)
    tensors = {name: source.get(name, dtype=wanted).contiguous() for name in source.names()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {**files.config, "torch_dtype": dtype}
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Without added BOS and EOS tokens: the benchmarks send token ids."""
    (out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    named = {**settings, **tokenizer.special_tokens}
    (out / "tokenizer_config.json").write_text(json.dumps(named, indent=1), encoding="utf-8")


def write_gguf(path: Path, out: Path) -> None:
    """Same metadata; matrices in float16, vectors in float32, as converters write them."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for key, entry in reader.fields.items():
        if key not in own and not key.startswith("GGUF."):
            item = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, entry.contents(), entry.types[0], item)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        writer.add_tensor(tensor.name, values.astype(np.float16 if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
