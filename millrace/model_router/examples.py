"""Training data: one JSON object per line, with a request and how good each model's answer was."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.model_router.features import Floats, features_of


class Example(msgspec.Struct, frozen=True):
    features: Floats
    small: float
    """Quality of the small model's answer, 0 to 1."""
    large: float
    confidence: float | None = None
    """Mean probability per token of the small model's answer."""
    small_tokens: int = 1000
    large_tokens: int = 1000
    is_held_out: bool = False


def read_examples(path: Path) -> list[Example]:
    """Raises `ConfigError` with the line of the first mistake."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.", param="data") from error
    found = [_example(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no examples; write one JSON object per line.", param="data")
    return found


def _example(path: Path, number: int, line: str) -> Example:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{path}, line {number}: {what}", param="data")

    try:
        given: Any = json.loads(line)
    except ValueError as error:
        raise wrong(f"it is not JSON: {error}") from error
    if not isinstance(given, dict) or not any(given.get(name) for name in ("messages", "prompt", "input")):
        raise wrong("it has no 'messages', 'prompt' or 'input'.")
    for name in ("small", "large"):
        if not isinstance(given.get(name), int | float) or not 0 <= given[name] <= 1:
            raise wrong(f"'{name}' is {given.get(name)!r}; it must be the quality of that model's answer, 0 to 1.")
    sure = given.get("confidence")
    if sure is not None and not (isinstance(sure, int | float) and 0 <= sure <= 1):
        raise wrong(f"'confidence' is {sure!r}; it must be a probability.")
    counts = {name: given[name] for name in ("small_tokens", "large_tokens") if isinstance(given.get(name), int)}
    # By content, so that an example stays on its side when others are added.
    asked = json.dumps([given.get(name) for name in ("messages", "prompt", "input")], sort_keys=True)
    is_held_out = zlib.crc32(asked.encode()) % 5 == 0
    return Example(features_of(given), given["small"], given["large"], sure, **counts, is_held_out=is_held_out)


def is_enough(example: Example, tolerance: float) -> bool:
    """True if the small model's answer is as good as the large one's, up to `tolerance`."""
    return example.small >= example.large - tolerance


def held_out(examples: Iterable[Example]) -> list[Example]:
    return [one for one in examples if one.is_held_out]
