"""Finds tool calls in streamed text. What comes out does not depend on how the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.text.answer_events import AnswerEvent, TextSaid
from millrace.text.tools.call_body import CallBody
from millrace.text.tools.formats import Function, ToolFormat, names_of
from millrace.text.tools.json_calls import JsonCalls, NamedCalls
from millrace.text.tools.python_calls import PythonCalls

_SPACE = " \t\n\r"


class ToolParser:
    """One answer. Text is passed on unless an opening may begin in it; space before and after calls is dropped.

    Text that begins like a call and turns out to be none comes out as text. If a call breaks off after its name was
    reported, it ends incomplete, and what follows is text.
    """

    def __init__(self, spec: ToolFormat, functions: Sequence[Function]) -> None:
        self._format = spec
        self._functions = functions
        self._held = ""
        """Text that may still become an opening, or space before one."""
        self._is_start = True
        """True while the answer consists of space."""
        self._body: CallBody | None = None
        self._opening = ""
        """The text of the opening, until the first call after it."""
        self._closing = ""
        """Text after the calls that may still become the closing marker."""
        self._awaits_close = False
        self._had_calls = False
        self._events: list[AnswerEvent] = []

    def push(self, text: str) -> list[AnswerEvent]:
        """What this text adds to the answer."""
        rest = text
        while rest:
            if self._body is not None:
                rest = self._read_body(rest)
            elif self._awaits_close:
                rest = self._read_close(rest)
            else:
                rest = self._read_text(rest)
        return self._take()

    def finish(self) -> list[AnswerEvent]:
        """The rest, at the end of the answer."""
        if self._body is not None:
            self._body.break_off()
            self._end_body()
        if self._awaits_close:
            self._awaits_close = False
            self._say("" if self._format.close.startswith(self._closing.strip()) else self._closing)
        held, self._held = self._held, ""
        if not (self._had_calls and not held.strip()):
            self._say(held)
        return self._take()

    # -- text ----------------------------------------------------------------------------------------------------------
    def _read_text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._is_start and self._format.bare:
            stripped = text.lstrip(_SPACE)
            if not stripped:
                self._held = text
                return ""
            if stripped[0] in self._format.bare:
                self._begin_body(text[: len(text) - len(stripped)], is_bare=True)
                return stripped
        at, opening = _first(text, self._format.openings)
        if opening:
            before = text[:at].rstrip(_SPACE)
            self._say(before)
            self._begin_body(text[len(before) : at] + opening, is_bare=False)
            return text[at + len(opening) :]
        keep = _num_held(text, self._format.openings)
        said = text[: len(text) - keep].rstrip(_SPACE)
        self._held = text[len(said) :]
        self._say(said)
        return ""

    def _say(self, text: str) -> None:
        if not text:
            return
        self._is_start = False
        last = self._events[-1] if self._events else None
        if isinstance(last, TextSaid):
            self._events[-1] = TextSaid(last.text + text)
        else:
            self._events.append(TextSaid(text))

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _begin_body(self, opening: str, *, is_bare: bool) -> None:
        """A call without an opening must name a function that exists, since it may be an ordinary answer."""
        self._is_start = False
        self._opening = opening
        names = names_of(self._functions) if is_bare else None
        if self._format.body == "python":
            parameters = {function.name: function.parameter_names() for function in self._functions}
            self._body = PythonCalls(parameters, needs_list=is_bare, any_name=not is_bare)
        elif self._format.body == "named":
            self._body = NamedCalls(names)
        else:
            self._body = JsonCalls(names)

    def _read_body(self, text: str) -> str:
        body = self._body
        assert body is not None
        for place, char in enumerate(text):
            if not body.feed(char):
                self._end_body()
                return text[place:]
            if body.is_over:
                self._end_body()
                return text[place + 1 :]
        self._collect(body)
        return ""

    def _collect(self, body: CallBody) -> None:
        events = body.take_events()
        if events:
            self._had_calls, self._opening = True, ""
            self._events += events

    def _end_body(self) -> None:
        body = self._body
        assert body is not None
        self._body = None
        self._collect(body)
        has_calls = not self._opening
        self._say(self._opening + body.pending)
        self._opening = ""
        self._awaits_close = has_calls and not body.pending and bool(self._format.close)
        self._closing = ""

    def _read_close(self, text: str) -> str:
        """The closing marker, after space; if something else follows, it is text."""
        for place, char in enumerate(text):
            self._closing += char
            marker = self._closing.lstrip(_SPACE)
            if marker == self._format.close:
                self._awaits_close = False
                return text[place + 1 :]
            if not self._format.close.startswith(marker):
                self._awaits_close = False
                return self._closing + text[place + 1 :]
        return ""

    def _take(self) -> list[AnswerEvent]:
        taken, self._events = self._events, []
        return taken


def _first(text: str, openings: Sequence[str]) -> tuple[int, str]:
    """The earliest opening, and the longest of those at the same place."""
    best = (len(text), "")
    for opening in openings:
        at = text.find(opening)
        if at >= 0 and (at < best[0] or (at == best[0] and len(opening) > len(best[1]))):
            best = (at, opening)
    return best


def _num_held(text: str, openings: Sequence[str]) -> int:
    """Length of the longest end of the text with which an opening may begin."""
    longest = max((len(opening) for opening in openings), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(opening.startswith(end) for opening in openings):
            return size
    return 0
