"""Separates reasoning from the answer in streamed text, however the text is cut into pieces."""

from __future__ import annotations

from millrace.text.answer_events import ReasoningSaid, TextSaid
from millrace.text.reasoning.formats import ReasoningFormat

_SPACE = " \t\n\r"


class ReasoningSplitter:
    """Reasoning comes first, if at all. Space around it is dropped, and so is space before the answer."""

    def __init__(self, spec: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open`: the prompt has already opened the reasoning."""
        self._format = spec
        self._is_open = is_open
        self._held = ""
        self._at_start = True
        """True until the first character of the reasoning, or of the answer."""
        self._is_decided = False
        """True once it is known whether the answer begins with reasoning."""
        self.is_reasoning = is_open
        self._is_over = False

    def push(self, text: str) -> list[ReasoningSaid | TextSaid]:
        if self._is_over and not self._at_start:
            return [TextSaid(text)]
        self._held += text
        said: list[ReasoningSaid | TextSaid] = []
        if not self._is_decided:
            self._decide(at_end=False)
        if self.is_reasoning and self._is_decided:
            self._read_reasoning(said)
        if self._is_over:
            self._read_answer(said)
        return said

    def finish(self) -> list[ReasoningSaid | TextSaid]:
        said: list[ReasoningSaid | TextSaid] = []
        if not self._is_decided:
            self._decide(at_end=True)
        if self.is_reasoning:
            self._read_reasoning(said)
        if self.is_reasoning:
            rest = self._held.rstrip(_SPACE)
            said += [ReasoningSaid(rest)] if rest else []
        elif self._held:
            said.append(TextSaid(self._held))
        self._held = ""
        return said

    def _decide(self, *, at_end: bool) -> None:
        """The start marker, which a model may repeat although the prompt has it."""
        text, start = self._held.lstrip(_SPACE), self._format.start
        if not at_end and start.startswith(text) and text != start:
            return
        self._is_decided = True
        if text.startswith(start):
            self._held = text[len(start) :]
            self.is_reasoning = True
        elif not self._is_open:
            self._is_over, self._at_start = True, False

    def _read_reasoning(self, said: list[ReasoningSaid | TextSaid]) -> None:
        text, end = self._held, self._format.end
        if self._at_start:
            text = text.lstrip(_SPACE)
        at = text.find(end)
        if at >= 0:
            said_text, self._held = text[:at].rstrip(_SPACE), text[at + len(end) :]
            self.is_reasoning, self._is_over, self._at_start = False, True, True
        else:
            said_text = text[: len(text) - _num_held(text, end)].rstrip(_SPACE)
            self._held = text[len(said_text) :]
            self._at_start = self._at_start and not said_text
        if said_text:
            said.append(ReasoningSaid(said_text))

    def _read_answer(self, said: list[ReasoningSaid | TextSaid]) -> None:
        text, self._held = self._held.lstrip(_SPACE) if self._at_start else self._held, ""
        if text:
            self._at_start = False
            said.append(TextSaid(text))


def _num_held(text: str, marker: str) -> int:
    """Length of the longest end of the text with which the marker may begin."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
