"""Whether a model is on this machine already, and bringing it here, with progress, when it is not."""

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
    """Fetch the model if it is not here. Says nothing and costs nothing when it is."""
    if not is_here(source):
        fetch_shown(source)


def fetch_shown(source: str) -> ModelFiles:
    """Resolve `source`, showing on standard error what is fetched: a bar on a terminal, a line elsewhere."""
    if sys.stderr.isatty():
        from millrace.terminal.download_bar import fetch_with_progress

        return fetch_with_progress(source)
    from millrace.sources.resolve import resolve_model

    with StatusLine() as line:
        return resolve_model(source, progress=line.show)


def is_here(source: str) -> bool:
    """Whether it can be opened without fetching: a known model in the cache, a path that exists, random weights."""
    known = find_known(source)
    if known is not None:
        return is_cached(known)
    return source.startswith("random:") or Path(source).expanduser().exists()


def is_cached(model: KnownModel) -> bool:
    """Whether the whole file is there. Its hash was checked when it was put there."""
    path = cache_dir() / "models" / model.file_name
    return path.is_file() and path.stat().st_size == model.num_bytes
