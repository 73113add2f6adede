"""The default name of a model in the API, from its source alone: without reading or downloading its files."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.sources.known_models import find_known
from millrace.sources.names import expand_alias

RANDOM_PREFIX = "random:"


def default_name(source: str) -> str:
    """As `resolve_model(source).name`, for sources that exist."""
    text = expand_alias(source.strip())
    if text.startswith(RANDOM_PREFIX):
        return f"random-{_random_name(Path(text.removeprefix(RANDOM_PREFIX)).expanduser())}"
    known = find_known(text)
    if known is not None:
        return known.name
    path = Path(text).expanduser()
    if path.is_dir():
        return path.resolve().name
    if path.exists():
        return re.sub(r"-00001-of-\d{5}$", "", path.stem)
    return text


def _random_name(path: Path) -> str:
    if path.is_dir():
        return path.resolve().name
    return path.resolve().parent.name if path.name == "config.json" else path.stem
