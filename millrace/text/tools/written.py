"""How a format writes calls: in the history of models whose template does not write them, and in forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.text.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The text around calls."""

    before_all: str = ""
    before_each: str = ""
    after_each: str = ""
    between: str = ""
    after_all: str = ""


def frame_of(spec: ToolFormat) -> CallFrame:
    opening = spec.openings[0] if spec.openings else ""
    if spec.name == "llama3":
        return CallFrame(between="; ")  # The tag is for the model's built-in tools.
    if spec.name == "json":
        return CallFrame("[", between=", ", after_all="]")
    if spec.name == "gemma":
        return CallFrame(f"{opening}\n", between="\n", after_all="\n" + spec.close)
    if spec.is_list:
        return CallFrame(f"{opening}[", between=", ", after_all="]" + spec.close)
    return CallFrame(before_each=f"{opening}\n", after_each=f"\n{spec.close}", between="\n")


def write_calls(spec: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Calls (name and arguments) as a model of this format writes them."""
    frame = frame_of(spec)
    each = (f"{frame.before_each}{_write_call(spec, *call)}{frame.after_each}" for call in calls)
    return frame.before_all + frame.between.join(each) + frame.after_all


def _write_call(spec: ToolFormat, name: str, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):  # What a model wrote instead of an object.
        return f'{{"name": {json.dumps(name)}, "{spec.arguments_key}": {arguments}}}'
    if spec.body == "python":
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        return f"{name}({given})"
    return json.dumps({"name": name, spec.arguments_key: dict(arguments)}, ensure_ascii=False)
