"""Writes the generated parts of the documentation: `python tools/api_tables.py`.

The tables of fields come from the request schemas, the reference of the Python API from signatures and docstrings. Only
the text between a pair of markers is replaced; the rest of a page is written by hand. `--check` only compares.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import millrace
from millrace.serve.describe.openapi.document import openapi_document
from millrace.serve.generate.choosing.sampler_fields import SamplerFields

DOCS = Path(__file__).parents[1] / "docs"
_MARKED = re.compile(r"(<!-- (fields|members) of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SAMPLERS = SamplerFields.__struct_fields__
"""Fields of every dialect that generates text; only docs/api/samplers.md has their table."""

COMMON = (
    *("model", "messages", "prompt", "input", "system", "instructions", "options"),
    *("max_completion_tokens", "max_tokens", "max_output_tokens", "num_predict", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "stop", "stop_sequences", "seed", "n", "tools", "tool_choice"),
    *("response_format", "format", "text", "output_config", "reasoning_effort", "reasoning", "thinking", "think"),
    *("logprobs", "top_logprobs", "store", "previous_response_id", "priority", "timeout"),
)
"""Fields that most requests need, in the order in which tables begin."""


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


@cache
def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads(openapi_document())["components"]["schemas"]
    of_chat = schemas["ChatRequest"]["properties"]
    return {**schemas, "SamplerFields": {"properties": {name: of_chat[name] for name in SAMPLERS}}}


def table(name: str) -> str:
    schema = _schemas()[name]
    fields, needed = schema["properties"], schema.get("required", ())

    def place(field: str) -> tuple[bool, bool, int]:
        has_no_effect = _what(fields[field]).startswith(("**Refused", "Accepted, without effect"))
        return field not in needed, has_no_effect, COMMON.index(field) if field in COMMON else len(COMMON)

    elsewhere = set() if name == "SamplerFields" else set(SAMPLERS) & set(fields)
    rows = ["| field | type | what happens |", "| --- | --- | --- |"]
    for field in sorted(set(fields) - elsewhere, key=lambda field: (*place(field), list(fields).index(field))):
        required = " (required)" if field in needed else ""
        limits = _limits(fields[field])
        kind = _kind(fields[field]) + (f", {limits}" if limits else "")
        rows.append(f"| `{field}`{required} | {kind} | {_what(fields[field])} |")
    more = ["", "Also all fields of [further samplers](samplers.md#fields)."] if elsewhere else []
    return "\n".join([*rows, *more]) + "\n"


def members(name: str) -> str:
    """Constructor, methods and properties of a public class, with their docstrings."""
    kind = getattr(millrace, name)
    doc = inspect.cleandoc(kind.__doc__ or "")
    has_own_doc = doc and not doc.startswith(f"{name}(")  # A dataclass without one gets its signature.
    shown = [f"```python\n{name}{_call(kind)}\n```\n", *([f"{doc}\n"] if has_own_doc else [])]
    for member in _documented(kind):
        found = inspect.getattr_static(kind, member)
        text = inspect.cleandoc(found.__doc__)
        if isinstance(found, property):
            shown.append(f"**`{member}`**: {text}\n")
        else:
            shown.append(f"```python\n{name}.{member}{_call(getattr(found, '__func__', found))}\n```\n\n{text}\n")
    return "\n".join(shown)


def _documented(kind: type) -> list[str]:
    """Public methods and properties that have a docstring, those of base classes first."""
    names: dict[str, None] = {}
    for one in reversed(kind.__mro__[:-1]):
        if one.__module__.startswith("millrace"):
            names.update(dict.fromkeys(name for name in vars(one) if not name.startswith("_")))
    found = {name: inspect.getattr_static(kind, name) for name in names}
    members = (property, classmethod, staticmethod)
    return [
        name
        for name, value in found.items()
        if (inspect.isfunction(value) or isinstance(value, members)) and value.__doc__
    ]


def _call(function: Any) -> str:
    """A signature with its annotations as they are written, on one line if that is short."""
    signature = inspect.signature(function)
    parts, is_keyword = [], False
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.VAR_POSITIONAL:
            is_keyword = True
        elif one.kind is one.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = "" if one.annotation is one.empty else f": {_type(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        parts.append(f"{stars}{one.name}{kind}{default}")
    back = signature.return_annotation
    is_made = inspect.isclass(function) or back is signature.empty
    arrow = "" if is_made else f" -> {_type(back)}"
    line = f"({', '.join(parts)}){arrow}"
    return line if len(line) <= 90 else "(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:millrace|typing|collections\.abc)(?:\.\w+)*\.(?=\w)", "", text)


def _default(value: object) -> str:
    return "…" if re.search(r" at 0x|<factory>|<class", repr(value)) else repr(value)


def written(text: str) -> str:
    makers = {"fields": table, "members": members}
    return _MARKED.sub(lambda match: match[1] + makers[match[2]](match[3]) + match[4], text)


def main() -> int:
    old = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) == text:
            continue
        old.append(page)
        if "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
    if old and "--check" in sys.argv:
        print(f"Out of date: {', '.join(page.name for page in old)}. Run: python tools/api_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
