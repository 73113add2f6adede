"""Rows that decode, multiplied apart from tokens of prompts: what cpp/step.cpp does in a native stack.

Kernels made for decoding round less than those made for prompts, so which of them multiplies a token must not depend on
what else is in the step, or on whether the token is computed anew after preemption: it depends on whether the token
belongs to its request's prompt or comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millrace.ops.linear.dense import NativeParts
from millrace.ops.linear.gated import ComposedGatedLinear

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens one after the other that are multiplied alike."""

    tokens: slice
    decodes: bool


ALL_DECODE = (Span(slice(None), True),)


def spans_of(decodes: Bools | None) -> tuple[Span, ...]:
    """None of them where nothing is multiplied apart."""
    if decodes is None:
        return ()
    edges = [0, *(np.flatnonzero(decodes[1:] != decodes[:-1]) + 1).tolist(), len(decodes)]
    return tuple(
        Span(slice(first, last), bool(decodes[first])) for first, last in zip(edges[:-1], edges[1:], strict=True)
    )


def by_kind(module: Any, x: Any, spans: tuple[Span, ...]) -> Any:
    """A linear or an MLP of x. One that knows no kinds of rows gets all of them at once."""
    if not spans or not hasattr(module, "decode"):
        return module(x)
    parts = [module.decode(x[span.tokens]) if span.decodes else module(x[span.tokens]) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def any_apart(modules: Iterable[Any]) -> bool:
    """Whether some of these linears multiply rows that decode in a way of their own."""
    return any(_is_apart(module) for module in modules)


def _is_apart(module: Any) -> bool:
    linear = module.linear if isinstance(module, ComposedGatedLinear) else module
    return isinstance(linear, NativeParts) and linear.has_decode_kernel
