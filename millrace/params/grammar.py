"""What an answer must conform to: a grammar, a limit on reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millrace.errors import BadRequest

MAX_GRAMMAR_BYTES = 128 * 1024


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


_GRAMMAR_NOUNS: dict[GrammarKind, str] = {
    "json_object": "schema",
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "grammar",
    "gbnf": "grammar",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must conform to."""

    kind: GrammarKind
    source: str = ""
    """By kind: nothing; the schema as JSON text, whose order of properties is that of the answer; a regular expression
    that matches the whole answer; a JSON array of strings; a grammar in Lark or in GBNF notation."""
    after: str = ""
    """What stands before the part that the grammar governs, such as reasoning: rules in Lark notation, of which the
    first is called `before`. Empty: nothing."""
    whitespace: str = ""
    """JSON only: a regular expression for the whitespace that may stand between two JSON tokens. Empty: one space after
    each comma and colon, none elsewhere."""

    def __post_init__(self) -> None:
        num_bytes = sum(
            len(text.encode("utf-8", "surrogatepass")) for text in (self.source, self.after, self.whitespace)
        )
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise BadRequest(
                f"The {self.noun} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed. Send a smaller one.",
                param="grammar",
            )

    @property
    def noun(self) -> str:
        """What a message to the client calls it."""
        return _GRAMMAR_NOUNS[self.kind]


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """After `max_tokens` tokens of reasoning, the token that ends the reasoning is forced."""

    max_tokens: int
    start_id: int
    end_id: int
    is_open: bool
    """The prompt has already begun the reasoning."""
