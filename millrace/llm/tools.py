"""Python functions as tools: their schemas, their arguments, and their results as messages."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.errors import BadRequest
from millrace.llm.outputs import ToolCall

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function with type annotations, or a tool as OpenAI writes it."""


@dataclass(frozen=True, slots=True)
class PythonTool:
    function: Callable[..., Any]
    name: str
    description: str
    schema: dict[str, Any]
    decode: Callable[[dict[str, Any]], dict[str, Any]]
    """Checks the arguments of a call and converts them to the types of the function's annotations."""

    def spec(self) -> dict[str, Any]:
        described: dict[str, Any] = {"name": self.name, "parameters": self.schema}
        if self.description:
            described["description"] = self.description
        return {"type": "function", "function": described}


class Toolbox:
    """The tools of one call of `chat`."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
            raise BadRequest("tools is not a list; give a list of functions, or of tools as OpenAI writes them.")
        self.specs: list[dict[str, Any]] = []
        self._functions: dict[str, PythonTool] = {}
        for tool in tools:
            if isinstance(tool, Mapping):
                self.specs.append(dict(tool))
                continue
            described = describe(tool)
            self._functions[described.name] = described
            self.specs.append(described.spec())

    def runs(self, calls: Sequence[ToolCall]) -> bool:
        """True if there are calls, and all of them are complete and of functions that are here."""
        return bool(calls) and all(call.is_complete and call.name in self._functions for call in calls)

    def run(self, call: ToolCall) -> Any:
        """What the function returns: of an async function, something to wait for. An error is a result too, for the
        model to read."""
        tool = self._functions[call.name]
        try:
            return tool.function(**tool.decode(_object(call)))
        except Exception as error:
            return failure(error)


def failure(error: Exception) -> str:
    return f"Error: {type(error).__name__}: {error}"


def result_message(call: ToolCall, result: Any) -> dict[str, Any]:
    """A text as it is, anything else as JSON."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise BadRequest(f"The tool {call.name!r} is an async function; use AsyncLLM, or give a plain function.")
    content = result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _object(call: ToolCall) -> dict[str, Any]:
    if not isinstance(call.arguments, dict):
        raise TypeError(f"the arguments are {call.arguments!r}, not an object")
    return call.arguments


def describe(function: object) -> PythonTool:
    name = getattr(function, "__name__", "")
    if not callable(function) or not name:
        raise BadRequest(f"A tool is {function!r}; give a function, or a tool as OpenAI writes it.", param="tools")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise BadRequest(f"The tool {name!r} cannot be described: {error}.", param="tools") from error
    fields: list[tuple[str, Any, Any]] = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadRequest(
                f"The tool {name!r} has the parameter '{parameter}'; a tool takes named arguments only.", param="tools"
            )
        fields.append((parameter.name, hints.get(parameter.name, Any), parameter.default))
    schema, decode = _by_msgspec(name, fields) or _by_pydantic(name, fields)
    return PythonTool(function, name, inspect.getdoc(function) or "", schema, decode)


Described = tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]


def _by_msgspec(name: str, fields: Sequence[tuple[str, Any, Any]]) -> Described | None:
    """None for types that msgspec does not know."""
    declared: list[Any] = [
        (field, kind, *(() if default is inspect.Parameter.empty else (msgspec.field(default_factory=_of(default)),)))
        for field, kind, default in fields
    ]
    struct = msgspec.defstruct("Arguments", declared, kw_only=True, forbid_unknown_fields=True)
    try:
        schema = msgspec.json.schema(struct)
    except TypeError:
        return None

    def decode(arguments: dict[str, Any]) -> dict[str, Any]:
        found = msgspec.convert(arguments, struct)
        return {field: getattr(found, field) for field, _, _ in fields}

    return _without_head(schema, fields), decode


def _of(default: Any) -> Callable[[], Any]:
    return lambda: default


def _by_pydantic(name: str, fields: Sequence[tuple[str, Any, Any]]) -> Described:
    pydantic = sys.modules.get("pydantic")  # Who annotates with pydantic's types has imported pydantic.
    try:
        if pydantic is None:
            raise TypeError("its annotations are not types of JSON values")
        declared = {
            field: (kind, ... if default is inspect.Parameter.empty else default) for field, kind, default in fields
        }
        model: Any = pydantic.create_model("Arguments", __config__={"extra": "forbid"}, **declared)
        schema: dict[str, Any] = model.model_json_schema()
    except Exception as error:  # Pydantic's errors are of several classes, and its own.
        raise BadRequest(f"The tool {name!r} cannot be described: {error}.", param="tools") from error

    def decode(arguments: dict[str, Any]) -> dict[str, Any]:
        found = model.model_validate(arguments)
        return {field: getattr(found, field) for field, _, _ in fields}

    return _without_head(schema, fields), decode


def _without_head(schema: dict[str, Any], fields: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    """The object of arguments itself, where the schema refers to it, and without the titles that Python types get."""
    definitions = dict(schema.get("$defs", {}))
    if "$ref" in schema:
        schema = definitions.pop(schema["$ref"].rpartition("/")[2])
    found = {key: value for key, value in schema.items() if key not in ("title", "$defs")}
    properties = found.get("properties", {})
    for field, _, default in fields:
        if default is not inspect.Parameter.empty and _is_plain(default):
            properties[field] = {**properties[field], "default": default}
    return {**found, "properties": properties} | ({"$defs": definitions} if definitions else {})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
