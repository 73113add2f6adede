"""How one model writes tool calls and reasoning, by its chat template or by the operator's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.text.chat.template import ChatTemplate
from millrace.text.reasoning import formats as reasoning_formats
from millrace.text.reasoning.formats import ReasoningFormat
from millrace.text.template_calls import format_of_template
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools import formats as tool_formats
from millrace.text.tools.formats import ToolFormat

AUTO = "auto"


class ChatText(Protocol):
    """What rendering a conversation and reading its answer need of a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def formats(self) -> AnswerFormats: ...


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    tools: ToolFormat
    reasoning: ReasoningFormat | None
    """None: the model does not reason."""


def check_names(tool_format: str, reasoning_format: str) -> None:
    """Raise a `ConfigError` if one of the settings names no format."""
    if tool_format != AUTO:
        tool_formats.format_named(tool_format)
    if reasoning_format not in (AUTO, reasoning_formats.NONE):
        reasoning_formats.format_named(reasoning_format)


def choose_formats(template: ChatTemplate, tool_format: str, reasoning_format: str) -> AnswerFormats:
    if tool_format == AUTO:
        shown = tool_formats.detect_format(template.tool_source, takes_tools=template.takes_tools)
        tools = format_of_template(template, shown)
    else:
        tools = tool_formats.format_named(tool_format)
    reasoning: ReasoningFormat | None = None
    if reasoning_format == AUTO:
        reasoning = reasoning_formats.detect_format(template.source)
    elif reasoning_format != reasoning_formats.NONE:
        reasoning = reasoning_formats.format_named(reasoning_format)
    return AnswerFormats(tools, reasoning)
