"""Tools of a response as a `ToolUse`."""

from __future__ import annotations

from millrace.serve.generate.chat.tools import ToolUse, function_of, tool_use
from millrace.serve.responses.schemas import InputTokensRequest, ResponsesRequest
from millrace.serve.responses.schemas_items import ResponseAllowedTools, ResponseNamedTool


def tools_of(body: ResponsesRequest | InputTokensRequest) -> ToolUse:
    functions = [
        function_of(tool.name, tool.description, tool.parameters, is_strict=bool(tool.strict), param=f"tools[{index}]")
        for index, tool in enumerate(body.tools or ())
    ]
    chosen, parallel = body.tool_choice, body.parallel_tool_calls
    if isinstance(chosen, ResponseNamedTool):
        return tool_use(functions, "required", chosen.name, parallel=parallel)
    if isinstance(chosen, ResponseAllowedTools):
        allowed = [tool.name for tool in chosen.tools]
        return tool_use(functions, chosen.mode, None, parallel=parallel, allowed=allowed)
    return tool_use(functions, chosen, None, parallel=parallel)
