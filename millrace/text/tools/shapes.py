"""Ways of writing a call with markers around its name and its arguments, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = re.compile("<[^<>]+>")


@dataclass(frozen=True, slots=True)
class HeadedShape:
    """A head with the name, then the arguments as one JSON object: DeepSeek, Kimi."""

    begin: str
    """Begins the head of each call."""
    before_name: str
    """What is written between `begin` and the name."""
    after_name: str
    """What is written between the name and the arguments. `{index}` is the number of the call."""
    after_arguments: str
    """What is written between the arguments and `end`."""
    end: str
    head: str
    """Regular expression of a whole head as models write it: its groups are the call's id, if it has one, and name."""
    in_head: tuple[str, ...] = ()
    """Text in heads that may be a token of its own."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Text that may be a token of its own."""
        return *self.in_head, self.begin, self.end


@dataclass(frozen=True, slots=True)
class QuotedShape:
    """`call:NAME{key:value}` with strings between markers: FunctionGemma, Gemma 4."""

    quote: str
    """Before and after a string."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Text that may be a token of its own."""
        return (self.quote,)


@dataclass(frozen=True, slots=True)
class TaggedShape:
    """A tag with the name, then one tag for each argument: Qwen3-Coder, GLM, MiniMax."""

    call_open: str
    """Before the name. Empty: the name follows the opening."""
    name_end: str
    key_open: str
    key_end: str
    """Between an argument's name and its value. Space in it is optional where models write it."""
    value_end: str
    call_end: str
    newline: str = ""
    """What is written around each value, and not part of it."""
    key_attribute: str = ""
    """A further attribute that may follow an argument's name: a regular expression."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Text that may be a token of its own."""
        parts = (self.call_open, self.name_end, self.key_open, self.key_end, self.value_end, self.call_end)
        return tuple(tag for part in parts for tag in _TAG.findall(part))
