"""Tools of a response: functions, functions in namespaces, and tools that OpenAI's servers run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from millrace.serve.http.schema import Strict, described


class ResponseFunction(Strict, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("JSON schema of the arguments.")] = None
    strict: Annotated[bool | None, described("Hold the arguments to the schema; default false.")] = None
    defer_loading: Annotated[bool | None, described("Accepted: the model sees every function at once.")] = None


class BuiltInTool(msgspec.Struct, tag_field="type"):
    """A tool that this server does not run. It is left out, and the header `X-Millrace-Warning` says so."""


class CustomTool(BuiltInTool, tag="custom"):
    """Left out: calls have JSON arguments here, never free text."""


class WebSearchTool(BuiltInTool, tag="web_search"):
    """Left out: this server searches nothing."""


class DatedWebSearchTool(BuiltInTool, tag="web_search_2025_08_26"):
    """Left out: this server searches nothing."""


class WebSearchPreviewTool(BuiltInTool, tag="web_search_preview"):
    """Left out: this server searches nothing."""


class DatedWebSearchPreviewTool(BuiltInTool, tag="web_search_preview_2025_03_11"):
    """Left out: this server searches nothing."""


class FileSearchTool(BuiltInTool, tag="file_search"):
    """Left out: this server searches nothing."""


class ToolSearchTool(BuiltInTool, tag="tool_search"):
    """Left out: the model sees every function at once."""


class LocalShellTool(BuiltInTool, tag="local_shell"):
    """Left out: offer a shell as a function."""


class ShellTool(BuiltInTool, tag="shell"):
    """Left out: offer a shell as a function."""


class ApplyPatchTool(BuiltInTool, tag="apply_patch"):
    """Left out: offer it as a function."""


class CodeInterpreterTool(BuiltInTool, tag="code_interpreter"):
    """Left out: this server runs no code."""


class ProgrammaticCallingTool(BuiltInTool, tag="programmatic_tool_calling"):
    """Left out: this server runs no code."""


class ImageGenerationTool(BuiltInTool, tag="image_generation"):
    """Left out: this server makes text only."""


class McpTool(BuiltInTool, tag="mcp"):
    """Left out: this server calls no other servers."""


class ComputerTool(BuiltInTool, tag="computer"):
    """Left out: this server operates no computer."""


class ComputerPreviewTool(BuiltInTool, tag="computer_use_preview"):
    """Left out: this server operates no computer."""


class ResponseNamespace(Strict, kw_only=True, tag_field="type", tag="namespace"):
    """Functions under a common name. A call of one has the function's `name` and its `namespace`."""

    name: str
    description: Annotated[str | None, described("Shown to the model with each function.")] = None
    tools: list[ResponseFunction | CustomTool]


def joined_name(namespace: str, name: str) -> str:
    """What the model calls a function of a namespace: every format of calls can write it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


UsedTool = ResponseFunction | ResponseNamespace
ResponseTool = (
    ResponseFunction
    | ResponseNamespace
    | CustomTool
    | WebSearchTool
    | DatedWebSearchTool
    | WebSearchPreviewTool
    | DatedWebSearchPreviewTool
    | FileSearchTool
    | ToolSearchTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
    | CodeInterpreterTool
    | ProgrammaticCallingTool
    | ImageGenerationTool
    | McpTool
    | ComputerTool
    | ComputerPreviewTool
)


class ResponseNamedTool(Strict, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str


TOOL_TYPES = [str(tool.__struct_config__.tag) for tool in get_args(ResponseTool)]


class ResponseAllowedTool(msgspec.Struct, kw_only=True):
    """A function, all functions of a namespace, or a tool that this server does not run."""

    type: Annotated[str, described("As in `tools`.", enum=TOOL_TYPES)] = "function"
    name: str | None = None


class ResponseAllowedTools(Strict, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Only these of the tools may be called."""

    mode: Literal["auto", "required"]
    tools: list[ResponseAllowedTool]


ResponseToolChoice = Literal["none", "auto", "required"] | ResponseNamedTool | ResponseAllowedTools
