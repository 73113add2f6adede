"""Checks whether a model is already on this machine, and downloads it with progress if not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import cache_dir
from millrace.sources.known_models import KnownModel, find_known
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles


def obtain_model(source: str) -> None:
    """Download the model unless it is on this machine; prints nothing if it is."""
    if not is_downloaded(source):
        download_model(source)


def download_model(source: str) -> ModelFiles:
    """Resolve `source` with progress on standard error: a bar on a terminal, else one line."""
    if sys.stderr.isatty():
        from millrace.terminal.download_bar import fetch_with_progress

        return fetch_with_progress(source)
    from millrace.sources.resolve import resolve_model

    with StatusLine() as line:
        return resolve_model(source, progress=line.show)


def is_downloaded(source: str) -> bool:
    """True for a known model in the cache, an existing path, and random weights. Does not look for Hugging Face ids in
    the cache: for these it is always False."""
    known = find_known(source)
    if known is not None:
        return is_cached(known)
    return source.startswith("random:") or Path(source).expanduser().exists()


def is_cached(model: KnownModel) -> bool:
    """True if the complete file is in the cache. Its hash was checked when it was downloaded."""
    path = cache_dir() / "models" / model.file_name
    return path.is_file() and path.stat().st_size == model.num_bytes
