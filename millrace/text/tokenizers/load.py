"""Opens the tokenizer of a resolved model, from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from millrace.sources.resolve import ModelFiles
from millrace.text.tokenizers.hf_tokenizer import build_hf_tokenizer
from millrace.text.tokenizers.stand_in import build_stand_in
from millrace.text.tokenizers.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """A model with random weights and no tokenizer.json gets the stand-in tokenizer."""
    if files.kind == "gguf":
        from millrace.sources.gguf.reader import read_gguf
        from millrace.text.tokenizers.gguf_tokenizer import build_gguf_tokenizer

        return build_gguf_tokenizer(read_gguf(files.path).metadata, str(files.path))
    directory = files.path.parent if files.kind == "random" else files.path
    if files.kind == "random" and not (directory / "tokenizer.json").is_file():
        return build_stand_in(files.config)
    return build_hf_tokenizer(directory, files.config)
