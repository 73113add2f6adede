"""The formats in which models write tool calls, and which of them a model uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import ConfigError

BodyKind = Literal["json", "named", "python"]


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""
    is_strict: bool = False
    """Its arguments always follow the schema."""
    has_parameters: bool = True
    """False if the client sent no schema; the template then sees none."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.has_parameters:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}

    def schema_text(self) -> str:
        """The schema, which allows objects only."""
        return json.dumps({"type": "object", **self.parameters}, ensure_ascii=False)

    def parameter_names(self) -> tuple[str, ...]:
        properties = self.parameters.get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    openings: tuple[str, ...] = ()
    """Any of these begins calls, anywhere in the answer. The first is the one that a forced call is written with."""
    close: str = ""
    """What ends the calls of one opening."""
    body: BodyKind = "json"
    bare: str = ""
    """Calls may begin the answer without an opening, with one of these characters."""
    is_list: bool = False
    """The calls of an answer are one list."""
    arguments_key: str = "arguments"
    marks: tuple[str, ...] = ()
    """Text in a chat template that shows this format; the openings if empty."""
    short_ids: bool = False
    """Templates accept only call ids of nine letters or digits."""

    @property
    def signs(self) -> tuple[str, ...]:
        return self.marks or self.openings


FORMATS: dict[str, ToolFormat] = {
    spec.name: spec
    for spec in (
        ToolFormat("mistral", ("[TOOL_CALLS]",), body="named", is_list=True, short_ids=True),
        ToolFormat("llama3", ("<|python_tag|>",), bare="{", arguments_key="parameters"),
        ToolFormat("llama4", ("<|python_start|>",), "<|python_end|>", body="python", bare="[", is_list=True),
        ToolFormat("gemma", ("```tool_code",), "```", body="python", marks=("tool_code",)),
        ToolFormat("jamba", ("<tool_calls>",), "</tool_calls>", is_list=True),
        ToolFormat("internlm", ("<|action_start|><|plugin|>",), "<|action_end|>", arguments_key="parameters"),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), is_list=True, marks=("<|tool_call|>",)),
        ToolFormat("phi4", ("functools",), is_list=True),
        ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
        ToolFormat("pythonic", (), body="python", bare="[", is_list=True),
        ToolFormat("json", ("```json",), "```", bare="{[", marks=("\0",)),
    )
}
"""In the order in which a chat template is searched for them."""

DEFAULT_FORMAT = "hermes"
"""Of models whose chat template takes no tools."""

VLLM_PARSERS = {
    "hermes": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "mistral": "mistral",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "llama4",
    "pythonic": "pythonic",
    "olmo3": "pythonic",
    "jamba": "jamba",
    "internlm": "internlm",
    "granite": "granite",
    "phi4_mini_json": "phi4",
    "xlam": "json",
    "openai_json": "json",
}
"""Names of vLLM's `--tool-call-parser`, and the format that each stands for."""


def format_named(name: str) -> ToolFormat:
    """A format by its own name or by vLLM's name of its parser."""
    chosen = FORMATS.get(name) or FORMATS.get(VLLM_PARSERS.get(name, ""))
    if chosen is None:
        known = ", ".join(sorted({*FORMATS, *VLLM_PARSERS}))
        raise ConfigError(
            f"The tool format {name!r} is not known; use one of {known}, or auto to take it from the chat template.",
            param="model.tool_format",
        )
    return chosen


def detect_format(template: str, *, takes_tools: bool) -> ToolFormat:
    """The format that a chat template writes."""
    if takes_tools:
        for spec in FORMATS.values():
            if spec.signs and any(sign in template for sign in spec.signs):
                return spec
        if '"parameters"' in template or "'parameters'" in template:
            return FORMATS["llama3"]
        return FORMATS["json"]
    return FORMATS[DEFAULT_FORMAT]


def names_of(functions: Sequence[Function]) -> frozenset[str]:
    return frozenset(function.name for function in functions)
