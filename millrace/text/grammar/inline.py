"""JSON schemas: what is checked before llguidance reads them, and their spelling inside a Lark grammar."""

from __future__ import annotations

import json
import re

import msgspec

from millrace.text.grammar.compiler import GrammarError

OPTIONS_KEY = "x-guidance"
"""llguidance's options inside a schema. A client may not set them: some of them ignore parts of the schema."""
ITEM_SEPARATOR, KEY_SEPARATOR = ", ", ": "
"""One fixed spelling of JSON: where whitespace is free, a small model may write it without end."""
FIXED_SPELLING: dict[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ITEM_SEPARATOR,
    "key_separator": KEY_SEPARATOR,
}
_INLINE = re.compile(r"%json\s*(?=\{)")


def inline_schema(schema: str) -> str:
    """The schema as a part of a Lark rule, which matches JSON in the fixed spelling."""
    check_schema(schema)
    return "%json " + json.dumps({**json.loads(schema), OPTIONS_KEY: FIXED_SPELLING})


def check_schema(schema: str) -> None:
    try:
        fields = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise GrammarError('The schema is not a JSON object; send one, such as {"type": "object"}.') from None
    if OPTIONS_KEY in fields:
        raise GrammarError(f"The schema contains {OPTIONS_KEY!r}, which is not supported; remove it.")


def check_inline(lark: str) -> None:
    """Check the schemas inside a Lark grammar as `check_schema` does. `inline_schema` may have written them."""
    decoder = json.JSONDecoder()
    for found in _INLINE.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance reads it too, and says what is wrong.
        if schema.get(OPTIONS_KEY) == FIXED_SPELLING:
            del schema[OPTIONS_KEY]
        check_schema(json.dumps(schema))
