"""Tools of a response as a `ToolUse`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from msgspec.structs import replace

from millrace.errors import BadRequest
from millrace.serve.generate.chat.tools import ToolUse, check_name, function_of, tool_use
from millrace.serve.responses.schemas import InputTokensRequest, ResponsesRequest
from millrace.serve.responses.schemas_tools import (
    TOOL_TYPES,
    ResponseAllowedTool,
    ResponseAllowedTools,
    ResponseFunction,
    ResponseNamedTool,
    ResponseNamespace,
    UsedTool,
    joined_name,
)
from millrace.text.tools.formats import Function


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request, read once."""

    use: ToolUse
    given: list[UsedTool]
    """Those that are used, as the client sent them."""
    places: dict[str, tuple[str, str]]
    """Namespace and name of the functions in namespaces, by the name that the model uses."""
    left_out: list[str]
    """Types, in their order, each once."""

    @cached_property
    def warning(self) -> str:
        kinds = ", ".join(self.left_out)
        return f"tools that this server does not run were left out: {kinds}" if kinds else ""


def tools_of(body: ResponsesRequest | InputTokensRequest) -> ResponseTools:
    functions: list[Function] = []
    given: list[UsedTool] = []
    places: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for index, tool in enumerate(body.tools or ()):
        at = f"tools[{index}]"
        if isinstance(tool, ResponseFunction):
            given.append(tool)
            functions.append(_function(tool, None, at))
        elif isinstance(tool, ResponseNamespace):
            check_name(tool.name, f"{at}.name")
            inside = [one for one in tool.tools if isinstance(one, ResponseFunction)]
            given.append(replace(tool, tools=inside))
            left_out += ["custom"] * (len(inside) < len(tool.tools))
            for number, one in enumerate(tool.tools):
                if isinstance(one, ResponseFunction):
                    function = _function(one, tool, f"{at}.tools[{number}]")
                    places[function.name] = (tool.name, one.name)
                    functions.append(function)
        else:
            left_out.append(str(tool.__struct_config__.tag))
    left_out = list(dict.fromkeys(left_out))
    return ResponseTools(_use(body, functions, places, left_out), given, places, left_out)


def _function(tool: ResponseFunction, namespace: ResponseNamespace | None, at: str) -> Function:
    name = joined_name(namespace.name if namespace is not None else "", tool.name)
    texts = [namespace.description if namespace is not None else None, tool.description]
    description = "\n".join(text for text in texts if text) or tool.description
    return function_of(name, description, tool.parameters, is_strict=bool(tool.strict), param=at)


def _use(
    body: ResponsesRequest | InputTokensRequest,
    functions: list[Function],
    places: dict[str, tuple[str, str]],
    left_out: list[str],
) -> ToolUse:
    chosen, parallel = body.tool_choice, body.parallel_tool_calls
    only: str | None = None
    allowed: list[str] | None = None
    mode: Literal["auto", "none", "required"] | None = None
    if isinstance(chosen, ResponseNamedTool):
        mode, only = "required", _named(chosen.name, functions, places)[0]
    elif isinstance(chosen, ResponseAllowedTools):
        mode, allowed = chosen.mode, _allowed(chosen.tools, functions, places)
    else:
        mode = chosen
    if mode == "required" and left_out and not (functions if allowed is None else allowed):
        raise BadRequest(
            f"'tool_choice' requires a call, but this server does not run {', '.join(left_out)}; send functions.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return tool_use(functions, mode, only, parallel=parallel, allowed=allowed)


def _allowed(
    tools: list[ResponseAllowedTool], functions: list[Function], places: dict[str, tuple[str, str]]
) -> list[str]:
    """The names that the model uses. Tools that this server does not run are not among them."""
    found: list[str] = []
    for index, tool in enumerate(tools):
        if tool.type not in TOOL_TYPES:
            param = f"tool_choice.tools[{index}].type"
            raise BadRequest(f"'{param}' is {tool.type[:80]!r}; it must be a type of tools.", param=param)
        if tool.type == "function":
            found += _named(tool.name or "", functions, places)
        elif tool.type == "namespace":
            found += [name for name, (namespace, _) in places.items() if namespace == tool.name]
    return found


def _named(name: str, functions: list[Function], places: dict[str, tuple[str, str]]) -> list[str]:
    """The names that the model uses for functions of this name, in whatever namespace; itself if there are none."""
    own = [function.name for function in functions if function.name == name]
    return own or [function for function, (_, inside) in places.items() if inside == name] or [name]
