"""How a chat template writes tool calls: which format reads them, and what in it contradicts a format."""

from __future__ import annotations

import json
from typing import Any

from millrace.errors import BadRequest
from millrace.text.answer_events import CallStart
from millrace.text.answer_parser import AnswerForm, answer_parser
from millrace.text.chat.template import ChatTemplate
from millrace.text.tools.formats import FORMATS, Function, ToolFormat

_NAME, _ARGUMENTS = "get_weather", {"city": "Paris"}
_FUNCTION = Function(
    _NAME, "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
_ASKED = {"role": "user", "content": "Weather in Paris?"}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_MAX_SHOWN = 120


def written_calls(template: ChatTemplate) -> list[str]:
    """The turn in which the template writes a call: after the opening of an answer, and after the user's turn. They
    differ where it opens an answer with more than it writes into the history, such as reasoning.

    Raises a `BadRequest` if the template refuses calls.
    """
    asked, opened = _render(template, [_ASKED]), _render(template, [_ASKED], add_generation_prompt=True)
    called = _render(template, [_ASKED, _CALLED])
    return [_after(before, called) for before in (opened, asked)]


def format_of_template(template: ChatTemplate, shown: ToolFormat) -> ToolFormat:
    """`shown`, which the template's source suggests, unless only another format reads the call that it writes: a source
    may put markers together from parts, or mention those of others."""
    if not template.takes_tools:
        return shown
    try:
        turns = written_calls(template)
    except BadRequest:
        return shown
    return next((spec for spec in (shown, *FORMATS.values()) if reads_call(spec, turns)), shown)


def contradictions(template: ChatTemplate, spec: ToolFormat) -> list[str]:
    """What in the template misleads a model whose calls are read as `spec`, one sentence each. A template that takes no
    tools cannot: then Millrace itself writes them."""
    if not template.takes_tools:
        return []
    try:
        turns = written_calls(template)
        asked = _render(template, [_ASKED])
    except BadRequest as error:
        return [f"A conversation with a call cannot be written: {error.message}"]
    found = []
    if '{{"' in asked:
        example = asked[asked.index('{{"') :].split("\n")[0]
        found.append(f"The chat template shows calls with doubled braces, which models copy: {example[:_MAX_SHOWN]}")
    if not any(_NAME in turn for turn in turns):
        found.append("The chat template leaves calls out of the history, so the model does not see what it called.")
    elif not reads_call(spec, turns):
        written = " ".join(turns[0].split())[:_MAX_SHOWN]
        found.append(
            f"The chat template writes a call as {written}, which the tool format '{spec.name}' does not read."
        )
    return found


def reads_call(spec: ToolFormat, turns: list[str]) -> bool:
    return any(_reads(spec, turn) for turn in turns)


def _render(template: ChatTemplate, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    return template.render(messages, tools=[_FUNCTION.for_template()], add_generation_prompt=add_generation_prompt)


def _reads(spec: ToolFormat, turn: str) -> bool:
    parser = answer_parser(AnswerForm(spec, (_FUNCTION,)))
    calls = [event.call for event in parser.push(turn) + parser.finish() if isinstance(event, CallStart)]
    if len(calls) != 1 or calls[0].name != _NAME or not calls[0].is_complete:
        return False
    return bool(json.loads(calls[0].arguments) == _ARGUMENTS)


def _after(before: str, text: str) -> str:
    """The text without what both begin with."""
    pairs = enumerate(zip(before, text, strict=False))
    return text[next((place for place, (one, other) in pairs if one != other), min(len(before), len(text))) :]
