"""What reads the calls after their opening, one character at a time; each way of writing calls has a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod

from millrace.text.answer_events import AnswerEvent, CallArguments, CallEnd, CallStart, ToolCall


class CallBody(ABC):
    """The text from an opening to the end of its calls.

    A call is reported as soon as its name is certain. Text that turns out to be no call stays in `pending`; after a
    call it may begin the closing marker.
    """

    def __init__(self) -> None:
        self.events: list[AnswerEvent] = []
        """Not yet taken by the parser."""
        self.pending = ""
        """Text that belongs to no event so far."""
        self.is_over = False
        """True if the next character does not belong to the body. `pending` is then text, unless it is empty."""
        self._call: ToolCall | None = None

    @abstractmethod
    def feed(self, char: str) -> bool:
        """Take the next character. False if it does not belong to the body, which is then over."""

    @property
    def is_writing(self) -> bool:
        """True while a call has begun and is not complete."""
        return self._call is not None

    def take_events(self) -> list[AnswerEvent]:
        taken, self.events = self.events, []
        return taken

    def break_off(self) -> None:
        """The text ends here, or cannot go on as a call."""
        self.is_over = True
        if self._call is not None:
            self._end_call(is_complete=False)

    def cut(self) -> None:
        """The token limit ends the text here: what is not yet a call is none, and no text either."""
        self.break_off()
        self.pending = ""

    # -- for subclasses ----------------------------------------------------------------------------------------------
    def _start_call(self, name: str, call_id: str = "") -> None:
        self._call = ToolCall(name, id=call_id)
        self.pending = ""
        self.events.append(CallStart(self._call))

    def _add_arguments(self, text: str) -> None:
        assert self._call is not None
        self._call.parts.append(text)
        last = self.events[-1] if self.events else None
        if isinstance(last, CallArguments) and last.call is self._call:
            self.events[-1] = CallArguments(self._call, last.text + text)
        else:
            self.events.append(CallArguments(self._call, text))

    def _end_call(self, *, is_complete: bool) -> None:
        assert self._call is not None
        self._call.is_complete = is_complete
        self.events.append(CallEnd(self._call))
        self._call = None

    def _whole_call(self, name: str, arguments: str) -> None:
        self._start_call(name)
        self._add_arguments(arguments)
        self._end_call(is_complete=True)

    def _cut_call(self, name: str) -> None:
        """A call of which only the name is certain."""
        self._start_call(name)
        self._end_call(is_complete=False)

    def _refuse(self) -> bool:
        self.break_off()
        return False
