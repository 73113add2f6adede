"""Answers in Harmony, gpt-oss's format: messages on channels, of which some are reasoning and some are calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from typing import Literal

from millrace.text.answer_events import AnswerEvent, ReasoningSaid, TextSaid
from millrace.text.tools.call_body import CallBody
from millrace.text.tools.formats import HARMONY_MARKERS
from millrace.text.tools.json_scanner import JsonScanner

_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""What ends a message; the last two begin the head of the next one."""
_SPACE = " \t\n\r"
_MAX_HEAD_CHARS = 1024

_Kind = Literal["text", "reasoning", "call"]


class _Arguments(CallBody):
    """The JSON of one call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._scanner = JsonScanner()
        self._start_call(name)

    def feed(self, char: str) -> bool:
        if self._call is None:
            return char in _SPACE
        if not self._scanner.depth and char in _SPACE:
            return True
        shown = self._scanner.escaped(char)
        is_object = self._scanner.depth > 0 or char == "{"
        if not is_object or not self._scanner.feed(char):
            return self._refuse()
        self._add_arguments(shown)
        if self._scanner.is_done:
            self._end_call(is_complete=True)
        return True

    def end(self) -> None:
        """The message ends. A call without text has no arguments."""
        if self._call is not None and not self._call.parts:
            self._add_arguments("{}")
            self._end_call(is_complete=True)
        self.break_off()


class HarmonyParser:
    def __init__(self, *, shows_reasoning: bool, reads_calls: bool) -> None:
        """Without these, reasoning and calls are text."""
        self._shows_reasoning = shows_reasoning
        self._reads_calls = reads_calls
        self._held = ""
        self._head: str | None = ""
        """The head that is being read; None inside a message."""
        self._kind: _Kind = "text"
        self._body: _Arguments | None = None
        self._needs_break = {"text": False, "reasoning": False}
        """True if something was said on this kind of channel: the next message begins with a line break."""
        self._events: list[AnswerEvent] = []

    @property
    def is_reasoning(self) -> bool:
        return self._head is None and self._kind == "reasoning"

    def push(self, text: str) -> list[AnswerEvent]:
        self._held += text
        self._read(at_end=False)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        if is_cut and self._held and _num_held(self._held) == len(self._held):
            self._held = ""
        self._read(at_end=True)
        if self._head is not None and not _CHANNEL.search(self._head):
            rest = self._head.removeprefix("<|start|>assistant")
            self._head = None
            self._say("" if is_cut else rest)
        if is_cut and self._body is not None:
            self._body.break_off()
        self._end_message()
        return self._take()

    def _read(self, *, at_end: bool) -> None:
        while self._held:
            markers = (_MESSAGE,) if self._head is not None else _ENDS
            at, marker = min(((self._held.find(one), one) for one in markers if one in self._held), default=(-1, ""))
            if marker:
                before, self._held = self._held[:at], self._held[at + len(marker) :]
            else:
                keep = 0 if at_end else _num_held(self._held)
                before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if self._head is not None:
                self._read_head(before, is_whole=bool(marker))
                if self._head is None:
                    continue
            else:
                self._say(before)
                if marker:
                    self._end_message()
                    self._head = marker if marker in ("<|start|>", "<|channel|>") else ""
            if not marker:
                return

    def _read_head(self, text: str, *, is_whole: bool) -> None:
        assert self._head is not None
        self._head += text
        if len(self._head) > _MAX_HEAD_CHARS or not _may_be_head(self._head):
            self._read_as_text(f"{self._head}{_MESSAGE if is_whole else ''}")
        elif is_whole:
            self._begin_message(self._head)

    def _read_as_text(self, head: str) -> None:
        """No head: an answer without channels. Its first marker is said at once, or it would begin a head again."""
        self._head, self._kind = None, "text"
        first = next((one for one in _ENDS if head.startswith(one)), "")
        self._say(first)
        self._held = head.removeprefix(first) + self._held

    def _begin_message(self, head: str) -> None:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._head, self._kind = None, "text"
        if recipient is not None and self._reads_calls:
            self._kind, self._body = "call", _Arguments(recipient[1])
            self._collect()
        elif channel is not None and channel[1] == "analysis" and self._shows_reasoning:
            self._kind = "reasoning"
        if self._kind != "call" and self._needs_break[self._kind]:
            self._emit("\n")

    def _say(self, text: str) -> None:
        if self._body is None:
            if text:
                self._emit(text)
            return
        for place, char in enumerate(text):
            if not self._body.feed(char):
                self._end_message()
                self._kind = "text"
                self._emit(text[place:])
                return
        self._collect()

    def _emit(self, text: str) -> None:
        self._needs_break[self._kind] = True
        self._events.append(ReasoningSaid(text) if self._kind == "reasoning" else TextSaid(text))

    def _end_message(self) -> None:
        if self._body is not None:
            self._body.end()
            self._collect()
            self._body = None

    def _collect(self) -> None:
        assert self._body is not None
        self._events += self._body.take_events()

    def _take(self) -> list[AnswerEvent]:
        taken, self._events = self._events, []
        return taken


def _may_be_head(text: str) -> bool:
    """True for the beginning of a head, which starts with a marker or, after the role, with a recipient."""
    text = text.lstrip(_SPACE)
    return any(one.startswith(text) or text.startswith(one) for one in ("<|channel|>", "<|start|>", "to=functions."))


def _num_held(text: str) -> int:
    """Length of the longest end of the text with which a marker may begin."""
    longest = max(map(len, HARMONY_MARKERS))
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in HARMONY_MARKERS):
            return size
    return 0
