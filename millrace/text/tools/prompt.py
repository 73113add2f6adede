"""Tools for models whose chat template takes none: described in the system prompt, and written into the history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.text.tools.formats import Function, ToolFormat
from millrace.text.tools.written import write_calls

_RESULT = "<tool_response>\n{}\n</tool_response>"


def system_text(functions: Sequence[Function], spec: ToolFormat) -> str:
    listed = "\n".join(json.dumps(function.for_template(), ensure_ascii=False) for function in functions)
    example = write_calls(spec, [("function_name", {"parameter": "value"})])
    return (
        "You can call functions to help with the user's request. These are the functions, each as a JSON object:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write its name and its arguments like this and nothing else:\n"
        f"{example}\n\n"
        "The result of a call is given to you between <tool_response> and </tool_response>."
    )


def plain_messages(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Function], spec: ToolFormat, *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation without tools: system, user and assistant messages only, in the shape of a template's input."""
    plain: list[dict[str, Any]] = []
    for before, message in zip((None, *messages), messages, strict=False):
        shown = _plain(message, spec)
        if before is not None and _is_next_to_result(before, message):
            plain[-1] = {**plain[-1], "content": f"{text_of(plain[-1])}\n{text_of(shown)}"}
        else:
            plain.append(shown)
    if not functions:
        return plain
    added = system_text(functions, spec)
    role = "system" if takes_system else "user"
    if plain and plain[0]["role"] == role:
        return [{**plain[0], "content": f"{text_of(plain[0])}\n\n{added}"}, *plain[1:]]
    return [{"role": role, "content": added}, *plain]


def _is_next_to_result(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """True if both are shown as the user's and one is a result. They are joined: many templates want turns to
    alternate."""
    roles = {before["role"], message["role"]}
    return "tool" in roles and roles <= {"tool", "user"}


def _plain(message: Mapping[str, Any], spec: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": _RESULT.format(text_of(message))}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = write_calls(spec, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    said = text_of(message)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{said}\n{written}" if said else written}


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def shorten_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Give calls the nine-character ids that Mistral's templates require, the same for a call and its result."""
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = _short_id(call["id"])


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
