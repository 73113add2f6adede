"""Shows Markdown while it streams: wraps between words, marks headings, bold text, code and lists.

A word is held back until its end is known, so no word is broken and no marker is half shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

BOLD, UNDERLINE, CYAN, DIM, PLAIN = "\033[1m", "\033[4m", "\033[36m", "\033[2m", "\033[0m"
_MARKERS = re.compile(r"(\*\*|__|`)")
_FENCE = re.compile(r"(```|~~~)")
_LIST_ITEM = re.compile(r"[-*+]|\d{1,3}[.)]")
_HEADING = re.compile(r"#{1,6}")


class MarkdownStream:
    """`feed` takes text as it comes; `finish` shows what is held back and ends the line."""

    def __init__(self, write: Callable[[str], object], width: int, *, colour: bool) -> None:
        self._write = write
        self._width = max(width, 20)
        self._colour = colour
        self._word = ""
        self._column = 0
        self._at_line_start = True
        self._indent = 0
        """Columns of a list item's continuation lines."""
        self._in_fence = self._in_bold = self._in_code = self._in_heading = False
        self._spaces = ""
        """Spaces that are shown before the next word, or dropped where a line is wrapped."""

    def feed(self, text: str) -> None:
        for char in text:
            if char == "\n":
                self._end_word()
                self._new_line()
            elif char in " \t":
                self._end_word()
                if self._column or not self._in_heading:
                    self._spaces += char
            else:
                self._word += char
                if _columns(self._word) >= self._width or _is_wide(char):  # No spaces between words of some languages.
                    self._end_word()

    def finish(self) -> None:
        self._end_word()
        if self._column:
            self._new_line()

    def _new_line(self) -> None:
        self._in_heading = self._in_bold = False
        if not self._in_fence:
            self._in_code = False
        self._write((PLAIN if self._colour else "") + "\n")
        self._column, self._at_line_start, self._indent, self._spaces = 0, True, 0, ""

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        is_first, self._at_line_start = self._at_line_start, False
        if is_first and _FENCE.match(word):
            self._in_fence = not self._in_fence
            self._show(word, DIM)
        elif self._in_fence:
            self._show(word, CYAN)
        elif is_first and _HEADING.fullmatch(word) and self._colour:
            self._in_heading, self._spaces = True, ""
        else:
            if is_first and _LIST_ITEM.fullmatch(word):
                self._indent = len(self._spaces) + len(word) + 1
            self._show_inline(word)

    def _show_inline(self, word: str) -> None:
        """One word with its markers. Markers are replaced by colours, or kept where there are none."""
        visible = _MARKERS.sub("", word) if self._colour else word
        self._make_room(_columns(visible))
        if not self._colour:
            self._show(word, "")
            return
        for piece in _MARKERS.split(word):
            if piece == "`":
                self._in_code = not self._in_code
            elif piece in ("**", "__") and not self._in_code:
                self._in_bold = not self._in_bold
            elif piece:
                self._show(piece, self._style())

    def _style(self) -> str:
        if self._in_code:
            return CYAN
        return BOLD + UNDERLINE if self._in_heading else BOLD if self._in_bold else ""

    def _make_room(self, columns: int) -> None:
        """Begin a new line if the word does not fit on this one."""
        if self._column and self._column + len(self._spaces) + columns > self._width:
            self._write("\n" + " " * self._indent)
            self._column, self._spaces = self._indent, ""

    def _show(self, text: str, style: str) -> None:
        shown = f"{style}{text}{PLAIN}" if style and self._colour else text
        self._write(self._spaces + shown)
        self._column += len(self._spaces) + _columns(text)
        self._spaces = ""


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 2 if _is_wide(char) else 1 for char in text)
