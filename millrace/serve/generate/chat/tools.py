"""Tools of a request in the internal form, with the checks that all dialects share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.errors import BadRequest
from millrace.text.tools.formats import Function
from millrace.text.tools.json_scanner import json_text

MAX_TOOLS = 512
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,128}$"
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_NAME = re.compile(NAME_PATTERN, re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and whether the model must use them."""

    functions: tuple[Function, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    """The one function that must be called; `choice` is then "required"."""
    parallel: bool = True
    """The answer may have several calls."""

    @property
    def shown(self) -> tuple[Function, ...]:
        """Functions that the prompt describes: none if none may be called."""
        return () if self.choice == "none" else self.functions

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel and self.only is None else 1


NO_TOOLS = ToolUse()


def check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith("\n"):
        raise BadRequest(
            f"'{param}' is {name[:140]!r}; a function's name has 1 to 128 letters, digits, '_', '-' or '.'.",
            param=param,
        )


def function_of(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, is_strict: bool, param: str
) -> Function:
    """`param` is the field that holds the function."""
    check_name(name, f"{param}.name")
    if parameters is None:
        return Function(name, description, is_strict=is_strict, has_parameters=False)
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise BadRequest(
            f"'{param}' has a schema of type {str(kind)[:80]!r}; arguments are an object, so it must be 'object'.",
            param=param,
        )
    schema = parameters or {"type": "object", "properties": {}}
    return Function(name, description, schema, is_strict=is_strict)


def arguments_of(text: str) -> dict[str, Any] | str:
    """The arguments of an earlier call: the object, or the text itself if it is none, as after a call that was cut.
    An escape of half a surrogate pair, which a model may have written, becomes U+FFFD."""
    try:
        value = json.loads(text) if text.strip() else {}
        if _HALF_PAIR.search(text):
            value = json.loads(json_text(value))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def tool_use(
    functions: Sequence[Function],
    choice: Literal["auto", "none", "required"] | None,
    only: str | None,
    *,
    parallel: bool | None,
    allowed: Sequence[str] | None = None,
    param: str = "tool_choice",
) -> ToolUse:
    """`param` is the field that chose, for errors. `allowed`: only these functions may be called."""
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"'tools' holds {len(functions)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise BadRequest(f"'tools' has two functions named {name!r}; rename one of them.", param="tools")
    for name in (*(allowed or ()), *(() if only is None else (only,))):
        if name not in names:
            raise BadRequest(f"'{param}' names the function {name[:140]!r}, which is not in 'tools'.", param=param)
    if allowed is not None:
        functions = [function for function in functions if function.name in allowed]
    if choice == "required" and not functions:
        raise BadRequest(f"'{param}' requires a call, but there are no 'tools' to call; send some.", param=param)
    chosen = "required" if only is not None else choice or "auto"
    return ToolUse(tuple(functions), chosen, only, True if parallel is None else parallel)
