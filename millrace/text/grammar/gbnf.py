"""GBNF, the notation of llama.cpp's grammars, as Lark."""

from __future__ import annotations

import re

from millrace.text.grammar.compiler import GrammarError

MAX_CHARS = 32 * 1024
"""The conversion is Python and holds up other threads."""
_ESCAPES = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def looks_like_gbnf(text: str) -> bool:
    """True for `name ::= …`, false for Lark's `name: …`."""
    return re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is not None


def lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MAX_CHARS:
        raise GrammarError(f"The GBNF grammar has {len(text)} characters; at most {MAX_CHARS} are allowed. Use Lark.")
    try:
        return gbnf_to_lark(_ESCAPES.sub(_unescaped, text))
    except RecursionError:
        raise GrammarError("The GBNF grammar is nested too deeply; send fewer levels.") from None
    except Exception as error:  # The converter raises plain exceptions.
        raise GrammarError(f"The GBNF grammar cannot be read: {' '.join(str(error).split())[:300]}.") from None


def _unescaped(found: re.Match[str]) -> str:
    """The character itself, which the converter passes on, unless it has a meaning in the notation."""
    code = int(found[1] or found[2] or "0", 16)
    is_plain = code <= 0x10FFFF and chr(code).isprintable() and chr(code) not in '"\\[]^-/'
    return chr(code) if is_plain else found[0]
