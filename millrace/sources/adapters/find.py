"""Finds an adapter: a directory of this machine, or a repository of the hub, which is downloaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from millrace.errors import ModelError
from millrace.sources.download import Progress
from millrace.sources.hub import ADAPTER, fetch, find_downloaded
from millrace.sources.names import parse_name


def adapter_folder(source: str, *, max_bytes: int, progress: Progress | None = None, offline: bool = False) -> Path:
    """The directory. `org/repo[@revision]` is a hub name unless there is such a directory; only the adapter's config
    and its safetensors file are downloaded, `max_bytes` at most."""
    path = Path(source).expanduser()
    if path.exists() or path.is_absolute():
        return path
    name = parse_name(source, has_gpu=False) if "/" in source else None
    if name is None or name.variant not in ("", ADAPTER):
        return path
    name = dataclasses.replace(name, variant=ADAPTER)
    found = find_downloaded(name)
    if found is None and offline:
        raise ModelError(f"There is no directory {source}, and --offline forbids to ask the hub for it.")
    try:
        return (found or fetch(name, progress, max_bytes=max_bytes)).weights
    except ModelError as error:
        raise ModelError(f"There is no directory {source}, so it is a hub name. {error.message}") from error
