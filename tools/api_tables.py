"""Writes the parameter tables of docs/api.md from the request schemas: `python tools/api_tables.py`.

Replaces the text between each pair of markers; the rest of the page is written by hand. `--check` only compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from millrace.serve.describe.openapi import openapi_document

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_MARKED = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema and "type" not in schema:
        kinds = {type(value) for value in schema["enum"]}
        return "word" if kinds == {str} else "integer" if kinds <= {int, type(None)} and int in kinds else "–"
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_kind(one) for one in schema.get("anyOf", schema.get("oneOf"))]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind not in ("null", "–"))) or "text"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{_kind(schema.get('items', {}))}]"
    return {"string": "text", "boolean": "bool"}.get(kind, str(kind))


MAX_SHOWN = 2**31 - 1
"""Limits from here on only say that the number fits into an integer type."""


def _limits(schema: dict[str, Any]) -> str:
    low = f"≥ {schema['minimum']}" if schema.get("minimum", -MAX_SHOWN) > -MAX_SHOWN else ""
    low = f"> {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else low
    high = f"≤ {schema['maximum']}" if schema.get("maximum", MAX_SHOWN) < MAX_SHOWN else ""
    most = f"at most {schema['maxItems']} entries" if "maxItems" in schema else ""
    return ", ".join(part for part in (low, high, most) if part)


def _what(schema: dict[str, Any]) -> str:
    text = str(schema.get("description", "")).replace("|", "\\|")
    return f"**Refused by name.** {text}" if text.startswith("Not supported yet") else text


def table(name: str) -> str:
    schema = json.loads(openapi_document())["components"]["schemas"][name]
    rows = ["| parameter | type | what happens |", "| --- | --- | --- |"]
    needed = schema.get("required", ())
    for field, inner in sorted(schema["properties"].items(), key=lambda item: item[0] not in needed):
        required = " (required)" if field in needed else ""
        limits = _limits(inner)
        kind = _kind(inner) + (f", {limits}" if limits else "")
        rows.append(f"| `{field}`{required} | {kind} | {_what(inner)} |")
    return "\n".join(rows) + "\n"


def written(text: str) -> str:
    return _MARKED.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = written(text)
    if "--check" in sys.argv:
        if new != text:
            print("docs/api.md is out of date. Run: python tools/api_tables.py")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
