"""Turns the streamed text of one answer into events: reasoning first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.text.answer_events import AnswerEvent, ReasoningSaid, TextSaid
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.reasoning.splitter import ReasoningSplitter
from millrace.text.tools.formats import Function, ToolFormat
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
    max_calls: int | None = None
    """Further calls are not looked for; None: no limit."""

    @property
    def markers(self) -> list[str]:
        """Text that must be seen even where special tokens are hidden."""
        tool, reasoning = self.tool_format, self.reasoning
        found = [] if tool is None else [*tool.openings, tool.close, "[ARGS]", "[CALL_ID]"]
        return [*found, *([] if reasoning is None else [reasoning.start, reasoning.end])]


class AnswerParser:
    def __init__(self, form: AnswerForm) -> None:
        reasoning = form.reasoning
        is_open = form.is_reasoning_open or (reasoning is not None and reasoning.is_open)
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning, is_open=is_open)
        self._tools = None if form.tool_format is None else ToolParser(form.tool_format, form.functions)

    @property
    def is_reasoning(self) -> bool:
        """True while the text belongs to the reasoning."""
        return self._splitter is not None and self._splitter.is_reasoning

    def push(self, text: str) -> list[AnswerEvent]:
        return self._parse(self._splitter.push(text) if self._splitter is not None else [TextSaid(text)])

    def finish(self) -> list[AnswerEvent]:
        events = self._parse(self._splitter.finish()) if self._splitter is not None else []
        return events + (self._tools.finish() if self._tools is not None else [])

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
