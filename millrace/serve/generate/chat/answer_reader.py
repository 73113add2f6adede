"""Reads reasoning and tool calls of one choice: gives calls their ids, counts reasoning tokens, limits calls."""

from __future__ import annotations

from collections.abc import Callable

from millrace.serve.http.ids import new_id
from millrace.text.answer_events import AnswerEvent, CallEnd, CallStart, ToolCall
from millrace.text.answer_parser import AnswerForm, answer_parser

SHORT_ID_CHARS = 9


class AnswerReader:
    def __init__(self, form: AnswerForm, make_id: Callable[[str, int], str] = lambda prefix, _: new_id(prefix)) -> None:
        """`make_id`: the id of a call, from a prefix and its number."""
        self._form = form
        self._make_id = make_id
        self._parser = answer_parser(form)
        self.calls: list[ToolCall] = []
        self.num_reasoning_tokens = 0
        self.is_full = False
        """True once the answer has as many calls as it may have; nothing after them belongs to it."""

    def count_token(self) -> None:
        """Call it for each token, before its text is read."""
        self.num_reasoning_tokens += self._parser.is_reasoning

    def read(self, text: str) -> list[AnswerEvent]:
        return self._keep(self._parser.push(text)) if text and not self.is_full else []

    def finish(self, *, is_cut: bool) -> list[AnswerEvent]:
        """`is_cut`: the token limit ended the answer."""
        return [] if self.is_full else self._keep(self._parser.finish(is_cut=is_cut))

    @property
    def has_called(self) -> bool:
        """True if the answer consists of calls that are all complete."""
        return bool(self.calls) and all(call.is_complete for call in self.calls)

    def _keep(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        for place, event in enumerate(events):
            if isinstance(event, CallStart):
                is_new = bool(event.call.id) and all(call.id != event.call.id for call in self.calls)
                event.call.index, event.call.id = len(self.calls), event.call.id if is_new else self._new_id()
                self.calls.append(event.call)
            elif isinstance(event, CallEnd) and len(self.calls) == self._form.max_calls:
                self.is_full = True
                return events[: place + 1]
        return events

    def _new_id(self) -> str:
        spec, made = self._form.tool_format, self._make_id("call_", len(self.calls))
        return made[-SHORT_ID_CHARS:] if spec is not None and spec.short_ids else made
