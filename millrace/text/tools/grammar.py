"""The grammar of tool calls in Lark notation: of an answer that must call, and of calls to strict functions.

The same text around calls (`written`) that the model sees in its history is what a forced call is made of, and the
parser of its format reads it back.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.inline import inline_schema, tightened_schema
from millrace.text.grammar.patterns import free_text
from millrace.text.tokenizers.tokenizer import MarkerId
from millrace.text.tools.argument_kinds import parameter_schemas
from millrace.text.tools.formats import Function, ToolFormat
from millrace.text.tools.shapes import HeadedShape, QuotedShape, TaggedShape
from millrace.text.tools.tagged_grammar import TaggedGrammar
from millrace.text.tools.written import HARMONY_ARGUMENTS, HARMONY_HEAD, CallFrame, frame_of, headed_call

MAX_CALLS = 8
"""Most calls of one constrained answer."""
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class _Writer:
    spec: ToolFormat
    functions: Sequence[Function]
    marker_id: MarkerId
    only_strict: bool
    """Functions that are not strict may have any arguments."""

    def calls(self, frame: CallFrame, max_calls: int) -> str:
        more = f"( {self.text(frame.between)} call ){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"{self.text(frame.before_all)} call {more} {self.text(frame.after_all)}"

    def rules(self, frame: CallFrame) -> list[str]:
        names = " | ".join(f"call_{index}" for index in range(len(self.functions)))
        rules = [f"call: {self.text(frame.before_each)} ( {names} ) {self.text(frame.after_each)}"]
        for index, function in enumerate(self.functions):
            rules += self._call(index, function)
        return rules

    def _call(self, index: int, function: Function) -> list[str]:
        spec, shape = self.spec, self.spec.shape
        if spec.body == "python":
            return self._python_call(index, function)
        if isinstance(shape, TaggedShape):
            return TaggedGrammar(shape, function, index, self.text).rules()
        if isinstance(shape, QuotedShape):
            return self._quoted_call(index, function, shape)
        if isinstance(shape, HeadedShape):
            head, tail = headed_call(shape, function.name)
        elif not spec.name_key:
            head, tail = f"{{{json.dumps(function.name)}: ", "}"
        elif spec.body == "harmony":
            head, tail = f"{HARMONY_HEAD}{function.name}{HARMONY_ARGUMENTS}", ""
        else:
            head, tail = f'{{"{spec.name_key}": {json.dumps(function.name)}, "{spec.arguments_key}": ', "}"
        is_held = function.is_strict or not self.only_strict
        schema = tightened_schema(function.schema_text()) if is_held else ANY_OBJECT
        before = " /[0-9]{1,2}/ ".join(self.text(part) for part in head.split("{index}"))
        return [f"call_{index}: {before} args_{index} {self.text(tail)}", f"args_{index}: {inline_schema(schema)}"]

    def _python_call(self, index: int, function: Function) -> list[str]:
        """Keyword arguments in the order of the schema, each a JSON value, which is read like a Python literal."""
        properties = function.parameters.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        for name in (*function.name.split("."), *properties):
            if not name.isidentifier() or keyword.iskeyword(name):
                raise GrammarError(
                    f"The function {function.name!r} has the name {name[:80]!r}, which is no name in Python; this model"
                    " writes calls in Python, so rename it."
                )
        shared = {key: value for key, value in function.parameters.items() if key in ("$defs", "definitions")}
        rules: list[str] = []
        items: dict[str, str] = {}
        for number, (name, schema) in enumerate(properties.items()):
            value = {**shared, **schema} if isinstance(schema, dict) else {}
            rules.append(f"value_{index}_{number}: {inline_schema(json.dumps(value))}")
            items[name] = f"{_quoted(name + '=')} value_{index}_{number}"
        arguments, more = _listed(function, index, items, ", ")
        return [f"call_{index}: {_quoted(function.name + '(')} {arguments} {_quoted(')')}", *rules, *more]

    def _quoted_call(self, index: int, function: Function, shape: QuotedShape) -> list[str]:
        """Strings stand between markers; other values are JSON."""
        values = TaggedGrammar(TaggedShape("", "", "", "", shape.quote, ""), function, index, self.text)
        items: dict[str, str] = {}
        for number, (name, schema) in enumerate(parameter_schemas(function.parameters).items()):
            if not re.fullmatch(r"[\w.-]+", name):
                raise GrammarError(
                    f"The function {function.name!r} has the parameter {name[:80]!r}, which this model cannot write;"
                    " rename it with letters, digits, '_', '-' and '.'."
                )
            items[name] = f"{_quoted(name + ':')} {values.quoted(schema, f'value_{index}_{number}')}"
        arguments, more = _listed(function, index, items, ",")
        return [f"call_{index}: {_quoted(f'call:{function.name}{{')} {arguments} {_quoted('}')}", *values.extra, *more]

    def text(self, text: str) -> str:
        """Text as Lark tokens; markers in it are matched by their ids."""
        if not text:
            return ""
        for marker in self.spec.markers:
            token_id = self.marker_id(marker) if marker in text else None
            if token_id is not None:
                before, _, after = text.partition(marker)
                return " ".join(part for part in (self.text(before), f"<[{token_id}]>", self.text(after)) if part)
        return _quoted(text)


def _listed(function: Function, index: int, items: dict[str, str], comma: str) -> tuple[str, list[str]]:
    """Arguments (`items`, by name) in their order with commas between those that are given, and further rules."""
    required = function.parameters.get("required")
    required = required if isinstance(required, list) else []
    rules: list[str] = []
    before: list[str] = []
    given: list[str] = []
    for name, item in items.items():
        # A comma stands before every argument but the first one that is given, which must be a required one.
        if name in required:
            given.append(f"{_quoted(comma)} {item}" if given else item)
        elif given:
            given.append(f"( {_quoted(comma)} {item} )?")
        else:
            before.append(f"( {item} {_quoted(comma)} )?")
    if not given and items:  # Only optional arguments: one rule for each that can be the first that is given.
        all_items = list(items.values())
        for number, item in enumerate(all_items):
            more = (f"( {_quoted(comma)} {later} )?" for later in all_items[number + 1 :])
            rules.append(f"first_{index}_{number}: {' '.join((item, *more))}")
        return f"( {' | '.join(f'first_{index}_{number}' for number in range(len(items)))} )?", rules
    return " ".join([*before, *given]), rules


def forced_calls(spec: ToolFormat, functions: Sequence[Function], marker_id: MarkerId, *, max_calls: int | None) -> str:
    """An answer that consists of calls."""
    frame = frame_of(spec)
    writer = _Writer(spec, functions, marker_id, only_strict=False)
    start = writer.calls(frame, _limit(spec, max_calls))
    return "\n".join([f"start: {start}", *writer.rules(frame)])


def strict_calls(
    spec: ToolFormat, functions: Sequence[Function], marker_id: MarkerId, *, max_calls: int | None
) -> str | None:
    """Free text, then possibly calls, which are held to their schemas from the opening on. None if the format has no
    opening, so that a call cannot be told from text before it is complete."""
    if spec.body == "harmony":
        calls = _Writer(spec, functions, marker_id, only_strict=True)
        head = calls.text(spec.answer_head)
        return "\n".join([f"start: {head} TEXT | call", "TEXT: /(?s:.*)/", *calls.rules(CallFrame())])
    frame = frame_of(spec)
    first = frame.before_all or frame.before_each
    opening = spec.openings[0] if spec.openings else ""
    if not opening or not first.startswith(opening):
        return None
    writer = _Writer(spec, functions, marker_id, only_strict=True)
    rest = first[len(opening) :]
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    head = f"{writer.text(rest)} ( {names} ) {writer.text(frame.after_each)}"
    limit = _limit(spec, max_calls)
    more = f"( {writer.text(frame.between)} call ){{0,{limit - 1}}}" if limit > 1 else ""
    tail = f"{head} {more} {writer.text(frame.after_all)}"
    before, marker, after = writer.text(opening).partition("<[")
    if not marker:
        start = [f"start: TEXT | free {tail}", f"free[lazy]: /(?s:.*)/ {_quoted(opening)}"]
    elif not before:
        start = [f"start: TEXT ( {marker}{after} {tail} )?"]
    else:
        start = [f"start: TEXT | BEFORE {marker}{after} {tail}", f"BEFORE: {free_text(opening, json.loads(before))}"]
    return "\n".join([*start, f"TEXT: {free_text(opening)}", *writer.rules(frame)])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def answer_head(spec: ToolFormat, marker_id: MarkerId) -> str:
    """What stands before an answer without calls, as Lark tokens; empty in most formats."""
    return _Writer(spec, (), marker_id, only_strict=False).text(spec.answer_head)


def _limit(spec: ToolFormat, max_calls: int | None) -> int:
    return 1 if spec.body == "harmony" else MAX_CALLS if max_calls is None else max_calls


def calls_or(answer: Grammar, calls: str, head: str = "") -> str | None:
    """Calls, or an answer that conforms to a JSON schema, after `head`. None for other kinds of grammar."""
    if answer.kind not in ("json_object", "json_schema"):
        return None
    first, _, rest = calls.partition("\n")
    schema = ANY_OBJECT if answer.kind == "json_object" else answer.source
    start = f"start: answer | ( {first.removeprefix('start: ')} )"
    return "\n".join([start, f"answer: {head} {inline_schema(schema)}", rest])
