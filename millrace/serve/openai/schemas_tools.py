"""Tools in the bodies of chat completions: what clients send and what they receive."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.http.schema import Strict, described

OfLitellm = Annotated[Raw | UnsetType, described("Accepted, without effect: `litellm` adds it.")]


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class FunctionSpec(Strict, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("JSON schema of the arguments.")] = None
    strict: Annotated[
        bool | None, described("Hold the arguments to the schema also where the model decides by itself to call.")
    ] = None


class ToolSpec(Strict, kw_only=True):
    """A tool; only functions are supported."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(Strict, kw_only=True):
    name: str


class NamedTool(Strict, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedTool(Strict, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedToolList(Strict, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedTools(Strict, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Only these of the tools may be called."""

    allowed_tools: AllowedToolList


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(Strict, kw_only=True):
    name: str
    arguments: Annotated[str | dict[str, Any], described("JSON text, or the object itself.")] = ""
    parsed_arguments: Annotated[Raw | UnsetType, described("Accepted, without effect: `openai` adds it.")] = UNSET
    provider_specific_fields: OfLitellm = UNSET


class MessageCall(Strict, kw_only=True):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: OfLitellm = UNSET


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON text. Not a complete object if the finish reason is `length`."""


class AnswerCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    """The first delta of a call has its id and name, the others have more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
