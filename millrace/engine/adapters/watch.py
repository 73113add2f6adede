"""A directory whose subdirectories are adapters, named after them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.engine.adapters.store import check_name
from millrace.errors import AdapterError
from millrace.models.adapters.config import CONFIG_FILE, WEIGHTS_FILE

MAX_FOUND = 10_000
Signature = tuple[int, ...]
"""Changes when a file is written anew."""


@dataclass(frozen=True, slots=True)
class Found:
    adapters: dict[str, Signature]
    skipped: tuple[str, ...]
    """One sentence each."""


def scan(folder: Path) -> Found:
    """Directories that are still being written, without weights, are left out until they have some."""
    adapters: dict[str, Signature] = {}
    skipped = []
    try:
        entries = sorted(entry for entry in folder.iterdir() if (entry / CONFIG_FILE).is_file())
    except OSError as error:
        return Found({}, (f"{folder} cannot be read: {error}",))
    for entry in entries[:MAX_FOUND]:
        try:
            check_name(entry.name)
            stats = [(entry / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except AdapterError as error:
            skipped.append(f"{entry} is not served: {error.message}")
        except OSError:
            continue
        else:
            adapters[entry.name] = tuple(part for stat in stats for part in (stat.st_mtime_ns, stat.st_size))
    if len(entries) > MAX_FOUND:
        skipped.append(f"{folder} has {len(entries)} adapters; the first {MAX_FOUND} are served.")
    return Found(adapters, tuple(skipped))
