"""Millrace, an LLM serving engine. `from millrace import LLM, SamplingParams` is the offline interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.llm import LLM, AsyncLLM, Choice, Generation, GenerationStream, Ranked, Score, StreamPart, ToolCall
    from millrace.params.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Generation",
    "GenerationStream",
    "Ranked",
    "SamplingParams",
    "Score",
    "StreamPart",
    "ToolCall",
    "__version__",
]


def __getattr__(name: str) -> object:
    # `millrace.llm` imports torch, which fronts and `millrace.__version__` do not need.
    if name == "SamplingParams":
        from millrace.params.sampling import SamplingParams

        return SamplingParams
    if name in __all__:
        from millrace import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
