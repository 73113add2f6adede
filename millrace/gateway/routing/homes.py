"""Which replica holds what is stored: files, batches, responses, conversations, sessions."""

from __future__ import annotations

import re
from collections import OrderedDict

MAX_HOMES = 65_536
NAMED = frozenset({"sessions", "cache"})
"""Rooms whose ids clients may choose: each tenant has its own."""
_STORED = re.compile(
    r"/v1/(responses|chat/completions|conversations|files|batches|requests|sessions|cache)/([^/]+)(?:/.*)?"
)
_FIXED = frozenset({"input_tokens", "compact", "import"})
_KINDS = (
    ("file", "files"),
    ("batch", "batches"),
    ("conv", "conversations"),
    ("resp", "responses"),
    ("chatcmpl", "chat/completions"),
)
"""First letters of ids, and where what they name is found."""


class Homes:
    """A cache of what can be asked."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()

    def get(self, who: str, stored: str) -> str:
        return self._homes.get(_key(who, stored), "")

    def put(self, who: str, stored: str, replica: str) -> None:
        key = _key(who, stored)
        self._homes[key] = replica
        self._homes.move_to_end(key)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


def _key(who: str, stored: str) -> str:
    room, _, name = stored.rpartition("/")
    return f"{who}\0{stored}" if room in NAMED else name


def stored_at(path: str) -> str:
    """`ROOM/ID` of what the path names; empty if it names nothing stored."""
    found = _STORED.fullmatch(path)
    return "" if found is None or found[2] in _FIXED else f"{found[1]}/{found[2]}"


def stored_as(path: str, stored_id: str) -> str:
    """The same for what an answer of `path` has created, or shows."""
    room = path.removeprefix("/v1/").partition("/")[0]
    if room not in NAMED:
        room = next((room for prefix, room in _KINDS if stored_id.startswith(prefix)), "requests")
    return f"{room}/{stored_id}"
