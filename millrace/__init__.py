"""Millrace, an LLM serving engine. `from millrace import LLM, SamplingParams` is the offline interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.llm import LLM
    from millrace.params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # LLM imports torch, which fronts and `millrace.__version__` do not need.
    if name == "LLM":
        from millrace.llm import LLM

        return LLM
    if name == "SamplingParams":
        from millrace.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")
