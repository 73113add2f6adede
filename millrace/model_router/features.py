"""Cheap facts about a request from which its difficulty is guessed: microseconds per request, no tokenizer."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_CHARS = 20_000
"""Text beyond this is counted but not read."""
NUM_BUCKETS = 128
"""Words are hashed into this many columns."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_CODE = re.compile(r"```|\bdef \w+\(|\bclass \w+|#include|;\s*\n|=>|\bSELECT\b.+\bFROM\b")
_MATHS = re.compile(r"[=+*/^<>∑∫√≤≥]|\\frac|\\sum|\b\d+(?:\.\d+)?\s*[-+*/%]\s*\d")
_STEPS = re.compile(
    r"\b(prove|derive|step by step|analy[sz]e|compare|explain why|optimi[sz]e|design|debug|refactor)\b", re.I
)
_EASY = re.compile(r"\b(hi|hello|thanks|translate|summari[sz]e|rewrite|spell|capital of|what is|who is|when)\b", re.I)
NAMES = (
    *("log_chars", "log_last_chars", "turns", "log_system_chars", "lines", "digit_share", "foreign_share"),
    *("code", "maths", "asks_for_steps", "asks_for_little", "question_marks", "tools", "schema", "log_max_tokens"),
)
NUM_FEATURES = len(NAMES) + NUM_BUCKETS


def name_of(index: int) -> str:
    return NAMES[index] if index < len(NAMES) else f"words in bucket {index - len(NAMES)}"


def features_of(request: Mapping[str, Any]) -> Floats:
    """The columns of a request body in OpenAI's, Anthropic's or Ollama's form; what is missing counts as empty."""
    turns = _turns(request)
    spoken = [text for role, text in turns if role != "system"]
    last, whole = (spoken[-1] if spoken else "")[:MAX_CHARS], "\n".join(spoken)
    read = whole[-MAX_CHARS:]
    length = max(1, len(read))
    system = sum(len(text) for role, text in turns if role == "system") + len(_text(request.get("system")))
    limit = request.get("max_tokens") or request.get("max_completion_tokens") or request.get("max_output_tokens") or 0
    has_schema = any(request.get(name) for name in ("response_format", "format", "structured_outputs", "text"))
    found = [
        math.log1p(len(whole)),
        math.log1p(len(last)),
        float(min(len(spoken), 50)),
        math.log1p(system),
        math.log1p(read.count("\n")),
        sum(letter.isdigit() for letter in read) / length,
        sum(not letter.isascii() for letter in read) / length,
        math.log1p(len(_CODE.findall(read))),
        math.log1p(len(_MATHS.findall(read))),
        math.log1p(len(_STEPS.findall(last))),
        math.log1p(len(_EASY.findall(last))),
        math.log1p(last.count("?")),
        math.log1p(len(request.get("tools") or ())),
        float(has_schema),
        math.log1p(limit if isinstance(limit, int) and limit > 0 else 0),
    ]
    buckets = np.zeros(NUM_BUCKETS)
    for word in _WORD.findall(last.lower()):
        buckets[zlib.crc32(word.encode()) % NUM_BUCKETS] = 1.0
    return np.concatenate((np.array(found), buckets))


def _turns(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    given = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if not isinstance(given, list):
        return [("user", _text(given))]
    return [
        (str(one.get("role", "user")), _text(one.get("content"))) if isinstance(one, dict) else ("user", _text(one))
        for one in given
    ]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return ""
