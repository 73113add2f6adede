"""Sampling of requests that leave fields out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of requests that leave these fields out; None = the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = "neutral"
    """Where the values come from, in words."""
    stop: tuple[str, ...] = ()
    """Stop strings of requests that send none."""

    def fields(self) -> dict[str, float]:
        """Those that are numbers."""
        values = {name: getattr(self, name) for name in SamplingDefaults.__slots__ if name not in ("source", "stop")}
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` (None = left out) completed by the defaults. Temperature 0 is plain greedy: nothing is added."""
        present = {name: value for name, value in given.items() if value is not None}
        return present if present.get("temperature") == 0 else {**self.fields(), **present}


NEUTRAL_DEFAULTS = SamplingDefaults()
