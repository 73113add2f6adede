"""The grammar of calls with a tag for each argument, whose strings have no quotes.

A string is free text up to its tag's end, or what its schema allows: choices, a pattern, a length, a format. Other
values are JSON that conforms to their schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.inline import STRING_FORMATS, inline_schema
from millrace.text.grammar.patterns import free_text
from millrace.text.tools.argument_kinds import ALL_KINDS, STRING, kinds_of, parameter_schemas, resolved
from millrace.text.tools.formats import Function
from millrace.text.tools.shapes import TaggedShape
from millrace.text.tools.written import tagged_argument, tagged_name_end

_NOT_ENFORCED = ("anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "minProperties")
"""Keywords that say which arguments belong together; the arguments are written one by one."""
_DATE, _TIME = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])",
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?",
)
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": f"{_TIME}{_ZONE}",
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)+",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "uri": r"[a-z][a-z0-9+.-]*:\/\/[a-zA-Z0-9.-]+(:[0-9]+)?(\/[a-zA-Z0-9._~!$&'()*+,;=:@%-]*)*(\?[a-zA-Z0-9._~=&%-]*)?",
}
"""A subset of each format that models write."""

EMPTY = '""'
_MORE_OF_ARRAYS = frozenset(("prefixItems", "contains", "uniqueItems", "anyOf", "oneOf", "allOf", "enum", "const"))
WriteText = Callable[[str], str]
"""Text as Lark tokens."""


class TaggedGrammar:
    """Rules of one call, named by the function's index."""

    def __init__(self, shape: TaggedShape, function: Function, index: int, write: WriteText) -> None:
        self._shape = shape
        self._function = function
        self._root = resolved(function.parameters, function.parameters)
        self._index = index
        self._write = write
        self._rules: list[str] = []

    def rules(self) -> list[str]:
        shape, name = self._shape, self._function.name
        for keyword in _NOT_ENFORCED:
            if keyword in self._root:
                raise GrammarError(
                    f"The function {name!r} has {keyword!r} in its parameters, which is not supported with a model that"
                    " writes arguments one by one; remove it."
                )
        required = self._root.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for number, (key, schema) in enumerate(parameter_schemas(self._function.parameters).items()):
            if re.search(r'[<>"\n]', key) or key != key.strip():
                raise GrammarError(f'The function {name!r} has the parameter {key[:80]!r}; rename it without < > " .')
            part = self._argument(key, schema, f"value_{self._index}_{number}")
            parts.append(part if key in required else f"( {part} )?")
        head = self._write(f"{shape.call_open}{name}{tagged_name_end(shape)}")
        return [f"call_{self._index}: {head} {' '.join(parts)} {self._write(shape.call_end)}", *self._rules]

    @property
    def extra(self) -> list[str]:
        """The rules that values need."""
        return self._rules

    def quoted(self, schema: Any, rule: str) -> str:
        """A string between two of the shape's end markers; JSON if the value may be something else."""
        end = self._shape.value_end
        quote, schema = self._write(end), resolved(schema, self._root)
        kinds = kinds_of(schema, self._root)
        if kinds == {"array"} and isinstance(schema.get("items"), dict) and not _MORE_OF_ARRAYS & schema.keys():
            return self._array(schema, rule)
        if kinds != {STRING}:
            return self._json(schema, rule)
        value = self._value(schema, rule)
        if value is None:
            self._rules.append(self._free(rule, end))
            return f"{quote} {rule}"
        return f"{quote} ( {value} ) {quote}"

    def _array(self, schema: Mapping[str, Any], rule: str) -> str:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        item = f"{rule}_item"
        self._rules.append(f"{item}: {self.quoted(schema['items'], f'{item}_value')}")
        if most is not None and int(most) < max(least, 1):
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        items = f'{item} ( "," {item} ){more}'
        return f'"[" {items} "]"' if least else f'"[" ( {items} )? "]"'

    def _argument(self, key: str, schema: Any, rule: str) -> str:
        is_string = STRING in kinds_of(schema, self._root)
        before, after = tagged_argument(self._shape, key, is_string=is_string)
        value = self._value(schema, rule)
        if value is None:
            self._rules.append(self._free(rule, after.removesuffix("\n")))
            return f'{self._write(before)} {rule} "\\n"'
        return f"{self._write(before)} ( {value} ) {self._write(after)}"

    def _free(self, rule: str, end: str) -> str:
        """Any text up to and including `end`."""
        before, special, after = self._write(end).partition("<[")
        if not special:
            return f"{rule}[lazy]: /(?s:.*)/ {json.dumps(end, ensure_ascii=False)}"
        text = free_text(end, json.loads(before or EMPTY))
        return f"{rule}: {rule.upper()} {special}{after}\n{rule.upper()}: {text}"

    def _value(self, schema: Any, rule: str) -> str | None:
        """A Lark expression of the value's text; None: any text."""
        schema = resolved(schema, self._root)
        kinds = kinds_of(schema, self._root)
        if STRING not in kinds:
            return self._json(schema, rule)
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = (one if isinstance(one, str) else json.dumps(one) for one in values)
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(keyword), list):
                return self._one_of(schema[keyword], keyword, rule)
        text = self._string(schema, rule)
        if text is None or kinds in ({STRING}, ALL_KINDS):
            return text
        others = {**schema, "type": sorted(kinds - {STRING})}
        return f"{text} | {self._json(others, f'{rule}_json')}"

    def _one_of(self, schemas: list[Any], keyword: str, rule: str) -> str | None:
        if keyword == "allOf" and len(schemas) > 1:
            raise GrammarError(
                f"The function {self._function.name!r} has a string with 'allOf', which is not supported with this"
                " model; write it as one schema."
            )
        found = [self._value(schema, f"{rule}_{number}") for number, schema in enumerate(schemas)]
        texts = [text for text in found if text is not None]
        return " | ".join(texts) if len(texts) == len(found) else None

    def _json(self, schema: Mapping[str, Any], rule: str) -> str:
        shared = {key: value for key, value in self._root.items() if key in ("$defs", "definitions")}
        self._rules.append(f"{rule}: {inline_schema(json.dumps({**shared, **schema}))}")
        return rule

    def _string(self, schema: Mapping[str, Any], rule: str) -> str | None:
        """A terminal for a string with limits; None if it has none."""
        regexes = []
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            regexes.append(f"(?s:.{{{int(least)},{'' if most is None else int(most)}}})")
        if isinstance(pattern := schema.get("pattern"), str):
            start = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            core = pattern.removeprefix("^").removesuffix("$" if not end else "\0")
            regexes.append(f"{start}({_escaped_slashes(core)}){end}")
        if isinstance(name := schema.get("format"), str) and name in STRING_FORMATS:
            if name not in _FORMATS:
                raise GrammarError(
                    f"The function {self._function.name!r} uses the format {name!r}, which is not supported with this"
                    f" model; use a pattern or one of {', '.join(_FORMATS)}."
                )
            regexes.append(_FORMATS[name])
        if not regexes:
            return None
        terminal = rule.upper()
        self._rules.append(
            f"{terminal}: {' & '.join(f'/{one}/' for one in regexes)} & {free_text(self._shape.value_end)}"
        )
        return terminal


def _escaped_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", pattern)
