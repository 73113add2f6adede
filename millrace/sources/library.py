"""The models on this machine: which are downloaded, how large they are, and how to remove them."""

from __future__ import annotations

import difflib
import shutil
from dataclasses import dataclass
from pathlib import Path

from millrace.config import cache_dir
from millrace.errors import ModelError
from millrace.sources import hub
from millrace.sources.catalogue import entries, find_entry
from millrace.sources.known_models import KNOWN_MODELS, KnownModel, find_known
from millrace.sources.names import expand_alias, has_gpu, parse_name, read_aliases


@dataclass(frozen=True, slots=True)
class Downloaded:
    name: str
    num_bytes: int
    path: Path
    modified: float
    """Seconds since the epoch."""


def list_downloaded() -> list[Downloaded]:
    """Every downloaded model, known models first."""
    found = [_of_known(model) for model in KNOWN_MODELS if is_cached(model)]
    return found + [_of_hub(model) for model in hub.downloaded_models()]


def find_local(text: str) -> Downloaded | None:
    """The downloaded model that this name means."""
    text = expand_alias(text)
    known = find_known(text)
    if known is not None:
        return _of_known(known) if is_cached(known) else None
    name = parse_name(text, has_gpu=has_gpu())
    model = hub.find_downloaded(name) if name is not None else None
    return _of_hub(model) if model is not None else None


def aliases_by_model() -> dict[str, list[str]]:
    """The user's aliases, by the name of the downloaded model that they stand for, or else by what they were given."""
    found: dict[str, list[str]] = {}
    for alias, target in read_aliases().items():
        local = find_local(target)
        found.setdefault(local.name if local is not None else target, []).append(alias)
    return found


def is_downloaded(source: str) -> bool:
    """True for a downloaded model, an existing path, and random weights."""
    text = expand_alias(source)
    if text.startswith("random:") or find_local(text) is not None:
        return True
    return find_known(text) is None and bool(text) and Path(text).expanduser().exists()


def is_cached(model: KnownModel) -> bool:
    """True if the complete file is in the cache. Its hash was checked when it was downloaded."""
    path = _path_of(model)
    return path.is_file() and path.stat().st_size == model.num_bytes


def remove(text: str) -> tuple[str, int]:
    """Delete a downloaded model. Returns its name and the number of bytes that became free."""
    local = find_local(text)
    if local is None:
        names = ", ".join(model.name for model in list_downloaded()) or "none"
        raise ModelError(f"The model '{text}' is not downloaded. Downloaded: {names}.")
    known = find_known(expand_alias(text))
    if known is not None:
        path = _path_of(known)
        if known.weights:
            shutil.rmtree(known_folder(known))
            return known.name, known.num_bytes
        path.unlink()
        path.with_name(path.name + ".verified").unlink(missing_ok=True)
        return known.name, known.num_bytes
    model = hub.find_downloaded(hub.parse_manifest_name(local.name))
    if model is None:
        raise ModelError(f"The model '{text}' was removed by another process.")
    return local.name, hub.remove(model)


def nearest_name(text: str) -> str | None:
    """The name that `text` probably means: of a model that is here before one that would have to be downloaded, and of
    a family's own name before a mere likeness."""
    names = [name for model in KNOWN_MODELS for name in (model.name, *model.aliases)]
    names += [name for entry in entries() for name in (entry.name, *entry.aliases)]
    here = [*read_aliases(), *(model.name for model in list_downloaded())]
    here += [name for model in KNOWN_MODELS if is_cached(model) for name in model.aliases]
    wanted = text.strip().lower().rpartition("/")[2]
    starting = [name for name in names if name.startswith(wanted[:5]) and wanted[:5]]
    for pool, cutoff in ((here, 0.7), (starting, 0.5), (names, 0.6)):
        close = difflib.get_close_matches(wanted, pool, n=1, cutoff=cutoff)
        if close:
            return close[0]
    return None


def catalogue_bytes(name: str) -> int:
    """Approximate download of a catalogue entry on this machine; 0 if there is none."""
    entry = find_entry(name)
    return 0 if entry is None else entry.num_bytes("bf16" if has_gpu() else "q4_k_m")


def known_folder(model: KnownModel) -> Path:
    """The directory of a model that is one."""
    return cache_dir() / "models" / model.name


def _path_of(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.file_name


def _of_known(model: KnownModel) -> Downloaded:
    path = _path_of(model)
    return Downloaded(model.name, model.num_bytes, path, path.stat().st_mtime)


def _of_hub(model: hub.HubModel) -> Downloaded:
    return Downloaded(model.name, model.num_bytes, model.weights, model.weights.stat().st_mtime)
