"""Logits processors: functions of the operator, by dotted name.

A processor takes the row's tokens so far (int64, prompt and output) and its logits (float32 [vocab]), both on the
device, and returns the logits to draw from.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor

from millrace.errors import ConfigError

Processor = Callable[[Tensor, Tensor], Tensor]


def load_processor(name: str) -> Processor:
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The logits processor {name!r} cannot be loaded: {error}. Name it as package.module.function.",
            param="allow_logits_processors",
        ) from error
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function.", param="allow_logits_processors")
    processor: Processor = found
    return processor
