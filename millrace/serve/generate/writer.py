"""The interface of a dialect's writer: it gives events, errors and whole answers the bytes that clients expect."""

from __future__ import annotations

from typing import Protocol

from millrace.errors import MillraceError
from millrace.serve.generate.choices import Choice, CollectedChoice, DeltaWriter, DetailedChoice
from millrace.serve.generate.events import Tokens, Usage
from millrace.text.answer_events import ToolCall

PLACEHOLDER = "\0"
"""Stands for the text when a frame is built once; no other field can contain it."""


class TextOnly:
    """For a dialect whose answers are never parsed."""

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes:
        raise AssertionError("these answers are not parsed")

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes:
        raise AssertionError("these answers are not parsed")

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes:
        raise AssertionError("these answers are not parsed")

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        raise AssertionError("these answers are not parsed")


class Writer(DeltaWriter, Protocol):
    """One instance per job."""

    limit_names: dict[str, str]
    """Internal field names to the dialect's, for errors about the engine's limits."""

    def preamble(self, choices: list[Choice]) -> bytes:
        """Frames before the first text of a stream."""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """The constant bytes before and after the escaped text of a frame that carries nothing else (fast path)."""

    def finish_frame(self, choice: Choice) -> bytes: ...

    def end_frames(self, usage: Usage) -> bytes:
        """Frames that close a stream that succeeded."""

    def error_frames(self, error: MillraceError) -> bytes:
        """Frames that close a stream that failed after it had begun."""

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
