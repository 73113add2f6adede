"""Finds tool calls in streamed text. What comes out does not depend on how the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.text.answer_events import AnswerEvent, TextSaid
from millrace.text.tools.call_body import CallBody
from millrace.text.tools.formats import Function, ToolFormat, names_of
from millrace.text.tools.headed_calls import HeadedCalls
from millrace.text.tools.json_calls import JsonCalls, NamedCalls
from millrace.text.tools.python_calls import PythonCalls
from millrace.text.tools.quoted_calls import QuotedCalls
from millrace.text.tools.shapes import HeadedShape, QuotedShape, TaggedShape
from millrace.text.tools.tagged_calls import TaggedCalls

_SPACE = " \t\n\r"
_STRAY = "]}"
"""Brackets too many that models write between JSON calls and their closing marker."""


class ToolParser:
    """One answer. Text is passed on unless an opening may begin in it; space before and after calls is dropped.

    Text that begins like a call and turns out to be none comes out as text. If a call breaks off after its name was
    reported, it ends incomplete, and what follows is text.
    """

    def __init__(self, spec: ToolFormat, functions: Sequence[Function], *, is_forced: bool = False) -> None:
        """`is_forced`: the answer consists of calls."""
        self._format = spec
        self._is_forced = is_forced
        self._functions = functions
        self._held = ""
        """Text that may still become an opening, or space before one."""
        self._is_start = True
        """True while the answer consists of space."""
        self._body: CallBody | None = None
        self._is_doubtful = False
        """What may be calls may be an ordinary answer too: it began without an opening, or with one that text has."""
        self._opening = ""
        """The text of the opening, until the first call after it."""
        self._closing = ""
        """Text after the calls that may still become the closing marker."""
        self._awaits_close = False
        self._had_calls = False
        self._events: list[AnswerEvent] = []

    def push(self, text: str) -> list[AnswerEvent]:
        """What this text adds to the answer."""
        self._read(text)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """The rest, at the end of the answer. `is_cut`: the token limit ended it, so a part of a call is no text."""
        if self._body is not None:
            is_call = not self._is_doubtful or (self._had_calls and not self._opening)
            if is_cut and (self._is_forced or is_call):
                self._body.cut()
                self._opening = ""
            else:
                self._body.break_off()
            self._read(self._end_body())
        if self._awaits_close:
            self._awaits_close = False
            self._say("" if self._format.close.startswith(self._closing.strip()) else self._closing)
        held, self._held = self._held, ""
        opens_call = self._is_forced or (self._had_calls and not self._format.opens_text)
        is_syntax = is_cut and opens_call and _may_open(held, self._format)
        if not (self._had_calls and not held.strip()) and not is_syntax:
            self._say(held)
        return self._take()

    def _read(self, text: str) -> None:
        while text:
            if self._body is not None:
                text = self._read_body(text)
            elif self._awaits_close:
                text = self._read_close(text)
            else:
                text = self._read_text(text)

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
        """Where an ordinary answer may begin, a call must name a function that exists."""
        self._is_start = False
        self._is_doubtful = is_bare or self._format.opens_text
        self._opening = opening
        self._body = self._new_body(opening.strip(_SPACE), names_of(self._functions) if self._is_doubtful else None)

    def _new_body(self, opening: str, names: frozenset[str] | None) -> CallBody:
        """`names`: only these are calls; None takes any name."""
        shape = self._format.shape
        if isinstance(shape, HeadedShape):
            return HeadedCalls(shape, names)
        if isinstance(shape, TaggedShape):
            return TaggedCalls(shape, self._functions, is_named=opening == shape.call_open)
        if isinstance(shape, QuotedShape):
            return QuotedCalls(shape, names)
        if self._format.body == "python":
            parameters = {function.name: function.parameter_names() for function in self._functions}
            return PythonCalls(parameters, needs_list=names is not None, any_name=names is None)
        if self._format.body == "named":
            return NamedCalls(names)
        return JsonCalls(names, self._format.name_key)

    def _read_body(self, text: str) -> str:
        body = self._body
        assert body is not None
        for place, char in enumerate(text):
            if not body.feed(char):
                return self._end_body() + text[place:]
            if body.is_over:
                return self._end_body() + text[place + 1 :]
        self._collect(body)
        return ""

    def _collect(self, body: CallBody) -> None:
        events = body.take_events()
        if events:
            self._had_calls, self._opening = True, ""
            self._events += events

    def _end_body(self) -> str:
        """Returns the text that follows the calls. Without any call, all of it is said."""
        body = self._body
        assert body is not None
        self._body = None
        self._collect(body)
        self._closing = ""
        if self._opening:
            self._say(self._opening + body.pending)
            self._opening = ""
            return ""
        self._awaits_close = bool(self._format.close)
        return body.pending

    def _read_close(self, text: str) -> str:
        """The closing marker, after space; if something else follows, it is text."""
        for place, char in enumerate(text):
            self._closing += char
            marker = self._closing.lstrip(_SPACE if self._format.body != "json" else _SPACE + _STRAY)
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


def _may_open(text: str, spec: ToolFormat) -> bool:
    """True if nothing but an opening, or space before one, can begin with the text."""
    return any(opening.startswith(text.strip(_SPACE)) for opening in spec.openings)


def _num_held(text: str, openings: Sequence[str]) -> int:
    """Length of the longest end of the text with which an opening may begin."""
    longest = max((len(opening) for opening in openings), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(opening.startswith(end) for opening in openings):
            return size
    return 0
