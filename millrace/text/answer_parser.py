"""Turns the streamed text of one answer into events: reasoning first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.text.answer_events import AnswerEvent, ReasoningSaid, TextSaid
from millrace.text.harmony import HarmonyParser
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.reasoning.splitter import ReasoningSplitter
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.formats import HARMONY_MARKERS, Function, ToolFormat
from millrace.text.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What to look for in an answer."""

    tool_format: ToolFormat | None = None
    """None: calls are not looked for."""
    functions: Sequence[Function] = ()
    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False
    """The prompt has already opened the reasoning."""
    is_forced: bool = False
    """The answer consists of calls."""
    max_calls: int | None = None
    """Further calls are not looked for; None: no limit."""

    @property
    def markers(self) -> list[str]:
        """Text that must be seen even where special tokens are hidden."""
        tool, reasoning = self.tool_format, self.reasoning
        found = [] if tool is None else list(tool.markers)
        found += [] if reasoning is None else [reasoning.start, reasoning.end, reasoning.special]
        return [*found, *(HARMONY_MARKERS if self.has_channels else ())]

    @property
    def has_channels(self) -> bool:
        """True if the answer consists of messages on channels, as in Harmony."""
        tool, reasoning = self.tool_format, self.reasoning
        return (tool is not None and tool.body == "harmony") or (reasoning is not None and reasoning.name == "harmony")


def marker_ids(tokenizer: Tokenizer, form: AnswerForm | None) -> dict[int, str]:
    """Special tokens that begin or end reasoning and tool calls, with their text."""
    ids = {} if form is None else {tokenizer.token_id(marker): marker for marker in form.markers if marker}
    return {token_id: marker for token_id, marker in ids.items() if token_id is not None}


class AnswerReading(Protocol):
    @property
    def is_reasoning(self) -> bool:
        """True while the text belongs to the reasoning."""

    def push(self, text: str) -> list[AnswerEvent]:
        """What this text adds to the answer."""

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """The rest, at the end of the answer. `is_cut`: the token limit ended it, so a part of a call is no text."""


def answer_parser(form: AnswerForm) -> AnswerReading:
    if form.has_channels:
        return HarmonyParser(shows_reasoning=form.reasoning is not None, reads_calls=form.tool_format is not None)
    return AnswerParser(form)


class AnswerParser:
    """Answers whose reasoning and calls are spans of one text."""

    def __init__(self, form: AnswerForm) -> None:
        reasoning = form.reasoning
        is_open = form.is_reasoning_open or (reasoning is not None and reasoning.is_open)
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning, is_open=is_open)
        self._tools = None
        if form.tool_format is not None:
            self._tools = ToolParser(form.tool_format, form.functions, is_forced=form.is_forced)

    @property
    def is_reasoning(self) -> bool:
        """True while the text belongs to the reasoning."""
        return self._splitter is not None and self._splitter.is_reasoning

    def push(self, text: str) -> list[AnswerEvent]:
        return self._parse(self._splitter.push(text) if self._splitter is not None else [TextSaid(text)])

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        events = self._parse(self._splitter.finish()) if self._splitter is not None else []
        return events + (self._tools.finish(is_cut=is_cut) if self._tools is not None else [])

    def _parse(self, pieces: Sequence[ReasoningSaid | TextSaid]) -> list[AnswerEvent]:
        if self._tools is None:
            return [piece for piece in pieces if piece.text]
        events: list[AnswerEvent] = []
        for piece in pieces:
            if isinstance(piece, ReasoningSaid):
                events.append(piece)
            else:
                events += self._tools.push(piece.text)
        return events
