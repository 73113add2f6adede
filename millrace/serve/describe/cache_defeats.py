"""What keeps prompts from being found in the prefix cache, told from the text where a prompt diverged.

Only the request's own text is read, never what the cache holds.
"""

from __future__ import annotations

import re
from typing import Literal

Defeat = Literal["reordered", "time", "identifier", "number", "tools"]

ADVICE: dict[Defeat, str] = {
    "reordered": "The same text follows later in this prompt: its parts, such as tools or documents, were sent in"
    " another order. Keep one order.",
    "time": "A date or time stands there. Put it at the end of the prompt, or leave it out.",
    "identifier": "A random identifier stands there. Put it at the end of the prompt, or leave it out.",
    "number": "A number that changes stands there. Put what changes at the end of the prompt.",
    "tools": "It is inside the definitions of tools: they were changed or reordered. Keep them as they are.",
}
_PATTERNS: tuple[tuple[Defeat, re.Pattern[str]], ...] = (
    (
        "time",
        re.compile(
            r"\d{4}-\d\d?-\d\d?|\d\d?:\d\d(:\d\d)?|\d\d?[./]\d\d?[./]\d{2,4}"
            r"|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d"
            r"|\b(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)day\b"
            r"|\b1[6-9]\d{8}(\d{3})?\b"
        ),
    ),
    ("identifier", re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{4,}|\b(?=\w*\d)(?=\w*[a-zA-Z])\w{12,}\b")),
    ("number", re.compile(r"\d+")),
)
_TOOL = re.compile(r'"(function|parameters|properties|input_schema)"\s*:')


def defeat_of(text: str, at: int, *, is_reordered: bool = False) -> Defeat | None:
    """What stands at position `at` of the text, where the prompt differs from a cached one."""
    if is_reordered:
        return "reordered"
    for kind, pattern in _PATTERNS:
        if any(found.start() <= at <= found.end() for found in pattern.finditer(text)):
            return kind
    return "tools" if _TOOL.search(text) else None
