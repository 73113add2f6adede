"""Tools of a chat request, in the current and in the older form (`functions`), as a `ToolUse`."""

from __future__ import annotations

from millrace.errors import BadRequest
from millrace.serve.generate.chat.tools import ToolUse, function_of, tool_use
from millrace.serve.openai.schemas import ChatRequest
from millrace.serve.openai.schemas_tools import AllowedTools, FunctionName, FunctionSpec, NamedTool
from millrace.text.tools.formats import Function


def uses_functions(request: ChatRequest) -> bool:
    """True if the request has the older form; its answer then has it too."""
    return bool(request.functions)


def tools_of(request: ChatRequest) -> ToolUse:
    if request.functions:
        return _functions(request)
    if request.function_call is not None and (request.tools or not isinstance(request.function_call, str)):
        raise BadRequest(
            "'function_call' is set, but there are no 'functions'; use 'tool_choice' with 'tools'.",
            param="function_call",
        )
    functions = [_function(tool.function, f"tools[{index}].function") for index, tool in enumerate(request.tools or ())]
    chosen, parallel = request.tool_choice, request.parallel_tool_calls
    if isinstance(chosen, NamedTool):
        return tool_use(functions, "required", chosen.function.name, parallel=parallel)
    if isinstance(chosen, AllowedTools):
        allowed = [tool.function.name for tool in chosen.allowed_tools.tools]
        return tool_use(functions, chosen.allowed_tools.mode, None, parallel=parallel, allowed=allowed)
    return tool_use(functions, chosen, None, parallel=parallel)


def _functions(request: ChatRequest) -> ToolUse:
    if request.tools:
        raise BadRequest("'tools' and 'functions' are both set; remove 'functions', the older form.", param="tools")
    if request.tool_choice is not None:
        raise BadRequest(
            "'tool_choice' is set together with 'functions'; use 'function_call' with them.", param="tool_choice"
        )
    functions = [_function(spec, f"functions[{index}]") for index, spec in enumerate(request.functions or ())]
    chosen = request.function_call
    only = chosen.name if isinstance(chosen, FunctionName) else None
    choice = chosen if isinstance(chosen, str) else None
    return tool_use(functions, choice, only, parallel=False, param="function_call")


def _function(spec: FunctionSpec, param: str) -> Function:
    return function_of(spec.name, spec.description, spec.parameters, is_strict=bool(spec.strict), param=param)
