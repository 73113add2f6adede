"""Multiplies decode rows with separate kernels, as ops/cpp/stack.cpp does in a native stack.

Decode kernels round less than prompt kernels. Which of them multiplies a token must not depend on the rest of the step,
nor on a recomputation after preemption, so it depends only on whether the token belongs to its request's prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens that use the same kernel."""

    tokens: slice
    decodes: bool


class SpanModule(Protocol):
    @property
    def has_decode_kernel(self) -> bool: ...

    def __call__(self, x: Any) -> Any: ...

    def decode(self, x: Any) -> Any: ...


def spans_of(decodes: Bools | None) -> tuple[Span, ...]:
    """Spans of equal kind; none if decode rows are not multiplied separately."""
    if decodes is None:
        return ()
    edges = [0, *(np.flatnonzero(decodes[1:] != decodes[:-1]) + 1).tolist(), len(decodes)]
    return tuple(
        Span(slice(first, last), bool(decodes[first])) for first, last in zip(edges[:-1], edges[1:], strict=True)
    )


def apply_by_span(module: SpanModule, x: Any, spans: tuple[Span, ...]) -> Any:
    """Apply a linear or an MLP to x, span by span. A module without a decode kernel gets all tokens at once."""
    if not spans or not module.has_decode_kernel:
        return module(x)
    parts = [module.decode(x[span.tokens]) if span.decodes else module(x[span.tokens]) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
