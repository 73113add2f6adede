"""How a format writes calls: in the history of models whose template does not write them, and in forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.text.tools.formats import ToolFormat
from millrace.text.tools.shapes import HeadedShape, QuotedShape, TaggedShape

HARMONY_HEAD, HARMONY_ARGUMENTS = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"


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
    match spec.name:
        case "llama3":
            return CallFrame(between="; ")  # The tag is for the model's built-in tools.
        case "json":
            return CallFrame("[", between=", ", after_all="]")
        case "harmony":
            return CallFrame()
        case "glm45" | "solar_open2":
            return CallFrame(before_each=opening, between="\n")
        case "minicpm5":
            return CallFrame(between="\n")  # Each call has the opening's text.
        case "gigachat3":
            return CallFrame(before_each=opening, between="\n")
        case "gemma4" | "functiongemma":
            return CallFrame(before_each=opening, after_each=spec.close)
        case "gemma" | "olmo3" | "minimax_m2" | "deepseek_v32" | "deepseek_v4" | "step3" | "hy_v3":
            return CallFrame(f"{opening}\n", between="\n", after_all="\n" + spec.close)
        case "granite_20b":
            return CallFrame(before_each=f"{opening} ", between="\n")
    if isinstance(spec.shape, HeadedShape):
        return CallFrame(opening, between="\n" if spec.shape.after_arguments else "", after_all=spec.close)
    if spec.is_list:
        return CallFrame(f"{opening}[", between=", ", after_all="]" + spec.close)
    return CallFrame(before_each=f"{opening}\n", after_each=f"\n{spec.close}", between="\n")


def write_calls(spec: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Calls (name and arguments) as a model of this format writes them."""
    frame = frame_of(spec)
    each = (
        f"{frame.before_each}{_write_call(spec, name, arguments, index)}{frame.after_each}"
        for index, (name, arguments) in enumerate(calls)
    )
    return frame.before_all + frame.between.join(each) + frame.after_all


def _write_call(spec: ToolFormat, name: str, arguments: Mapping[str, Any] | str, index: int) -> str:
    """Arguments as text are what a model wrote instead of an object."""
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments), ensure_ascii=False)
    if isinstance(spec.shape, HeadedShape):
        before, after = headed_call(spec.shape, name)
        return f"{before.format(index=index)}{text}{after}"
    if spec.body == "harmony":
        return f"{HARMONY_HEAD}{name}{HARMONY_ARGUMENTS}{text}<|call|>"
    if not spec.name_key:
        return f"{{{json.dumps(name)}: {text}}}"
    if isinstance(spec.shape, QuotedShape) and not isinstance(arguments, str):
        return f"call:{name}{_quoted_value(arguments, spec.shape.quote)}"
    if isinstance(arguments, str):
        return f'{{"{spec.name_key}": {json.dumps(name)}, "{spec.arguments_key}": {arguments}}}'
    if isinstance(spec.shape, TaggedShape):
        return _tagged_call(spec.shape, name, arguments)
    if spec.body == "python":
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        return f"{name}({given})"
    return json.dumps({spec.name_key: name, spec.arguments_key: dict(arguments)}, ensure_ascii=False)


def _quoted_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quoted_value(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_quoted_value(one, quote) for one in value) + "]"
    return json.dumps(value)


def headed_call(shape: HeadedShape, name: str) -> tuple[str, str]:
    """What stands before and after the arguments; `{index}` is the number of the call."""
    return f"{shape.begin}{shape.before_name}{name}{shape.after_name}", shape.after_arguments + shape.end


def _tagged_call(shape: TaggedShape, name: str, arguments: Mapping[str, Any]) -> str:
    parts = [shape.call_open, name, tagged_name_end(shape)]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        before, after = tagged_argument(shape, key, is_string=isinstance(value, str))
        parts += [before, text, after]
    return "".join((*parts, shape.call_end))


def tagged_name_end(shape: TaggedShape) -> str:
    """What stands after the name: a line break too, as every tag has a line of its own."""
    return shape.name_end if shape.name_end == "\n" else f"{shape.name_end}\n"


def tagged_argument(shape: TaggedShape, key: str, *, is_string: bool) -> tuple[str, str]:
    """What stands before and after an argument's value."""
    key_end = shape.key_end
    if shape.key_attribute:
        key_end = f'" string="{"true" if is_string else "false"}">'
    return f"{shape.key_open}{key}{key_end}{shape.newline}", f"{shape.newline}{shape.value_end}\n"
