"""Fetches model files from the Hugging Face hub through `huggingface_hub`, which caches them and shows its progress."""

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
"""Second copies of the weights in other layouts, and everything below the top directory."""


def fetch_snapshot(repo: str, progress: Progress | None = None) -> Path:
    """The directory that holds the repository's safetensors, configuration and tokenizer files."""
    _announce(progress, f"fetching {repo} from the hub")
    return _download(repo, _WANTED, _UNWANTED)


def fetch_gguf(repo: str, file: str, progress: Progress | None = None) -> Path:
    """One GGUF file of a repository, with the other parts if it is the first part of a split model."""
    _announce(progress, f"fetching {repo}:{file} from the hub")
    parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-?????-of-\1.gguf", file)
    path = _download(repo, [parts], None) / file
    if not path.is_file():
        raise ModelError(f"'{repo}' on the hub holds no file '{file}'. Check the name on the model's page.")
    return path


def _announce(progress: Progress | None, what: str) -> None:
    """The library counts the bytes and shows its own bars; a total of 0 says that it is unknown here."""
    if progress is not None:
        progress(what, 0, 0)


def _download(repo: str, wanted: list[str], unwanted: list[str] | None) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=wanted, ignore_patterns=unwanted)
    except Exception as error:
        # The library passes on whatever its HTTP stack raises; all of it means the same to the user.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelError(
            f"'{repo}' could not be fetched from the hub ({type(error).__name__}: {reason})."
            " Check the name and the network; for a gated model log in with `hf auth login`;"
            " or give a local directory or .gguf file."
        ) from error
    return Path(folder)
