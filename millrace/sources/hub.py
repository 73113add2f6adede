"""Downloads models from the Hugging Face hub with `huggingface_hub`, which caches files and shows its own progress."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.errors import ModelError
from millrace.sources.download import Progress

_WANTED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.jinja",
]
_UNWANTED = ["consolidated*", "original/*", "onnx/*", "*/*"]
"""Copies of the weights in other formats, and all subdirectories."""


def fetch_snapshot(repo: str, progress: Progress | None = None) -> Path:
    """Directory with the repository's safetensors, configuration and tokenizer files."""
    _announce(progress, f"downloading {repo} from the hub")
    return _download(repo, _WANTED, _UNWANTED)


def fetch_gguf(repo: str, file: str, progress: Progress | None = None) -> Path:
    """One GGUF file of a repository, and its other parts if it is the first part of a split model."""
    _announce(progress, f"downloading {repo}:{file} from the hub")
    parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-?????-of-\1.gguf", file)
    path = _download(repo, [parts], None) / file
    if not path.is_file():
        raise ModelError(f"'{repo}' on the hub has no file '{file}'. Check the name on the model's page.")
    return path


def _announce(progress: Progress | None, what: str) -> None:
    """Report the start only, with an unknown total of 0: huggingface_hub shows its own progress bars."""
    if progress is not None:
        progress(what, 0, 0)


def _download(repo: str, wanted: list[str], unwanted: list[str] | None) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=wanted, ignore_patterns=unwanted)
    except Exception as error:
        # huggingface_hub passes on any exception of its HTTP client.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelError(
            f"'{repo}' could not be downloaded from the hub ({type(error).__name__}: {reason})."
            " Check the name and the network; for a gated model log in with `hf auth login`;"
            " or give a local directory or .gguf file."
        ) from error
    return Path(folder)
