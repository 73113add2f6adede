"""Items of responses: messages, function calls and their results, reasoning; as clients send and receive them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from millrace.serve.generate.fields.documents import DocumentCache
from millrace.serve.generate.logprobs import TokenLogprob
from millrace.serve.http.schema import Strict, described

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Annotated[ItemStatus | None, described("Accepted.")]
Id = Annotated[str | None, described("Accepted; items get new ids.")]


# ── input ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class ResponseInputCall(Strict, kw_only=True):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Id = None
    status: Status = None
    namespace: Annotated[str | None, described("Of a function in a namespace.")] = None
    parsed_arguments: Annotated[Raw | UnsetType, described("Accepted, without effect: `openai` adds it.")] = UNSET
    caller: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class ResponseOutputText(Strict, kw_only=True):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class ResponseInputResult(Strict, kw_only=True):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | list[ResponseOutputText], described("A text, or text parts.")]
    id: Id = None
    status: Status = None
    name: Annotated[str | None, described("Accepted, without effect: `call_id` says which call it is.")] = None
    namespace: Annotated[str | None, described("Accepted, without effect.")] = None
    caller: Annotated[Raw | UnsetType, described("Accepted, without effect.")] = UNSET


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class ResponseInputReasoning(Strict, kw_only=True):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, described("Accepted and left out.")] = None
    id: Id = None
    status: Status = None


class ResponseItemReference(Strict, kw_only=True):
    """An item that a stored response put out."""

    type: Literal["item_reference"]
    id: str


# ── output, and items as they are stored ──────────────────────────────────────────────────────────────────────────────
class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class InputText(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="input_text"):
    text: str
    cache: DocumentCache | None = None


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call. Its arguments are cut if the status is `incomplete`."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET
    """Of a function in a namespace."""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: ItemStatus


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class InputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of a stored response's input."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: Literal["completed"] = "completed"
    content: list[InputText | OutputText]


class FunctionResultItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: Literal["completed"] = "completed"


InputItem = InputMessage | FunctionCallItem | FunctionResultItem | ReasoningItem


def schema_of_input() -> dict[str, Any]:
    names = ["ResponseInputMessage", "ResponseInputCall", "ResponseInputResult", "ResponseInputReasoning"]
    names.append("ResponseItemReference")
    items = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return {
        "oneOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"oneOf": items}},
        ]
    }
