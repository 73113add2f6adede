"""Resolves the source of a drafter to a directory: a path, or a hub name, which is downloaded."""

from __future__ import annotations

from pathlib import Path

from millrace.errors import ModelError
from millrace.sources.download import Progress
from millrace.sources.hub import fetch, find_downloaded
from millrace.sources.known_models import find_known
from millrace.sources.names import expand_alias, has_gpu, parse_name
from millrace.sources.resolve import RANDOM_PREFIX, not_found


def drafter_folder(source: str, *, progress: Progress | None = None, offline: bool = False) -> Path | None:
    """The directory with the drafter's config and weights. None if the source is a whole model: a GGUF file, a name of
    one, or random weights."""
    text = expand_alias(source.strip())
    if text.startswith(RANDOM_PREFIX) or find_known(text) is not None:
        return None
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if text and path.exists():
        if path.suffix == ".gguf":
            return None
        raise ModelError(f"{path} is one file. Give the directory that has the drafter's config.json and weights.")
    name = parse_name(text, has_gpu=has_gpu())
    if name is None:
        raise not_found(source)
    if name.variant:
        return None
    found = find_downloaded(name)
    if found is None and offline:
        raise ModelError(
            f"The drafter '{source}' is not on this machine, and --offline forbids downloads. Start once without"
            " --offline, or give the directory of its files."
        )
    return (found or fetch(name, progress, is_drafter=True)).weights
